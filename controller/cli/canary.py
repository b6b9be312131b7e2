"""``specgov engines canary``: let a candidate decide a share of an engine's steps, and compare."""

from __future__ import annotations

from typing import Annotated

import tyro

from specgov.controller.cli import options, output, remote
from specgov.controller.cli.errors import UsageError
from specgov.controller.cli.policy_facts import canary_line
from specgov.proto.v1 import specgov_pb2, specgov_pb2_grpc


def canary(
    engine_id: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENGINE_ID")],
    /,
    *,
    policy: Annotated[str, options.option("POLICY")] = "",
    share: float = 0.1,
    block_steps: int = 64,
    stop: bool = False,
    target: remote.Target = None,
) -> None:
    """Let a candidate policy decide some blocks of an engine's steps, drawn at random.

    For example: specgov engines canary my-engine --policy ppo --share 0.1

    specgov engines show ENGINE_ID compares the two. To promote the candidate with what it has learnt:
    specgov engines policy ENGINE_ID POLICY, while the canary runs.

    Args:
        engine_id: As in specgov engines.
        policy: The candidate: a decision rule and its options, as NAME[:OPTION...].
        share: Share of the blocks that the candidate decides, between 0 and 1.
        block_steps: Steps of a block.
        stop: End the canary instead; what it found stays to be seen.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.

    """
    if bool(policy) == stop:
        raise UsageError("canary takes --policy POLICY to begin one, or --stop to end it")
    request = specgov_pb2.SetCanaryRequest(engine_id=engine_id)
    if not stop:
        request.policy, request.share = policy, share
        request.block_steps = options.non_negative("--block-steps", block_steps)
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        answer = stub.SetCanary(request, timeout=remote.TIMEOUT_S)
    if answer.engine.HasField("canary"):
        output.console().print(f"{engine_id}: canary {canary_line(answer.engine.canary)}", soft_wrap=True)
    else:
        output.console().print(f"{engine_id}: there was no canary")
