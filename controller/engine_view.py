"""An engine and its steps as messages, for operators."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.engine import Engine
    from specgov.controller.step_record import StepRecord


def state_of(engine: Engine, lags: Sequence[int]) -> pb.EngineState:
    """The engine as the admin service shows it."""
    state = pb.EngineState(
        info=engine.info,
        connected=engine.session is not None,
        mode=engine.mode,
        policy=engine.policy.name,
        policy_version=engine.policy.version,
        reports=engine.reports,
        reports_rejected=engine.reports_rejected,
        reports_dropped=engine.reports_dropped,
        reports_shed=engine.reports_shed,
        decisions=engine.decisions,
        tier_switches=engine.tier_switches,
        policy_failure=engine.policy_failure,
        restored_reports=engine.restored_reports,
        guard=engine.guard.state(),
        **engine.seat.facts(),
    )
    if engine.last_record is not None:
        state.last_step.CopyFrom(engine.summary(engine.last_record))
    if lags:
        state.decision_lag_steps_p50 = statistics.median(lags)
    return state


def summary_of(engine: Engine, record: StepRecord, round_trip_ms: float | None) -> pb.StepSummary:
    """A step in short, beside the newest decision."""
    step = record.step
    summary = pb.StepSummary(
        engine_id=engine.info.engine_id,
        step_id=step.step_id,
        batch_size=step.batch_size,
        num_steps=step.num_steps,
        accept_length=step.output_tokens / len(step.accepted) if len(step.accepted) else 0.0,
        waiting_requests=step.waiting_requests,
        kv_use_ratio=step.kv_use_ratio,
        round_trip_ms=round_trip_ms,
    )
    if step.step_ms is not None:
        summary.step_ms = step.step_ms
        summary.output_tokens_per_s = 1000.0 * step.output_tokens / step.step_ms
    if engine.last_decisions:
        summary.decided_num_steps = engine.last_decisions[-1].num_steps
        summary.reason = engine.last_decisions[-1].reason
        summary.guard_cause = engine.last_decisions[-1].guard_cause
    if engine.outlook is not None:
        summary.expected_tokens_per_s = 1000.0 * engine.outlook.tokens / engine.outlook.ms
        summary.baseline_tokens_per_s = 1000.0 * engine.outlook.baseline_tokens / engine.outlook.ms
    return summary
