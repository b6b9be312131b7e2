"""What the sidecar knows of one engine, also while it is away: rule, mode, counters, last decisions."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specgov.controller.bundles import Bundles
from specgov.controller.config import ServeConfig
from specgov.controller.engine_metrics import Tally
from specgov.controller.engine_state import (
    UnfitStateError,
    batch_of,
    expect,
    identity,
    nature,
    policy_snapshot,
    restore_policy,
)
from specgov.controller.engine_view import state_of, summary_of
from specgov.controller.guard.estimates import Outlook
from specgov.controller.guard.guard import Guard
from specgov.controller.logs import get_logger
from specgov.controller.seat import Held, Seat, said
from specgov.controller.step_record import Lost, StepRecord
from specgov.controller.validation import RejectedMessage, check_engine_rule, check_report
from specgov.policies.types import BatchView, EngineSpec, Policy, Reason
from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.session import Session

KEPT_DECISIONS = 32
LAG_WINDOW_REPORTS = 200
LAG_WINDOW_DECISIONS = 256
GENERATIONS_BETWEEN_BOOTS = 101
"""Added to slot generations with each boot; odd, so that 256 boots differ."""

MODES = {"active": pb.MODE_ACTIVE, "shadow": pb.MODE_SHADOW, "frozen": pb.MODE_FROZEN, "off": pb.MODE_OFF}
_FOLLOWED_MODES = (pb.MODE_ACTIVE, pb.MODE_FROZEN)
_MODE_NAMES = {number: name for name, number in MODES.items()}


class Engine:
    """One engine's state, from its first stream on.

    Every method wants ``lock`` held; no lock spans engines. ``session`` is the stream that has the engine.

    ``seat`` has its rule. ``outlook`` is what the newest decision is expected to bring, None where its rule
    has no model. ``tally`` is where its steps are counted, set by the metrics.

    Raises:
        PolicyError: the configured policy cannot be used on this engine.
        RejectedMessage: the profile that the engine names is not known.

    """

    def __init__(
        self,
        info: pb.EngineInfo,
        spec: EngineSpec,
        config: ServeConfig,
        clock: Callable[[], float],
        bundles: Bundles | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.info = info
        self.spec = spec
        self.mode: pb.Mode.ValueType = MODES[config.mode]
        self.reports = 0
        self.reports_rejected = 0
        self.reports_dropped = 0
        self.reports_shed = 0
        self.decisions = 0
        self.tier_switches = 0
        self.restored_reports = 0
        self.last_record: StepRecord | None = None
        self.last_decisions: deque[pb.Decision] = deque(maxlen=KEPT_DECISIONS)
        self.outlook: Outlook | None = None
        self.tally: Tally | None = None
        self._config = config
        self._batch = BatchView(batch_size=1)
        self._last_step_id = 0
        self._lost = Lost()
        self._generation_offset = 0
        self._round_trip_ms: float | None = None
        self._last_decision_id = 0
        self._known_step_ids: deque[int] = deque(maxlen=LAG_WINDOW_DECISIONS)
        self._lags: deque[int] = deque(maxlen=LAG_WINDOW_REPORTS)
        self.seat = Seat(config, clock, bundles or Bundles(config), info, spec)
        self.guard = self._new_guard()

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
        if nature(info, spec) == nature(*before):
            self.seat.same_engine(info, spec)
        else:
            try:
                self.seat.begin(info, spec, self.seat.text)
                self.guard = self._new_guard()
            except ValueError:
                self.info, self.spec = before
                raise
        if info.boot_id != before[0].boot_id:
            self._last_step_id = 0
            self._generation_offset = (self._generation_offset + GENERATIONS_BETWEEN_BOOTS) % 256
        self.guard.stream_began(new_boot=info.boot_id != before[0].boot_id)
        if self.seat.canary is not None:
            self.seat.canary.stream_began()
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
            policy = self.seat.make(text)
            restore_policy(policy, text, saved["policy"])
            batch, same_boot = batch_of(saved["batch"]), saved["boot_id"] == self.info.boot_id
            last_step_id, offset = int(saved["last_step_id"]), int(saved["generation_offset"])
            reports, mode = int(saved["reports"]), MODES.get(by_hand.get("mode", ""), self.mode)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            self.seat.begin_anew()
            raise error if isinstance(error, ValueError) else UnfitStateError(said(error)) from error
        self.seat.resume(Held(text, policy))
        self.mode, self.restored_reports = mode, reports
        self._batch = batch
        self._last_step_id = last_step_id if same_boot else 0
        self._generation_offset = (offset + (0 if same_boot else GENERATIONS_BETWEEN_BOOTS)) % 256

    def _set_by_hand(self) -> dict[str, str]:
        """The mode and the policy where they are others than the configured ones."""
        found = {"mode": _MODE_NAMES[self.mode], "policy": self.policy_text}
        configured = {"mode": self._config.mode, "policy": self._config.policy}
        return {name: value for name, value in found.items() if value != configured[name]}

    def observe(self, report: pb.StepReport) -> StepRecord:
        """Take a report in, and learn from it where that is allowed.

        Raises:
            RejectedMessage: it is bad; it was counted, with what it says was dropped; nothing else changed.

        """
        try:
            step = check_report(report, self.spec, self._last_step_id, self._generation_offset)
            has_rule = report.HasField("engine_rule_num_steps")
            engine_rule = check_engine_rule(report, self.spec) if has_rule else None
        except RejectedMessage as error:
            self.reject(report)
            self.guard.rejected(error.cause, report)
            raise
        decision_id, lost = report.decision_id, self._lost
        dropped = report.reports_dropped + lost.dropped
        lag_steps = self._lag_steps(step.step_id, decision_id)
        round_trip_ms = report.round_trip_us / 1000.0 if report.HasField("round_trip_us") else None
        record = StepRecord(step, decision_id, lag_steps, engine_rule, dropped, round_trip_ms, lost.shed)
        if lost.shed or lost.dropped:
            self._lost = Lost()
        self.last_record = record
        self._last_step_id = step.step_id
        self._batch = BatchView.of(step)
        self.reports += 1
        self.reports_dropped += dropped
        if round_trip_ms is not None:
            self._round_trip_ms = round_trip_ms
        try:
            learns = self.guard.admit(
                step,
                followed=decision_id != 0 and self.mode in _FOLLOWED_MODES,
                reports_dropped=record.reports_lost,
                by_candidate=self.seat.is_candidates(decision_id),
            )
            if learns and self.mode != pb.MODE_FROZEN:
                self.seat.deciding.observe(step)
        except Exception as error:  # noqa: BLE001 - whatever a rule raises, its engine is served on
            self.seat.fail(error)
        if self.seat.is_trying and not step.warm_up:
            self.seat.stepped(step, decision_id, self.guard.trips)
            if self.seat.has_canary and self.guard.candidate_falls_short:
                self.seat.stop_canary("the candidate's output rate fell short of the baseline's")
        return record

    def shed(self, report: pb.StepReport) -> None:
        """Leave a report out unread, for newer ones; the next one that is taken in has a gap before it."""
        self.reports_shed += 1
        self._lost.shed += 1
        self._lost.dropped += report.reports_dropped

    def reject(self, report: pb.StepReport) -> None:
        """Count a report as rejected; what it says was dropped before it is told of by the next one."""
        self.reports_rejected += 1
        self._lost.dropped += report.reports_dropped

    def decide(self) -> pb.Decision | None:
        """The decision for the newest batch, a batch of one before the first report; None in mode off."""
        if self.mode == pb.MODE_OFF:
            return None
        decision = self._ask_policy()
        num_steps = decision.num_steps
        if self.last_decisions and self.last_decisions[-1].num_steps != num_steps:
            self.tier_switches += 1
        self.decisions += 1
        self._last_decision_id += 1
        self._known_step_ids.append(self._last_step_id)
        self.last_decisions.append(decision)
        self.outlook = self.guard.outlook(num_steps, self._batch.batch_size) if decision.estimates else None
        return decision

    def forget(self) -> None:
        """Let the rule forget what no longer holds, since the weights changed."""
        self.guard.draft_changed()
        try:
            self.seat.deciding.forget()
        except Exception as error:  # noqa: BLE001 - whatever a rule raises, its engine is served on
            self.seat.fail(error)

    def estimates(self) -> Mapping[str, float]:
        """What the rule believes, by name; empty where it cannot say."""
        try:
            return self.policy.estimates()
        except Exception as error:  # noqa: BLE001 - it can decide all the same
            get_logger().warning(
                "policy cannot say what it believes", engine_id=self.info.engine_id, problem=said(error)
            )
            return {}

    def set_policy(self, text: str) -> None:
        """Replace the rule; what the old one had learnt stays with it, for a rollback.

        Raises:
            PolicyError: no such policy, or it cannot be used on this engine.

        """
        self._seat(Held(text, self.seat.make(text)))

    def change_policy(self, text: str) -> pb.EngineState:
        """As ``set_policy``, but wants ``lock`` free; a canary's candidate keeps what it has learnt."""
        with self.lock:
            spec, held = self.spec, self.seat.candidate(text)
        held = held or self.seat.make_aside(text, self.lock)
        with self.lock:
            self._seat(held, spec)
            return self.refreshed()

    def try_policy(self, text: str) -> pb.EngineState:
        """Replace the rule by a bundle, on trial; wants ``lock`` free, and raises as ``set_policy``."""
        spec = self.spec
        held = self.seat.make_aside(text, self.lock, try_it=True)
        with self.lock:
            self._seat(held, spec, self._config.bundles.trial_steps)
            return self.refreshed()

    def roll_back(self) -> pb.EngineState:
        """Return to the rule before, with what it had learnt.

        Raises:
            PolicyError: there is none.

        """
        self.seat.roll_back()
        self.guard.policy_changed()
        return self.refreshed()

    def start_canary(self, text: str, share: float, block_steps: int) -> pb.EngineState:
        """Let a candidate decide a share of the steps; wants ``lock`` free, and raises as ``set_policy``."""
        spec = self.spec
        held = self.seat.make_aside(text, self.lock)
        with self.lock:
            self.seat.start_canary(held, share, block_steps, spec)
            self.guard.canary_began()
            return self.refreshed()

    def refreshed(self) -> pb.EngineState:
        """The engine's state after a command, for which a new decision was asked."""
        self.guard.commanded()
        if self.session is not None:
            self.session.refresh()
        return self.state()

    def state(self) -> pb.EngineState:
        """The engine as the admin service shows it."""
        return state_of(self, self._lags)

    def summary(self, record: StepRecord) -> pb.StepSummary:
        """A step in short, beside the newest decision."""
        return summary_of(self, record, self._round_trip_ms)

    @property
    def policy(self) -> Policy:
        """The engine's rule."""
        return self.seat.policy

    @property
    def policy_text(self) -> str:
        """What names it."""
        return self.seat.text

    @property
    def policy_failure(self) -> str:
        """Why it was set aside; empty if it was not."""
        return self.seat.failure

    def _seat(self, held: Held, for_spec: EngineSpec | None = None, trial_steps: int = 0) -> None:
        self.seat.seat(held, for_spec or self.spec, trial_steps, self.guard.trips)
        self.guard.policy_changed()

    def _new_guard(self) -> Guard:
        return Guard(self._config.guard, self.info.engine_id, self.seat.context())

    def _ask_policy(self) -> pb.Decision:
        """Whatever a rule raises, its engine is served on: by the rule before in a trial, else a fallback."""
        while True:
            try:
                return self._decide_by(self.seat.deciding)
            except Exception as error:
                if self.seat.failure:
                    raise  # the fallback itself
                self.seat.fail(error)

    def _decide_by(self, policy: Policy) -> pb.Decision:
        batch = self._batch
        choice, cause = self.guard.decide(policy, batch)
        reason = cause.reason if cause else choice.reason
        if self.mode == pb.MODE_SHADOW:
            reason = Reason.SHADOW  # whatever the guard did: the engine must not apply it
        elif self.mode == pb.MODE_FROZEN and not cause:
            reason = Reason.FROZEN
        decision = self.seat.build(
            choice, batch.batch_size, self._last_decision_id + 1, self._last_step_id, reason
        )
        if cause:
            decision.guard_cause = int(cause)  # type: ignore[assignment]  # the enums' values are the same
            if cause.reason is Reason.GUARD and self.seat.has_canary:
                # What it would have made of the other policy's choice is not known.
                decision.ClearField("propensity")
        return decision

    def _lag_steps(self, step_id: int, decision_id: int) -> int | None:
        """Steps from the newest result that the followed decision knew; None if that is not remembered."""
        newer = self._last_decision_id - decision_id
        if decision_id == 0 or not 0 <= newer < len(self._known_step_ids):
            return None
        known_step_id = self._known_step_ids[-1 - newer]
        if known_step_id == 0:
            return None
        lag = step_id - known_step_id
        self._lags.append(lag)
        return lag
