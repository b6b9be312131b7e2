"""Says, without starting a model, whether a server with these arguments would be governed, and why not.

As a program, in SGLang's environment, with the server's own arguments after ``--``:
``python -m specgov.sglang_plugin.doctor [--target TARGET] -- ARGUMENTS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import grpc

from specgov.client.errors import ClientError
from specgov.client.tls import is_unix, may_not_open, open_channel
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc
from specgov.sglang_plugin import engine_probe, report, v059, versions
from specgov.sglang_plugin.checks import start_problems, why_idle
from specgov.sglang_plugin.engine_probe import Arguments
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.report import Check
from specgov.sglang_plugin.settings import TARGET_VARIABLE, Settings, read_settings
from specgov.sglang_plugin.versions import Version

SIDECAR = "sidecar"
"""The name of the check of the sidecar."""
SIDECAR_TIMEOUT_S = 5.0
_NO_PROFILE = "none"
"""A profile's name that an engine may give, and a question may not."""
DEFAULT_SETTINGS = Settings("unix:///nowhere")
"""For the checks that go on though the plugin's own settings could not be read."""


def diagnose(arguments: Sequence[str], environment: Mapping[str, str]) -> list[Check]:
    """Every check that can be made, in the order in which things happen at a server's start.

    Args:
        arguments: the server's own, without the program.
        environment: the server's; what the plugin does not read of it counts for SGLang only if it is this
            process's.

    """
    settings, checks = _settings(environment)
    try:
        version_text = versions.installed_version()
        version = versions.parse_version(version_text)
    except PluginError as error:
        checks.append(
            Check.failed(
                "SGLang",
                str(error),
                "run this with the Python that starts the server: python -m specgov.sglang_plugin.doctor",
            )
        )
        return [*checks, _sidecar(settings)]
    if version == v059.RELEASE:
        from specgov.sglang_plugin.v059 import probe

        checks += probe.diagnose(arguments, settings or DEFAULT_SETTINGS, environment)
        return [*checks, *_simulated(environment), _sidecar(settings)]
    checks += [_version(version_text, version), engine_probe.registration(environment)]
    if version >= versions.OLDEST:
        with engine_probe.quiet():
            checks += engine_probe.hooks(version)
            engine_probe.load_other_plugins()
            read = engine_probe.read_arguments(arguments)
            worker = engine_probe.worker(read)
            checks += _arguments(read, settings or DEFAULT_SETTINGS, version, worker)
    checks += _simulated(environment)
    return [*checks, _sidecar(settings)]


def _settings(environment: Mapping[str, str]) -> tuple[Settings | None, list[Check]]:
    remedy = "set SPECGOV_TARGET to where the sidecar listens, as in unix:///run/specgov.sock"
    try:
        settings = read_settings(environment)
    except PluginError as error:
        return None, [Check.failed("settings", str(error), "correct it")]
    if settings is not None:
        tiers = "the server's" if settings.tiers is None else ",".join(map(str, settings.tiers))
        return settings, [
            Check.fine("settings", f"target {settings.target}, mode {settings.mode}, tiers {tiers}")
        ]
    if environment.get("SPECGOV_MODE", "").strip() == "off" or environment.get("SPECGOV_CONFIG", "").strip():
        return None, [
            Check.failed("settings", "the mode is off: the plugin does nothing", "set the mode active")
        ]
    return None, [Check.failed("settings", "SPECGOV_TARGET is not set: the plugin does nothing", remedy)]


def _version(text: str, version: Version) -> Check:
    if version < versions.OLDEST:
        oldest = ".".join(map(str, versions.OLDEST))
        return Check.failed(
            "SGLang", f"{text} cannot turn speculation off in a step", f"use {oldest} or newer"
        )
    newer = version > versions.NEWEST
    return Check.fine("SGLang", f"{text}{' (newer than any that was tried)' if newer else ''}")


def _arguments(read: Arguments, settings: Settings, version: Version, worker: Check) -> list[Check]:
    facts = read.facts
    if facts is None:
        return [Check.failed("arguments", read.refusal, "see python -m sglang.launch_server --help")]
    checks = []
    if read.refusal:
        checks.append(
            Check.failed("arguments", f"SGLang refuses them: {read.refusal}", "change that argument")
        )
    else:
        checks.append(Check.fine("arguments", "SGLang accepts them"))
    checks.append(worker)
    if (idle := why_idle(facts)) is not None:
        if facts.algorithm is None:
            return [*checks, Check.failed("adaptive", idle, "add --speculative-algorithm and a draft model")]
        return [*checks, Check.skipped("adaptive", f"nothing to do: {idle}")]
    try:
        tiers = versions.engine_tiers(facts.adaptive_config)
    except (OSError, ValueError, AttributeError) as error:
        return [*checks, Check.failed("tiers", f"{facts.adaptive_config}: {error}", "correct that file")]
    reason = (
        None if facts.adaptive or not read.resolved else versions.adaptive_unsupported_reason(read.record)
    )
    problems = start_problems(settings, facts, version, tiers, reason)
    checks += [Check.failed("governed", problem.what, problem.remedy) for problem in problems]
    if read.refusal and not problems:
        checks.append(Check.skipped("governed", "the server does not start with these arguments"))
    elif not problems:
        checks.append(
            Check.fine(
                "governed",
                f"adaptive is live: tiers {', '.join(map(str, tiers))}, starting with {facts.num_steps}",
            )
        )
    return checks


def _simulated(environment: Mapping[str, str]) -> list[Check]:
    """Simulated acceptance fills requests with one token unless told otherwise, which no text ever is."""
    if not environment.get("SGLANG_SIMULATE_ACC_LEN", "").strip():
        return []
    if environment.get("SGLANG_SIMULATE_ACC_TOKEN_MODE", "").strip() == "real-draft-token":
        return [Check.fine("simulated acceptance", "on, with the draft's own tokens")]
    return [
        Check.failed(
            "simulated acceptance",
            "on, and every request becomes one token over and over: mixture-of-experts targets look too fast",
            "set SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token",
        )
    ]


def _sidecar(settings: Settings | None) -> Check:
    if settings is None:
        return Check.skipped(SIDECAR, "no target is known")
    target = settings.target
    start = f"start one: specgov serve --listen {target}"
    # Of the engines' service: the operators' may be at another address, or want a token.
    profile = "" if settings.profile == _NO_PROFILE else settings.profile
    question = pb.DecideRequest(
        batch_size=1, profile=profile, accept_length_at=pb.AcceptLengthAt(accept_length=1.5, num_steps=1)
    )
    try:
        with open_channel(target, settings.tls) as channel:
            pb_grpc.SpeculationControllerStub(channel).Decide(question, timeout=SIDECAR_TIMEOUT_S)
    except ClientError as error:
        return Check.failed(SIDECAR, str(error), "correct that file or its name")
    except grpc.RpcError as error:
        return _no_answer(target, error.code(), " ".join((error.details() or "").split()), start)
    over = " over TLS" if settings.tls is not None and not is_unix(target) else ""
    return Check.fine(SIDECAR, f"answers at {target}{over} and speaks this protocol")


def _no_answer(target: str, code: grpc.StatusCode, details: str, start: str) -> Check:
    if code is grpc.StatusCode.UNAVAILABLE and (why := may_not_open(target)):
        found, _, to_do = why.partition("; ")
        return Check.failed(SIDECAR, found, to_do)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Check.failed(SIDECAR, f"nothing answers at {target}: {details}", start)
    if code is grpc.StatusCode.INVALID_ARGUMENT and "profile" in details:
        return Check.failed(SIDECAR, f"it refuses this engine: {details}", "correct SPECGOV_PROFILE")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Check.failed(SIDECAR, f"{target} does not answer within {SIDECAR_TIMEOUT_S:g} s", "restart it")
    return Check.failed(
        SIDECAR,
        f"what answers at {target} does not speak this protocol: {details} ({code.name})",
        "give the sidecar and the plugin the same release of Specgov, or name another target",
    )


def split_arguments(arguments: Sequence[str], usage: str) -> tuple[str | None, list[str]]:
    """``[--target TARGET] -- ARGUMENTS``: the target, if there is one, and the server's arguments.

    Raises:
        PluginError: they do not have this form.

    """
    own, separator, servers = _partition(list(arguments), "--")
    if not separator or len(own) not in (0, 2) or (own and own[0] != "--target"):
        raise PluginError(f"usage: {usage} [--target TARGET] -- SERVER'S ARGUMENTS")
    return (own[1] if own else None), servers


def _partition(items: list[str], separator: str) -> tuple[list[str], bool, list[str]]:
    if separator not in items:
        return items, False, []
    index = items.index(separator)
    return items[:index], True, items[index + 1 :]


def main(arguments: Sequence[str]) -> int:
    """Print the checks; 0 where none failed, 1 where one did, 2 for wrong usage."""
    try:
        target, servers = split_arguments(arguments, "python -m specgov.sglang_plugin.doctor")
    except PluginError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if target is not None:
        os.environ[TARGET_VARIABLE] = target
    return report.print_checks(diagnose(servers, os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
