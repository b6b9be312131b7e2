"""What the sidecar knows of one engine, also while it is away: rule, mode, counters, last decisions."""

from __future__ import annotations

import statistics
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specgov.controller.config import ServeConfig
from specgov.controller.decision import DecisionBuilder
from specgov.controller.engine_state import (
    UnfitStateError,
    batch_of,
    expect,
    identity,
    policy_snapshot,
    restore_policy,
)
from specgov.controller.fallback import Fallback
from specgov.controller.guard.estimates import Outlook
from specgov.controller.guard.guard import Guard
from specgov.controller.logs import get_logger
from specgov.controller.profiles import step_time_for
from specgov.controller.validation import RejectedMessage, check_engine_rule, check_report
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, EngineSpec, Policy, PolicyContext, Reason, StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.session import Session

KEPT_DECISIONS = 32
LAG_WINDOW_REPORTS = 200
LAG_WINDOW_DECISIONS = 256
MAX_FAILURE_CHARS = 500
GENERATIONS_BETWEEN_BOOTS = 101
"""Added to slot generations with each boot; odd, so that 256 boots differ."""

MODES = {"active": pb.MODE_ACTIVE, "shadow": pb.MODE_SHADOW, "frozen": pb.MODE_FROZEN, "off": pb.MODE_OFF}
_MODE_NAMES = {number: name for name, number in MODES.items()}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was reported, with what the report says beside the step itself.

    ``lag_steps`` is the number of steps from the newest result that the followed decision knew to this step;
    None where the step followed none that is remembered. ``round_trip_ms`` is the engine's own measure, None
    where it had no new one.
    """

    step: StepObservation
    followed_decision_id: int
    lag_steps: int | None
    engine_rule_num_steps: int | None
    reports_dropped: int
    round_trip_ms: float | None = None


class Engine:
    """One engine's state, from its first stream on.

    Every method wants ``lock`` held; no lock spans engines. ``session`` is the stream that has the engine.

    A rule that raises, or chooses what the engine cannot do, is set aside for ``Fallback`` until the engine
    is given a rule again; ``policy_failure`` says why, and is empty otherwise. ``outlook`` is what the newest
    decision is expected to bring, None where its policy has no model.

    Raises:
        PolicyError: the configured policy cannot be used on this engine.
        RejectedMessage: the profile that the engine names is not known.

    """

    def __init__(
        self, info: pb.EngineInfo, spec: EngineSpec, config: ServeConfig, clock: Callable[[], float]
    ) -> None:
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.info = info
        self.spec = spec
        self.mode: pb.Mode.ValueType = MODES[config.mode]
        self.policy_text = config.policy
        self.policy_failure = ""
        self.reports = 0
        self.reports_rejected = 0
        self.reports_dropped = 0
        self.decisions = 0
        self.tier_switches = 0
        self.restored_reports = 0
        self.last_record: StepRecord | None = None
        self.last_decisions: deque[pb.Decision] = deque(maxlen=KEPT_DECISIONS)
        self.outlook: Outlook | None = None
        self._config = config
        self._clock = clock
        self._rng = self._new_rng()
        self._batch = BatchView(batch_size=1)
        self._last_step_id = 0
        self._generation_offset = 0
        self._round_trip_ms: float | None = None
        self._last_decision_id = 0
        self._known_step_ids: deque[int] = deque(maxlen=LAG_WINDOW_DECISIONS)
        self._lags: deque[int] = deque(maxlen=LAG_WINDOW_REPORTS)
        self._guarded: tuple[object, ...] = ()
        self._use_policy(config.policy)

    def connect(self, session: Session, info: pb.EngineInfo, spec: EngineSpec) -> Session | None:
        """Give the engine to a new stream; returns the stream that had it, if any.

        A new boot restarts the step count. The rule and its estimates stay, unless the engine can do other
        things than before or serves another model, draft or GPU: what was learnt says nothing of those.

        Raises:
            PolicyError: the policy cannot be used on this engine any more.
            RejectedMessage: the profile that the engine names is not known.

        """
        before = (self.info, self.spec)
        self.info, self.spec = info, spec
        if (_nature(info), spec) != (_nature(before[0]), before[1]):
            try:
                self._use_policy(self.policy_text)
            except ValueError:
                self.info, self.spec = before
                raise
        if info.boot_id != before[0].boot_id:
            self._last_step_id = 0
            self._generation_offset = (self._generation_offset + GENERATIONS_BETWEEN_BOOTS) % 256
        self.guard.stream_began(new_boot=info.boot_id != before[0].boot_id)
        self._last_decision_id = 0
        self._known_step_ids.clear()
        older, self.session = self.session, session
        return older

    @property
    def change_mark(self) -> object:
        """Another one whenever what ``snapshot`` takes may have changed."""
        return self.reports, self.mode, self.policy_text, self.policy, self.info.boot_id

    def snapshot(self) -> dict[str, Any] | None:
        """What is to outlive the sidecar (``engine_state``), None if there is nothing.

        A rule that failed leaves what was saved before as it is.
        """
        if self.policy_failure or (not self.reports and not self._set_by_hand()):
            return None
        return {
            "engine_id": self.info.engine_id,
            "identity": identity(self.info, self.spec, self._config.profile),
            "by_hand": self._set_by_hand(),
            "policy": policy_snapshot(self.policy_text, self.policy),
            "reports": self.restored_reports + self.reports,
            "boot_id": self.info.boot_id,
            "last_step_id": self._last_step_id,
            "generation_offset": self._generation_offset,
            "batch": asdict(self._batch),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from a snapshot, on an engine that was just made; after an error it is as if just made.

        Raises:
            UnfitStateError: the snapshot is not of this engine, or not of its policy.
            PolicyError: the policy that was set by hand cannot be used any more.

        """
        text = self.policy_text
        try:
            expect(identity(self.info, self.spec, self._config.profile), saved["identity"])
            by_hand = saved["by_hand"]
            text = by_hand.get("policy", text)
            policy = self._make_policy(text)
            restore_policy(policy, text, saved["policy"])
            batch, same_boot = batch_of(saved["batch"]), saved["boot_id"] == self.info.boot_id
            last_step_id, offset = int(saved["last_step_id"]), int(saved["generation_offset"])
            reports, mode = int(saved["reports"]), MODES.get(by_hand.get("mode", ""), self.mode)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            self._rng = self._new_rng()
            self._use_policy(self.policy_text)
            raise error if isinstance(error, ValueError) else UnfitStateError(_said(error)) from error
        self._install(policy)
        self.policy_text, self.mode, self.restored_reports = text, mode, reports
        self._batch = batch
        self._last_step_id = last_step_id if same_boot else 0
        self._generation_offset = (offset + (0 if same_boot else GENERATIONS_BETWEEN_BOOTS)) % 256

    def _new_rng(self) -> np.random.Generator:
        return np.random.default_rng([self._config.seed, zlib.crc32(self.info.engine_id.encode())])

    def _set_by_hand(self) -> dict[str, str]:
        """The mode and the policy where they are others than the configured ones."""
        found = {"mode": _MODE_NAMES[self.mode], "policy": self.policy_text}
        configured = {"mode": self._config.mode, "policy": self._config.policy}
        return {name: value for name, value in found.items() if value != configured[name]}

    def observe(self, report: pb.StepReport) -> StepRecord:
        """Take a report in, and learn from it where that is allowed.

        Raises:
            RejectedMessage: it is bad; it was counted and nothing else changed.

        """
        try:
            step = check_report(report, self.spec, self._last_step_id, self._generation_offset)
            engine_rule = check_engine_rule(report, self.spec)
        except RejectedMessage as error:
            self.reports_rejected += 1
            self.guard.rejected(error.cause, report)
            raise
        lag = self._lag_steps(report)
        self._last_step_id = step.step_id
        self._batch = BatchView.of(step)
        self.reports += 1
        self.reports_dropped += report.reports_dropped
        self.last_record = StepRecord(
            step, report.decision_id, lag, engine_rule, report.reports_dropped, _round_trip_ms(report)
        )
        if self.last_record.round_trip_ms is not None:
            self._round_trip_ms = self.last_record.round_trip_ms
        if not step.warm_up:
            try:
                if self._admits(step, report) and self.mode != pb.MODE_FROZEN:
                    self.policy.observe(step)
            except Exception as error:  # noqa: BLE001 - whatever a rule raises, its engine is served on
                self._set_policy_aside(error)
        return self.last_record

    def decide(self) -> pb.Decision | None:
        """The decision for the newest batch, a batch of one before the first report; None in mode off."""
        if self.mode == pb.MODE_OFF:
            return None
        try:
            decision = self._ask_policy()
        except Exception as error:  # noqa: BLE001 - whatever a rule raises, its engine is served on
            self._set_policy_aside(error)
            decision = self._ask_policy()
        if self.last_decisions and self.last_decisions[-1].num_steps != decision.num_steps:
            self.tier_switches += 1
        self.decisions += 1
        self._last_decision_id += 1
        self._known_step_ids.append(self._last_step_id)
        self.last_decisions.append(decision)
        self.outlook = (
            self.guard.outlook(decision.num_steps, self._batch.batch_size) if decision.estimates else None
        )
        return decision

    def forget(self) -> None:
        """Let the rule forget what no longer holds, since the weights changed."""
        self.guard.draft_changed()
        try:
            self.policy.forget()
        except Exception as error:  # noqa: BLE001 - whatever a rule raises, its engine is served on
            self._set_policy_aside(error)

    def estimates(self) -> Mapping[str, float]:
        """What the rule believes, by name; empty where it cannot say."""
        try:
            return self.policy.estimates()
        except Exception as error:  # noqa: BLE001 - it can decide all the same
            get_logger().warning(
                "policy cannot say what it believes", engine_id=self.info.engine_id, problem=_said(error)
            )
            return {}

    def set_policy(self, text: str) -> None:
        """Replace the rule; what the old one had learnt is gone.

        Raises:
            PolicyError: no such policy, or it cannot be used on this engine.

        """
        self._use_policy(text)
        self.policy_text = text

    def state(self) -> pb.EngineState:
        """The engine as the admin service shows it."""
        state = pb.EngineState(
            info=self.info,
            connected=self.session is not None,
            mode=self.mode,
            policy=self.policy.name,
            policy_version=self.policy.version,
            reports=self.reports,
            reports_rejected=self.reports_rejected,
            reports_dropped=self.reports_dropped,
            decisions=self.decisions,
            tier_switches=self.tier_switches,
            policy_failure=self.policy_failure,
            policy_text=self.policy_text,
            restored_reports=self.restored_reports,
            guard=self.guard.state(),
        )
        if self.last_record is not None:
            state.last_step.CopyFrom(self.summary(self.last_record))
        if self._lags:
            state.decision_lag_steps_p50 = statistics.median(self._lags)
        return state

    def summary(self, record: StepRecord) -> pb.StepSummary:
        """A step in short, beside the newest decision."""
        step = record.step
        summary = pb.StepSummary(
            engine_id=self.info.engine_id,
            step_id=step.step_id,
            batch_size=step.batch_size,
            num_steps=step.num_steps,
            accept_length=step.output_tokens / len(step.accepted) if len(step.accepted) else 0.0,
            waiting_requests=step.waiting_requests,
            kv_use_ratio=step.kv_use_ratio,
            round_trip_ms=self._round_trip_ms,
        )
        if step.step_ms is not None:
            summary.step_ms = step.step_ms
            summary.output_tokens_per_s = 1000.0 * step.output_tokens / step.step_ms
        if self.last_decisions:
            summary.decided_num_steps = self.last_decisions[-1].num_steps
            summary.reason = self.last_decisions[-1].reason
            summary.guard_cause = self.last_decisions[-1].guard_cause
        if self.outlook is not None:
            summary.expected_tokens_per_s = 1000.0 * self.outlook.tokens / self.outlook.ms
            summary.baseline_tokens_per_s = 1000.0 * self.outlook.baseline_tokens / self.outlook.ms
        return summary

    def _use_policy(self, text: str) -> None:
        policy = self._make_policy(text)
        nature = (_nature(self.info), self.spec)
        if nature != self._guarded:
            self.guard = Guard(self._config.guard, self.info.engine_id, self._policy_context())
            self._guarded = nature
        self.guard.policy_changed()
        self._install(policy)
        self.policy_failure = ""

    def _make_policy(self, text: str) -> Policy:
        # Who may set a policy may not thereby open files; who starts the sidecar may.
        return make_policy(text, self._policy_context(), files=text == self._config.policy)

    def _policy_context(self) -> PolicyContext:
        return PolicyContext(
            engine=self.spec,
            rng=self._rng,
            clock=self._clock,
            step_time=step_time_for(self.info, self._config.profile, self.spec.graph_batch_sizes),
        )

    def _install(self, policy: Policy) -> None:
        self.policy = policy
        self._builder = DecisionBuilder(self.spec, policy, self._config.ttl_steps, self._config.ttl_ms)

    def _set_policy_aside(self, error: Exception) -> None:
        self.policy_failure = _said(error)
        get_logger().error(
            "policy failed and is set aside; its engine gets its smallest tier until it is given a policy",
            engine_id=self.info.engine_id,
            policy=self.policy_text,
            exc_info=error,
        )
        self._install(Fallback(self.spec))

    def _ask_policy(self) -> pb.Decision:
        choice, cause = self.guard.decide(self.policy, self._batch)
        reason = cause.reason if cause else choice.reason
        if self.mode == pb.MODE_SHADOW:
            reason = Reason.SHADOW  # whatever the guard did: the engine must not apply it
        elif self.mode == pb.MODE_FROZEN and not cause:
            reason = Reason.FROZEN
        decision = self._builder.build(
            choice,
            self._batch.batch_size,
            decision_id=self._last_decision_id + 1,
            known_step_id=self._last_step_id,
            reason=reason,
        )
        if cause:
            decision.guard_cause = int(cause)  # type: ignore[assignment]  # the enums' values are the same
        return decision

    def _admits(self, step: StepObservation, report: pb.StepReport) -> bool:
        """Whether the guard lets the policy learn from the step."""
        followed = report.decision_id != 0 and self.mode in (pb.MODE_ACTIVE, pb.MODE_FROZEN)
        return self.guard.admit(step, followed=followed, reports_dropped=report.reports_dropped)

    def _lag_steps(self, report: pb.StepReport) -> int | None:
        """Steps from the newest result that the followed decision knew; None if that is not remembered."""
        newer = self._last_decision_id - report.decision_id
        if report.decision_id == 0 or not 0 <= newer < len(self._known_step_ids):
            return None
        known_step_id = self._known_step_ids[-1 - newer]
        if known_step_id == 0:
            return None
        lag = report.step_id - known_step_id
        self._lags.append(lag)
        return lag


def _round_trip_ms(report: pb.StepReport) -> float | None:
    return report.round_trip_us / 1000.0 if report.HasField("round_trip_us") else None


def _nature(info: pb.EngineInfo) -> tuple[str, str, str, int, str]:
    """What an engine's estimates are about."""
    return info.model, info.draft, info.gpu, info.tensor_parallel_size, info.profile


def _said(error: Exception) -> str:
    """The error in one line, clipped."""
    return f"{type(error).__name__}: {error}"[:MAX_FAILURE_CHARS]
