"""``specgov decide``: one question to the sidecar."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from specgov.controller.cli import options, output, remote
from specgov.controller.cli.errors import UsageError
from specgov.proto.v1 import specgov_pb2, specgov_pb2_grpc


def decide(
    *,
    batch_size: int,
    context: Annotated[str, tyro.conf.arg(metavar="TOKENS[,TOKENS...]")] = "512",
    accept_length: Annotated[float | None, options.option("TOKENS")] = None,
    at_num_steps: Annotated[int | None, options.option("K")] = None,
    acceptance: Annotated[str | None, options.option("P[,P...]")] = None,
    tiers: Annotated[str | None, options.option("K[,K...]")] = None,
    profile: Annotated[str, options.option("NAME")] = "",
    policy: Annotated[str, options.option("POLICY")] = "",
    target: remote.Target = None,
    json: bool = False,
) -> None:
    """Ask the sidecar one question: how many draft steps for this batch?

    For example: specgov decide --batch-size 32 --accept-length 2.4 --at-num-steps 3

    The answer is the decision and, for each tier, the output tokens expected of one step of the whole batch,
    its duration and the output rate. Exit codes: 0, 2 for a wrong question, 3 if no sidecar answers.

    Args:
        batch_size: Running requests.
        context: Tokens of each request so far, prompt and output: one number for all, or one each.
        accept_length: Mean tokens of a request in one step, bonus token included; needs --at-num-steps.
        at_num_steps: The draft steps at which the accept length was seen.
        acceptance: P(draft accepted | the drafts before it were), by position; instead of --accept-length.
        tiers: The values of num_steps to choose from; default: the profile's.
        profile: Step-time profile; default: the sidecar's. See specgov profiles list.
        policy: Decision rule, as threshold:32:3; default: the tier with the largest expected output rate.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.
        json: Print JSON.

    """
    request = specgov_pb2.DecideRequest(
        batch_size=options.non_negative("--batch-size", batch_size),
        seq_len_tokens=options.numbers("--context", context, int),
        tiers=options.numbers("--tiers", tiers, int) if tiers is not None else [],
        profile=profile,
        policy=policy,
    )
    _set_acceptance(request, accept_length, at_num_steps, acceptance)
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.SpeculationControllerStub(channel)
        decision = stub.Decide(request, timeout=remote.TIMEOUT_S)
    if json:
        output.print_json(_as_json(decision))
    else:
        _print(decision)


def _set_acceptance(
    request: specgov_pb2.DecideRequest,
    accept_length: float | None,
    at_num_steps: int | None,
    acceptance: str | None,
) -> None:
    if (accept_length is None) != (at_num_steps is None):
        raise UsageError(
            "decide: --accept-length and --at-num-steps go together: an accept length means nothing "
            "without the num_steps at which it was seen"
        )
    if (accept_length is None) == (acceptance is None):
        raise UsageError("decide: give either --acceptance or --accept-length with --at-num-steps")
    if acceptance is not None:
        request.by_position.probability.extend(options.numbers("--acceptance", acceptance, float))
    elif accept_length is not None and at_num_steps is not None:
        request.accept_length_at.accept_length = accept_length
        request.accept_length_at.num_steps = options.non_negative("--at-num-steps", at_num_steps)


def _as_json(decision: specgov_pb2.Decision) -> dict[str, Any]:
    answer = remote.plain(decision)
    for estimate, values in zip(decision.estimates, answer["estimates"], strict=True):
        values["output_tokens_per_s"] = _output_rate(estimate)
    return answer


def _output_rate(estimate: specgov_pb2.TierEstimate) -> float:
    return 1000.0 * estimate.expected_tokens / estimate.expected_ms if estimate.expected_ms else 0.0


def _print(decision: specgov_pb2.Decision) -> None:
    console = output.console()
    console.print(f"num_steps {decision.num_steps}, by {decision.policy} {decision.policy_version}".rstrip())
    ranges = [(decision.batch_size_min, decision.batch_size_max, decision.num_steps)]
    ranges += [(r.batch_size_min, r.batch_size_max, r.num_steps) for r in decision.neighbours]
    for low, high, num_steps in sorted(ranges):
        sizes = f"{low}" if low == high else f"{low} to {high}"
        console.print(f"  batch size {sizes}: num_steps {num_steps}")
    if not decision.estimates:
        return
    best = max(_output_rate(estimate) for estimate in decision.estimates)
    rows = [
        (
            f"{estimate.num_steps}{' *' if estimate.num_steps == decision.num_steps else ''}",
            f"{estimate.expected_tokens:.1f}",
            f"{estimate.expected_ms:.2f}",
            f"{_output_rate(estimate):.0f}",
            f"{100 * _output_rate(estimate) / best:.1f} %" if best else "",
        )
        for estimate in decision.estimates
    ]
    columns = ("num_steps", "tokens/step", "ms/step", "tokens/s", "of the best")
    console.print(output.table(columns, rows))
