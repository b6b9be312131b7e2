"""One place between policy and engine: every decision passes here, and every report.

In this order:

1. A signal is broken (``alarms.py``), the newest report is old, or the policy's measured output rate fell
   short (``output_rate.py``): the policy is not asked, the baseline decides.
2. Otherwise the policy chooses, and its choice is refused where it switches tiers too often
   (``switching.py``: the tier is kept) or where its estimated loss cannot be paid (``budget.py``: the
   baseline decides). That its tiers are the engine's is checked first.
3. Whoever chose, tiers that would break a latency target are replaced (``latency.py``).

Losses are counted between what the latency targets leave of the two choices, so that a policy does not pay
for a target. Nothing here waits, and what it costs a decision is some microseconds beside the policy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from specgov.controller.decision import check_ranges
from specgov.controller.guard.accounts import Accounts
from specgov.controller.guard.alarms import Alarms
from specgov.controller.guard.backoff import Backoff
from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.estimates import Estimates, Outlook
from specgov.controller.guard.latency import Latency
from specgov.controller.guard.notices import Notices
from specgov.controller.guard.output_rate import OutputRate
from specgov.controller.guard.switching import Switching
from specgov.controller.validation import MAX_STEP_MS, Cause
from specgov.policies.registry import make_policy
from specgov.policies.tiers import nearest_threshold, tier_ranges
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    Policy,
    PolicyContext,
    PolicyError,
    Reason,
    StepObservation,
    TierRange,
)
from specgov.proto.v1 import specgov_pb2 as pb

DEFAULT_BASELINE = (32, 3)
"""Batch size and num_steps of the threshold that is the baseline where none is named: what the engine's own
client falls back to."""

_NONE, _FALLBACK = GuardCause.NONE, Reason.FALLBACK
_NOT_TOLD_OF_EACH_TIME = (GuardCause.OUTPUT_RATE, GuardCause.STALE)
"""The first is told of as it begins, as alarms are; the second is an idle engine, nothing to tell of."""
_IMPOSSIBLE = (Cause.IMPOSSIBLE_COUNT, Cause.OUT_OF_RANGE, Cause.NOT_A_NUMBER)
"""What is merely out of order or of another engine is refused too, and says nothing of the signals."""


class Verdict(NamedTuple):
    """What is sent, and why it is not the policy's own choice; NONE where it is."""

    choice: Choice
    cause: GuardCause


class Guard:
    """The guard of one engine.

    Args:
        config: what it allows.
        engine_id: for its latency targets and its log lines.
        context: the engine, its step times and the clock.

    Attributes: interventions: decisions that were not the policy's own, by cause. baseline, baseline_text:
        the rule to fall back to, by batch size and as it was named.

    Raises:
        PolicyError: the baseline cannot be used on this engine.

    """

    def __init__(self, config: GuardConfig, engine_id: str, context: PolicyContext) -> None:
        self.config = config
        self.interventions: Counter[GuardCause] = Counter()
        self._engine = context.engine
        self._index = {tier: index for index, tier in enumerate(context.engine.tiers)}
        self._known_ranges: tuple[TierRange, ...] = ()
        self._are_baselines = False  # the ranges that are known
        self._notices = Notices(engine_id, context.clock)
        self._alarms = Alarms(config, context.clock, self._begin, self._notices.end)
        self._output_rate, self._candidates_rate = (
            OutputRate(
                config.rate_window_steps,
                config.rate_margin,
                Backoff(config.first_backoff_steps, config.largest_backoff_steps),
            )
            for _ in range(2)
        )
        self._switching = Switching(config.most_switches, config.switch_window_steps, config.dwell_steps)
        self._latency = Latency(config.targets(engine_id))
        self.baseline_text = config.baseline or nearest_threshold(context.engine.tiers, *DEFAULT_BASELINE)
        self.baseline = _baseline_choice(self.baseline_text, context)
        self._accounts = Accounts(config, context, self.baseline, self._latency)
        self._smallest = _one_tier(self._engine, self._engine.tiers[0])
        self._probe = _one_tier(self._engine, next((k for k in self._engine.tiers if k > 0), 0))

    # -- reports ---------------------------------------------------------------------------------

    def admit(
        self, step: StepObservation, *, followed: bool, reports_dropped: int, by_candidate: bool = False
    ) -> bool:
        """Take a step in; whether the policy may learn from it.

        Args:
            step: the step; a warm-up step is heard of, and tells of nothing.
            followed: whether it followed a decision of the sidecar's.
            reports_dropped: reports that were lost before this one.
            by_candidate: whether that decision was a canary's candidate's, which is judged apart.

        """
        if not self.config.enabled or step.warm_up:
            self._alarms.heard_of(step)
            return not step.warm_up
        learns = self._alarms.observe(step, step.accepted_drafts, reports_dropped)
        waits = self._output_rate.backoff.left_steps > 0
        if waits:
            self._output_rate.backoff.step()
        if learns:
            if followed:
                rate = self._candidates_rate if by_candidate else self._output_rate
                if self._accounts.made(step, None if waits else rate) and rate is self._output_rate:
                    self._begin(GuardCause.OUTPUT_RATE)
            self._accounts.learn(step)
        return learns

    def rejected(self, cause: Cause, report: pb.StepReport) -> None:
        """A report was refused; an alarm where it tells of what cannot have happened."""
        if cause in _IMPOSSIBLE:
            no_time = report.step_time_valid and not 0 < report.step_time_us <= MAX_STEP_MS * 1000
            self._alarms.raise_alarm(GuardCause.STEP_TIME if no_time else GuardCause.IMPOSSIBLE_REPORT)

    def stream_began(self, *, new_boot: bool) -> None:
        """The engine connected."""
        self._alarms.stream_began(new_boot)
        if new_boot:
            self._switching.restart()

    def draft_changed(self) -> None:
        """The engine has other weights: what is known of acceptance no longer holds."""
        self._alarms.draft_changed()
        self._accounts.forget()
        self.policy_changed()

    def policy_changed(self) -> None:
        """Another policy gets its chance; what was lost stays lost."""
        self._output_rate.begin_anew()

    def commanded(self) -> None:
        """Mode, policy or canary were set by command: the switch that comes of it is not the policy's own."""
        self._switching.restart()

    def canary_began(self) -> None:
        """A candidate gets its chance."""
        self._candidates_rate.begin_anew()

    @property
    def candidate_falls_short(self) -> bool:
        """Whether the canary's candidate brings less than the baseline would."""
        return self._candidates_rate.backoff.left_steps > 0

    # -- decisions -------------------------------------------------------------------------------

    def decide(self, policy: Policy, batch: BatchView) -> Verdict:
        """The choice to send for the batch.

        Args:
            policy: asked unless the baseline is to decide.
            batch: as the newest report left it.

        Raises:
            PolicyError: the policy chose what the engine cannot do.

        """
        if not self.config.enabled:
            return Verdict(policy.choose(batch), GuardCause.NONE)
        verdict = self._choose(policy, batch)
        if self._latency.has_target and self._accounts.estimates is not None:
            verdict = self._keep_latency(verdict, self._accounts.estimates)
        choice, cause = verdict
        num_steps = choice.num_steps_for(batch.batch_size)
        self._switching.decided(num_steps, batch.step_id)
        self._accounts.decided(num_steps, batch.batch_size)
        if cause is not _NONE:
            self.interventions[cause] += 1
            if cause not in _NOT_TOLD_OF_EACH_TIME and not cause.is_alarm:
                self._notices.say(cause)
        return verdict

    def outlook(self, num_steps: int, batch_size: int) -> Outlook | None:
        """What the newest choice's model expects of a step, beside the baseline; None where nothing is."""
        return self._accounts.outlook(num_steps, batch_size)

    @property
    def standing(self) -> GuardCause:
        """Why the policy is not asked at present; NONE where it is."""
        alarm = self._alarms.standing
        if alarm is not _NONE:
            return alarm
        silent_s = self._alarms.silent_s
        if silent_s is not None and silent_s > self.config.stale_s:
            return GuardCause.STALE
        return GuardCause.OUTPUT_RATE if self._output_rate.backoff.left_steps else _NONE

    @property
    def trips(self) -> int:
        """How often the output rate fell short so that the baseline took over."""
        return self._output_rate.backoff.failures

    @property
    def alarms(self) -> Counter[GuardCause]:
        """How often each alarm, and the fallback for want of output rate, began."""
        return self._alarms.times + Counter({GuardCause.OUTPUT_RATE: self.trips})

    @property
    def budget_tokens(self) -> float:
        """Estimated tokens that may still be lost against the baseline."""
        return self._accounts.budget.tokens

    def state(self) -> pb.GuardState:
        """The guard as the admin service shows it."""
        standing = self.standing
        wait = self._output_rate.backoff.left_steps
        if standing.is_alarm:
            wait = self._alarms.clears_after_steps
        state = pb.GuardState(
            enabled=self.config.enabled,
            baseline=self.baseline_text,
            standing_cause=int(standing),  # type: ignore[arg-type]  # the enums' values are the same
            clears_after_steps=wait,
            learning=not standing.is_alarm,
            budget_tokens=self._accounts.budget.tokens,
            allowance_tokens=self._accounts.budget.allowance_tokens,
            estimated_gain_tokens=self._accounts.budget.gain_tokens,
            estimated_baseline_tokens=self._accounts.budget.baseline_tokens,
            interventions=_counts(self.interventions),
            alarms=_counts(self.alarms),
        )
        silent_s = self._alarms.silent_s
        if silent_s is not None:
            state.silent_s = silent_s
        return state

    # -- within ----------------------------------------------------------------------------------

    def _choose(self, policy: Policy, batch: BatchView) -> Verdict:
        standing = self.standing
        if standing is not _NONE:
            self._accounts.stand_in(batch)
            return Verdict(self._in_place_of_policy(standing), standing)
        choice = self._checked(policy, policy.choose(batch))
        if choice.reason is _FALLBACK:
            self._accounts.close()
            return Verdict(choice, GuardCause.POLICY_FAILED)
        if self._is_baseline(choice) and not self._latency.has_target:
            self._accounts.close()  # nothing to lose, and no model needed
            return Verdict(choice, _NONE)
        num_steps, cause = choice.num_steps_for(batch.batch_size), _NONE
        if not self._switching.allows(num_steps, batch.step_id):
            num_steps, cause = self._switching.tier, GuardCause.THRASHING
        self._accounts.open(choice, num_steps, batch)
        if not self._accounts.affords(num_steps, batch.batch_size):
            return Verdict(_with_estimates(self.baseline, choice), GuardCause.BUDGET)
        if cause is _NONE:
            return Verdict(choice, _NONE)
        return Verdict(_with_estimates(_one_tier(self._engine, num_steps), choice), cause)

    def _is_baseline(self, choice: Choice) -> bool:
        """Whether a choice that was checked is the baseline's."""
        return self._are_baselines and choice.expected_tokens is None

    def _checked(self, policy: Policy, choice: Choice) -> Choice:
        if choice.ranges is not self._known_ranges:
            check_ranges(choice.ranges, self._engine, policy.name)
            self._known_ranges = choice.ranges
            self._are_baselines = choice.ranges == self.baseline.ranges
        if choice.propensity is not None and not 0.0 <= choice.propensity <= 1.0:
            raise PolicyError(f"policy {policy.name} gave {choice.propensity} as a probability")
        return choice

    def _in_place_of_policy(self, standing: GuardCause) -> Choice:
        if standing is not GuardCause.ZERO_ACCEPTANCE:
            return self.baseline
        return self._probe if self._alarms.takes_probe() else self._smallest

    def _keep_latency(self, verdict: Verdict, estimates: Estimates) -> Verdict:
        choice, cause = verdict
        excess = self._latency.excess(estimates)
        if all(excess[self._index[part.num_steps]] <= 1.0 for part in choice.ranges):
            return verdict
        instead = self._engine.tiers[self._latency.instead(estimates, excess)]
        starts = [
            (
                part.batch_size_min,
                part.num_steps if excess[self._index[part.num_steps]] <= 1.0 else instead,
            )
            for part in choice.ranges
        ]
        ranges = tier_ranges(self._engine, starts)
        before = choice.num_steps_for(estimates.batch_size)
        choice = replace(choice, ranges=ranges, propensity=None)
        changed = choice.num_steps_for(estimates.batch_size) != before
        return Verdict(choice, GuardCause.LATENCY if changed and not cause else cause)

    def _begin(self, cause: GuardCause) -> None:
        self._notices.say(cause, clears_after_steps=self.state().clears_after_steps)


def _baseline_choice(text: str, context: PolicyContext) -> Choice:
    try:
        rule: Policy = make_policy(text, context)
    except PolicyError as error:
        raise PolicyError(f"guard.baseline: {error}") from error
    return rule.choose(BatchView(batch_size=1))


def _one_tier(engine: EngineSpec, num_steps: int) -> Choice:
    return Choice(tier_ranges(engine, [(1, num_steps)]), propensity=1.0)


def _with_estimates(choice: Choice, of: Choice) -> Choice:
    """The choice in place of one that was refused, with its estimates; how probable it was is not known."""
    return Choice(choice.ranges, Reason.GUARD, None, of.expected_tokens, of.expected_ms)


def _counts(times: Counter[GuardCause]) -> list[pb.GuardCount]:
    return [pb.GuardCount(cause=int(cause), times=n) for cause, n in sorted(times.items()) if n]  # type: ignore[arg-type]
