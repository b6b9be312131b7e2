"""``specgov engines``: what the sidecar knows of its engines, and an operator's hand on them."""

from __future__ import annotations

from typing import Annotated, Literal

import grpc
import tyro

from specgov.controller.cli import options, output, remote
from specgov.controller.cli.errors import CliError
from specgov.controller.cli.policy_facts import policy_facts, policy_lines
from specgov.proto.v1 import specgov_pb2, specgov_pb2_grpc

EngineId = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENGINE_ID")]
ModeName = Annotated[Literal["active", "shadow", "frozen", "off"], tyro.conf.Positional]
PolicyText = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="POLICY")]

ALL = "all"
"""In place of an engine's id: every engine."""

SHOWN_DECISIONS = 10
"""How many of the last decisions are printed; --json holds all that the sidecar sends."""

IN_SHADOW = " (in shadow nothing runs them: what the policy tries teaches it nothing, so it tries again)"


def list_engines(*, target: remote.Target = None, json: bool = False) -> None:
    """List the engines that the sidecar knows.

    For example: specgov engines --json

    Args:
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.
        json: Print JSON.

    """
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        answer = stub.ListEngines(specgov_pb2.ListEnginesRequest(), timeout=remote.TIMEOUT_S)
    if json:
        output.print_json([remote.plain(engine) for engine in answer.engines])
    elif not answer.engines:
        output.console().print("no engines yet")
    else:
        columns = (
            "engine",
            "model",
            "connected",
            "mode",
            "policy",
            "num_steps",
            "batch",
            "reports",
            "switches",
        )
        console = output.console()
        console.print(output.table(columns, (_row(engine) for engine in answer.engines)))
        for engine in answer.engines:
            for line in policy_lines(engine):
                console.print(line, soft_wrap=True)


def _row(engine: specgov_pb2.EngineState) -> tuple[object, ...]:
    last = engine.last_step if engine.HasField("last_step") else None
    return (
        engine.info.engine_id,
        engine.info.model or "-",
        "yes" if engine.connected else "no",
        _mode_word(engine.mode),
        engine.policy,
        last.num_steps if last else "-",
        last.batch_size if last else "-",
        engine.reports,
        engine.tier_switches,
    )


def show(engine_id: EngineId, /, *, target: remote.Target = None, json: bool = False) -> None:
    """Show one engine: its state, what the policy believes, the last decisions.

    For example: specgov engines show my-engine

    Args:
        engine_id: As in specgov engines.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.
        json: Print JSON.

    """
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        request = specgov_pb2.GetEngineRequest(engine_id=engine_id)
        answer = stub.GetEngine(request, timeout=remote.TIMEOUT_S)
    if json:
        output.print_json(remote.plain(answer))
    else:
        _print_engine(answer)


def mode(engine_id: EngineId, mode: ModeName, /, *, target: remote.Target = None) -> None:
    """Set an engine's mode, or that of all engines.

    For example: specgov engines mode my-engine shadow, or specgov engines mode all shadow

    active decides and learns; shadow decides and logs while the engine follows its own rule; frozen decides
    and learns nothing; off sends no decisions. Engines that the sidecar does not know yet get the mode that
    was last set for them by command, where it keeps states, else that of its configuration.

    Args:
        engine_id: As in specgov engines; all for every engine that the sidecar knows.
        mode: The new mode.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.

    """
    wanted = specgov_pb2.Mode.Value(f"MODE_{mode.upper()}")
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        if engine_id == ALL:
            _set_mode_of_all(stub, wanted)
        else:
            _set_mode(stub, engine_id, wanted)


def _set_mode(
    stub: specgov_pb2_grpc.ControllerAdminStub, engine_id: str, wanted: specgov_pb2.Mode.ValueType
) -> None:
    request = specgov_pb2.SetModeRequest(engine_id=engine_id, mode=wanted)
    answer = stub.SetMode(request, timeout=remote.TIMEOUT_S)
    output.console().print(f"{engine_id}: mode {_mode_word(answer.engine.mode)}")


def _set_mode_of_all(stub: specgov_pb2_grpc.ControllerAdminStub, wanted: specgov_pb2.Mode.ValueType) -> None:
    """Whoever switches all off in need must not be stopped by the first that cannot be, nor think it done."""
    listed = stub.ListEngines(specgov_pb2.ListEnginesRequest(), timeout=remote.TIMEOUT_S)
    if not listed.engines:
        raise CliError(
            "no engine has connected since the sidecar's start, so no mode was set: give the command again "
            "when one has; engines that come get the mode last set by command, else that of the configuration"
        )
    failure: grpc.RpcError | None = None
    for engine in listed.engines:
        try:
            _set_mode(stub, engine.info.engine_id, wanted)
        except grpc.RpcError as error:
            why = error.details()
            output.console().print(f"{engine.info.engine_id}: mode not set: {why}", soft_wrap=True)
            failure = failure or error
    if failure is not None:
        raise failure


def policy(engine_id: EngineId, policy: PolicyText, /, *, target: remote.Target = None) -> None:
    """Give an engine another policy; it starts without what the old one learnt.

    For example: specgov engines policy my-engine threshold:32:3

    Args:
        engine_id: As in specgov engines.
        policy: A decision rule and its options, as NAME[:OPTION...].
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.

    """
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        request = specgov_pb2.SetPolicyRequest(engine_id=engine_id, policy=policy)
        answer = stub.SetPolicy(request, timeout=remote.TIMEOUT_S)
    given = answer.engine.policy_text or answer.engine.policy  # an older sidecar has the name alone
    output.console().print(f"{engine_id}: policy {given}", soft_wrap=True)


def watch(
    engine_id: Annotated[str, tyro.conf.Positional, options.option("[ENGINE_ID]")] = "",
    /,
    *,
    every_steps: int = 50,
    count: int = 0,
    target: remote.Target = None,
    json: bool = False,
) -> None:
    """Follow the engines step by step, until interrupted.

    For example: specgov engines watch my-engine --every-steps 10

    Args:
        engine_id: As in specgov engines; default: all of them.
        every_steps: Show one step in this many.
        count: End after this many lines; 0: never.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.
        json: Print one JSON object a line.

    """
    request = specgov_pb2.WatchRequest(
        engine_id=engine_id, every_steps=options.non_negative("--every-steps", every_steps)
    )
    options.non_negative("--count", count)
    with remote.sidecar(remote.target_or_default(target)) as channel:
        stub = specgov_pb2_grpc.ControllerAdminStub(channel)
        summaries = stub.Watch(request)
        for shown, summary in enumerate(summaries, start=1):
            output.print_line(remote.plain(summary) if json else _summary_line(summary))
            if shown == count:
                summaries.cancel()
                break


def _summary_line(step: specgov_pb2.StepSummary) -> str:
    ms = f"{step.step_ms:6.2f} ms" if step.HasField("step_ms") else "     - ms"
    rate = (
        f"{step.output_tokens_per_s:8.0f} tokens/s"
        if step.HasField("output_tokens_per_s")
        else f"{'-':>8} tokens/s"
    )
    return (
        f"{step.engine_id}  step {step.step_id:>8}  batch {step.batch_size:>4}  num_steps {step.num_steps}  "
        f"accept length {step.accept_length:4.2f}  {ms}  {rate}  next {step.decided_num_steps} "
        f"({_why(step)})"
    )


def _print_engine(answer: specgov_pb2.GetEngineResponse) -> None:
    engine, info = answer.engine, answer.engine.info
    facts: list[tuple[str, object]] = [
        ("engine", f"{info.engine_id} ({info.engine} {info.engine_version})".replace(" )", ")")),
        ("model, draft, GPU", ", ".join(text or "-" for text in (info.model, info.draft, info.gpu))),
        ("tiers", ", ".join(map(str, info.tiers))),
        ("connected", "yes" if engine.connected else "no"),
        ("mode", _mode_word(engine.mode)),
        ("policy", f"{engine.policy} {engine.policy_version}".strip()),
        *policy_facts(engine),
        (
            "reports",
            f"{engine.reports}, rejected {engine.reports_rejected}, dropped by the engine "
            f"{engine.reports_dropped}, left out {engine.reports_shed}",
        ),
        (
            "decisions",
            f"{engine.decisions}, tier switches {engine.tier_switches}"
            + (IN_SHADOW if engine.mode == specgov_pb2.MODE_SHADOW else ""),
        ),
    ]
    if engine.policy_failure:
        facts.append(("policy failed", engine.policy_failure))
    if engine.HasField("guard"):
        facts += _guard_facts(engine.guard)
    if engine.HasField("decision_lag_steps_p50"):
        facts.append(("decision lag p50", f"{engine.decision_lag_steps_p50:g} steps"))
    if engine.HasField("last_step"):
        facts.append(("last step", _summary_line(engine.last_step).partition("  ")[2]))
    console = output.console()
    for name, value in facts:
        console.print(f"{name:<18} {value}", soft_wrap=True)
    if answer.estimates:
        rows = [(name, f"{value:.4g}") for name, value in sorted(answer.estimates.items())]
        console.print("What the policy believes:")
        console.print(output.table(("name", "value"), rows))
    if answer.last_decisions:
        columns = ("decision", "known step", "batch size", "num_steps", "reason")
        rows_of_decisions = [
            (
                decision.decision_id,
                decision.known_step_id,
                f"{decision.batch_size_min}..{decision.batch_size_max}",
                decision.num_steps,
                _why(decision),
            )
            for decision in answer.last_decisions[-SHOWN_DECISIONS:]
        ]
        console.print("Last decisions, oldest first:")
        console.print(output.table(columns, rows_of_decisions))


def _guard_facts(guard: specgov_pb2.GuardState) -> list[tuple[str, object]]:
    if not guard.enabled:
        return [("guard", "off")]
    standing = "the policy decides"
    if guard.standing_cause:
        word = _cause_word(guard.standing_cause)
        standing = f"{word}: the policy is not asked"
        if guard.standing_cause == specgov_pb2.GUARD_CAUSE_STALE:
            standing = "the policy decides again with the next report: the engine is idle, or hangs"
        elif guard.clears_after_steps:
            standing += f" for {guard.clears_after_steps} steps at least"
        if not guard.learning:
            standing += ", and nothing is learnt"
    facts: list[tuple[str, object]] = [
        ("guard", standing),
        (
            "  budget",
            f"{guard.budget_tokens:.0f} of {guard.allowance_tokens:.0f} tokens may be lost against "
            f"{guard.baseline} (estimated)",
        ),
    ]
    if guard.estimated_baseline_tokens:
        share = 100.0 * guard.estimated_gain_tokens / guard.estimated_baseline_tokens
        facts.append(
            ("  against it", f"{share:+.1f} %, {guard.estimated_gain_tokens:+.0f} tokens so far (estimated)")
        )
    for name, counts in (("  alarms", guard.alarms), ("  stepped in", guard.interventions)):
        if counts:
            facts.append((name, ", ".join(f"{_cause_word(c.cause)} {c.times}" for c in counts)))
    if guard.HasField("silent_s"):
        facts.append(("  last report", f"{guard.silent_s:.1f} s ago"))
    return facts


def _cause_word(cause: int) -> str:
    name = specgov_pb2.GuardCause.Name(specgov_pb2.GuardCause.ValueType(cause))
    return name.removeprefix("GUARD_CAUSE_").lower()


def _mode_word(mode: int) -> str:
    return remote.enum_word(specgov_pb2.Mode.Name(specgov_pb2.Mode.ValueType(mode)))


def _why(decision: specgov_pb2.Decision | specgov_pb2.StepSummary) -> str:
    """The decision's reason, and the guard's cause where it stepped in."""
    reason = _reason_word(decision.reason)
    return f"{reason}: {_cause_word(decision.guard_cause)}" if decision.guard_cause else reason


def _reason_word(reason: int) -> str:
    return remote.enum_word(specgov_pb2.Reason.Name(specgov_pb2.Reason.ValueType(reason)))
