"""The guard's books: what decisions are expected to lose against the baseline, and what their steps did."""

from __future__ import annotations

from collections import defaultdict

from specgov.controller.guard.budget import Budget
from specgov.controller.guard.comparison import Comparison
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.estimates import Estimates, Estimator, Outlook
from specgov.controller.guard.latency import Latency
from specgov.controller.guard.losses import NO_LOSS, Loss, Record
from specgov.controller.guard.output_rate import OutputRate
from specgov.policies.types import BatchView, Choice, PolicyContext, StepObservation

LOOK_SHARE = 0.1
"""Of the allowance: when so much was charged for doubt, the baseline's tier runs until it is known."""


class Accounts:
    """The accounts of one engine.

    Args:
        config: allowance and share.
        context: the engine and its step times.
        baseline: the baseline's tier by batch size.
        latency: the targets. Losses are counted between what they leave of the two tiers.

    Attributes: budget: what may still be lost. estimates: for the newest decision, None where none are
        needed: it is nobody's whose losses count, or takes the baseline's tier with no model of its own.

    """

    def __init__(
        self, config: GuardConfig, context: PolicyContext, baseline: Choice, latency: Latency
    ) -> None:
        self.budget = Budget(config.allowance_tokens, config.loss_share, context.engine.decision_lag_steps)
        self.estimates: Estimates | None = None
        self._baseline = baseline
        self._latency = latency
        self._index = {tier: index for index, tier in enumerate(context.engine.tiers)}
        self._estimator = Estimator(context)
        self._comparison = Comparison(context.engine.tiers)
        self._records: defaultdict[tuple[int, int], Record] = defaultdict(Record)
        self._counts = False

    # -- decisions -------------------------------------------------------------------------------

    def close(self) -> None:
        """The newest decision is the baseline itself, or of nobody whose losses count."""
        self.estimates, self._counts = None, False

    def stand_in(self, batch: BatchView) -> None:
        """The guard decides in a policy's place: for the latency targets, by estimates that fit the batch."""
        if (
            self._latency.has_target
            and self.estimates is not None
            and not self.estimates.fit(batch.batch_size)
        ):
            self.estimates = self._estimator.own(batch)

    def open(self, choice: Choice, num_steps: int, batch: BatchView) -> None:
        """A policy chose ``num_steps`` for the batch, and its losses count."""
        self._counts = True
        needed = (
            choice.expected_tokens is not None
            or self._latency.has_target
            or num_steps != self._baseline.num_steps_for(batch.batch_size)
        )
        self.estimates = self._estimator.of(choice, batch) if needed else None

    def affords(self, num_steps: int, batch_size: int) -> bool:
        """Whether a step at ``num_steps`` can be paid, and is not to wait for a look at the baseline."""
        if self.estimates is None:
            return True
        loss = self._loss(self.estimates, num_steps, batch_size)
        if loss.doubt and self._waits_for_a_look(batch_size):
            return False
        return self.budget.affords(loss)

    def decided(self, num_steps: int, batch_size: int) -> None:
        """That tier was decided."""
        if self.estimates is not None:
            self.budget.decided(self._loss(self.estimates, num_steps, batch_size))
        elif self._counts:
            self.budget.decided(NO_LOSS)

    def outlook(self, num_steps: int, batch_size: int) -> Outlook | None:
        """What the newest choice's model expects of a step, beside the baseline; None where nothing is."""
        if self.estimates is None:
            return None
        loss = self._loss(self.estimates, num_steps, batch_size)
        expected_ms = self.estimates.ms[self._index[num_steps]]
        return Outlook(loss.baseline_tokens - loss.tokens, loss.baseline_tokens, expected_ms)

    # -- steps -----------------------------------------------------------------------------------

    def learn(self, step: StepObservation) -> None:
        """A sound step, whoever decided it."""
        self._estimator.observe(step, self._baseline.num_steps_for(step.batch_size))

    def forget(self) -> None:
        """What is known of acceptance no longer holds."""
        self._estimator.forget()

    def made(self, step: StepObservation, rate: OutputRate | None) -> bool:
        """A step was made that followed a decision: what it brought, and what the baseline would have.

        ``rate`` judges whoever decided, None where the baseline did; returns whether it trips.
        """
        if not self._counts:
            return False
        estimates, live = self.estimates, len(step.accepted)
        if estimates is None:
            if step.num_steps == self._baseline.num_steps_for(step.batch_size):
                return live > 0 and self._made_as_baseline(_output_tokens(step), step, rate)
            estimates = self._estimator.own(BatchView.of(step))  # the batch changed on the decision's way
        if not live:
            loss = self._loss(estimates, step.num_steps, step.batch_size)
            self.budget.made(loss.tokens, loss.baseline_tokens)
            return False
        output_tokens = _output_tokens(step)
        tier = self._index[step.num_steps]
        expected = self._loss(estimates, step.num_steps, step.batch_size)
        baseline = expected.baseline
        if step.step_ms is not None and estimates.fit(step.batch_size):
            ratio = step.step_ms / estimates.ms[tier]
            self._comparison.timed(step.batch_size, tier, ratio)
            if self._latency.has_target:
                self._latency.observe(ratio)
        if tier == baseline:
            return self._made_as_baseline(output_tokens, step, rate)
        would = self._comparison.baseline_tokens(step, output_tokens, estimates, tier, baseline)
        lost, doubt_tokens = would - output_tokens, expected.doubt_tokens(would) if expected.doubt else 0.0
        chance_tokens = expected.record.took((lost + doubt_tokens) / would) * would
        self.budget.made(lost, would, doubt_tokens, chance_tokens)
        if step.step_ms is None or rate is None:
            return False
        return rate.measure(output_tokens, would, expected.doubt * would)

    # -- within ----------------------------------------------------------------------------------

    def _made_as_baseline(self, output_tokens: float, step: StepObservation, rate: OutputRate | None) -> bool:
        self.budget.made(0.0, output_tokens)
        return step.step_ms is not None and rate is not None and rate.measure(output_tokens, output_tokens)

    def _waits_for_a_look(self, batch_size: int) -> bool:
        """Whether doubt has cost much of the allowance, and a few of the baseline's steps would end it."""
        if self.budget.doubt_tokens <= LOOK_SHARE * self.budget.allowance_tokens:
            return False
        return not self._estimator.knows(batch_size, self._baseline.num_steps_for(batch_size))

    def _loss(self, estimates: Estimates, num_steps: int, batch_size: int) -> Loss:
        """Of a step at ``num_steps`` against the baseline, both as the latency targets leave them."""
        known = estimates.losses.get((num_steps, batch_size))
        if known is None or self._latency.has_target:  # what that leaves follows the measured times
            tier = self._within_targets(estimates, num_steps)
            baseline = self._within_targets(estimates, self._baseline.num_steps_for(batch_size))
            loss = estimates.loss(tier, baseline, max(batch_size, 1))
            doubt = self._estimator.doubt(estimates, tier, baseline)
            known = Loss(tier, baseline, *loss, doubt, self._records[tier, baseline])
            estimates.losses[num_steps, batch_size] = known
        return known

    def _within_targets(self, estimates: Estimates, num_steps: int) -> int:
        """Index of the tier, or of what stands in for it where it breaks a latency target."""
        tier = self._index[num_steps]
        if self._latency.has_target:
            excess = self._latency.excess(estimates)
            if excess[tier] > 1.0:
                return self._latency.instead(estimates, excess)
        return tier


def _output_tokens(step: StepObservation) -> float:
    """Of all requests: those that ended before the result was processed are not reported, and made tokens."""
    live = len(step.accepted)
    return (step.accepted_drafts + live) * step.batch_size / live
