"""``specgov policy push|list|rollback``: new bundles for running engines, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from specgov.controller.cli import options, output, remote
from specgov.controller.cli.errors import CliError, UsageError
from specgov.proto.v1 import specgov_pb2, specgov_pb2_grpc

READ_TIMEOUT_S = 60.0
"""For answers that wait for bundles to be read."""


def push(
    bundle: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    /,
    *,
    engine: Annotated[str, options.option("ENGINE_ID")] = "",
    name: Annotated[str, options.option("NAME")] = "",
    only_store: bool = False,
    target: remote.Target = None,
) -> int:
    """Put a bundle into the store of the sidecar on this machine, and let engines try it.

    For example: specgov policy push out/bundle --engine my-engine

    The bundle is checked, copied into the sidecar's bundles.dir as NAME's next version, and then named to the
    sidecar. Each engine tries it for bundles.trial_steps steps: if it fails, or the guard trips, the policy
    before decides again.

    Args:
        bundle: The bundle's folder, as specgov export wrote it.
        engine: As in specgov engines; default: all that the sidecar knows.
        name: Name in the store; default: the bundle's own.
        only_store: Let no engine try it.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.

    """
    from specgov.controller import bundles

    if not bundle.is_dir():
        raise UsageError(f"{bundle} is no folder: name the folder that specgov export wrote")
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        store = _store(stub)
        if engine and not only_store:  # a name that is wrong is found before anything is stored
            stub.GetEngine(specgov_pb2.GetEngineRequest(engine_id=engine), timeout=remote.TIMEOUT_S)
        stored = bundles.push(bundle, store, name or None)
        output.console().print(
            f"{stored.name}@{stored.version}: in {store / stored.name / str(stored.version)}", soft_wrap=True
        )
        if only_store:
            return 0
        request = specgov_pb2.UseBundleRequest(name=stored.name, version=stored.version, engine_id=engine)
        answer = stub.UseBundle(request, timeout=READ_TIMEOUT_S)
    return _print_use(answer, stored.policy_text)


def _store(stub: specgov_pb2_grpc.ControllerAdminStub) -> Path:
    answer = stub.ListBundles(specgov_pb2.ListBundlesRequest(), timeout=READ_TIMEOUT_S)
    if not answer.folder:
        raise CliError("this sidecar has no store of bundles: start it with --bundles-dir FOLDER")
    if not Path(answer.folder).is_dir():
        raise CliError(
            f"the sidecar's store, {answer.folder}, is not on this machine: push where the sidecar runs"
        )
    return Path(answer.folder)


def _print_use(answer: specgov_pb2.UseBundleResponse, policy_text: str) -> int:
    console = output.console()
    for state in answer.engines:
        trial = f", on trial for {state.trial_steps_left} steps" if state.trial_steps_left else ""
        console.print(f"{state.info.engine_id}: policy {state.policy_text}{trial}", soft_wrap=True)
    for problem in answer.problems:
        console.print(f"not used by {problem}", soft_wrap=True)
    if not answer.engines and not answer.problems:
        console.print(f"no engines yet; for those to come: policy = {policy_text!r} in the configuration")
    return 1 if answer.problems else 0


def list_bundles(*, target: remote.Target = None, json: bool = False) -> None:
    """List the bundles in the sidecar's store, and who uses them.

    For example: specgov policy list

    Args:
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.
        json: Print JSON.

    """
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        answer = stub.ListBundles(specgov_pb2.ListBundlesRequest(), timeout=READ_TIMEOUT_S)
    if json:
        output.print_json(remote.plain(answer))
    elif not answer.folder:
        output.console().print("this sidecar has no store of bundles; --bundles-dir FOLDER gives it one")
    elif not answer.bundles:
        output.console().print(f"no bundles in {answer.folder} yet", soft_wrap=True)
    else:
        rows = [
            (f"{b.name}@{b.version}", b.weights_sha256[:12] or "-", ", ".join(b.engine_ids) or "-")
            for b in answer.bundles
        ]
        console = output.console()
        console.print(output.table(("bundle", "weights", "used by"), rows))
        for bundle in answer.bundles:
            if bundle.problem:
                console.print(f"{bundle.name}@{bundle.version}: {bundle.problem}", soft_wrap=True)


def rollback(
    engine_id: Annotated[str, tyro.conf.Positional, options.option("[ENGINE_ID]")] = "",
    /,
    *,
    target: remote.Target = None,
) -> None:
    """Give an engine back the policy that it had before, with what that had learnt.

    For example: specgov policy rollback my-engine

    Args:
        engine_id: As in specgov engines; default: all that have a policy to go back to.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.

    """
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        request = specgov_pb2.RollBackPolicyRequest(engine_id=engine_id)
        answer = stub.RollBackPolicy(request, timeout=remote.TIMEOUT_S)
    console = output.console()
    for state in answer.engines:
        console.print(f"{state.info.engine_id}: policy {state.policy_text}", soft_wrap=True)
    if not answer.engines:
        console.print("no engine has a policy to go back to")
