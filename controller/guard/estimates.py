"""What each tier would bring: by the policy's own model, or by the guard's where the policy has none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specgov.controller.guard.losses import Loss
from specgov.policies.rate_model import RateModel, Rates
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, StepObservation

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Estimates:
    """Expected output tokens of the whole batch in one step, and the step's time, by tier.

    ``rates`` are those of the guard's own model, None where the policy's own were taken. ``losses`` keeps
    what was worked out from them, by num_steps and batch size: the same is asked for several times a step.
    """

    batch_size: int
    tokens: list[float]
    ms: list[float]
    rates: Rates | None = field(default=None, compare=False)
    losses: dict[tuple[int, int], Loss] = field(default_factory=dict, compare=False)

    def fit(self, batch_size: int) -> bool:
        """Whether they hold for that batch size too, per request: it differs by a sixteenth at most."""
        return 16 * abs(batch_size - self.batch_size) <= self.batch_size

    def loss(self, tier: int, baseline: int, batch_size: int) -> tuple[float, float]:
        """Tokens that a step at ``tier`` loses against ``baseline``, and what that would bring in its time.

        Tiers are indices. ``batch_size`` may be a little other than that of the estimates, per request.
        """
        share = batch_size / self.batch_size
        of_baseline = self.tokens[baseline] / self.ms[baseline] * self.ms[tier]
        return (of_baseline - self.tokens[tier]) * share, of_baseline * share

    def best(self, tiers: list[int]) -> int:
        """Of the indices ``tiers`` the one with the largest output rate."""
        return max(tiers, key=lambda tier: self.tokens[tier] / self.ms[tier])


class Outlook(NamedTuple):
    """What is expected of a step: its output tokens, the baseline's in the same time, and that time."""

    tokens: float
    baseline_tokens: float
    ms: float


_FIRST_STEPS = 64
_FEW_STEPS = 8
_AWAY_STEPS = 64
_THEN_ONE_IN = 128
_SURPRISE = 0.4
"""Share by which one request's tokens may differ from what is expected, as a mean over ``1 / _GAIN`` steps;
for a batch by as much less as chance is. Four standard deviations of it at the least."""
_GAIN = 1 / 16


class Estimator:
    """Gives the estimates for a choice. It learns only once a policy came without a model of its own.

    A yardstick need not be as keen as a policy's own model, for a fraction of its time. Of each tier, in
    each octave of batch sizes, it takes in the first ``_FIRST_STEPS`` steps, ``_FEW_STEPS`` after
    ``_AWAY_STEPS`` elsewhere, and as many whenever steps that do not show the baseline's tokens bring others
    than it expects; of all others one in ``_THEN_ONE_IN``. Between two of them its estimates stay. How far
    they may be off, it says (``doubt``).
    """

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._own: RateModel | None = None
        self._taken_in: dict[tuple[int, int], _TakenIn] = {}
        self._newest: Estimates | None = None
        self._by_size: dict[int, Estimates] = {}
        self._doubts: dict[tuple[int, int, int], float] = {}
        self._tokens_a_request: list[float] = []
        self._index = {tier: index for index, tier in enumerate(context.engine.tiers)}
        self._policys: tuple[Floats, Floats, Estimates] | None = None

    def observe(self, step: StepObservation, baseline_num_steps: int) -> None:
        """Learn from a sound step; the baseline's tier is that for its batch."""
        if self._own is not None and self._is_due(step, baseline_num_steps):
            self._own.observe(step)
            self._has_learnt()
            rates = self._own.rates(BatchView.of(step))
            self._tokens_a_request = (rates.tokens / rates.batch_size).tolist()

    def forget(self) -> None:
        """Drop what is known of acceptance; step times stay."""
        if self._own is not None:
            self._own.acceptance.forget()
            self._taken_in.clear()
            self._has_learnt()

    def of(self, choice: Choice, batch: BatchView) -> Estimates:
        """The estimates for the batch that the choice was made for; the same object while they are the same.

        Raises:
            PolicyError: the policy's own are no positive numbers.

        """
        tokens, ms = choice.expected_tokens, choice.expected_ms
        count = len(self._context.engine.tiers)
        if tokens is None or ms is None or len(tokens) != count or len(ms) != count:
            return self.own(batch)
        size, policys = max(batch.batch_size, 1), self._policys
        if policys and policys[0] is tokens and policys[1] is ms and policys[2].batch_size == size:
            return policys[2]
        estimates = _checked(size, tokens, ms, None)
        self._policys = tokens, ms, estimates
        return estimates

    def own(self, batch: BatchView) -> Estimates:
        """Those of the guard's own model, which learns from now on."""
        if self._newest is not None and self._newest.fit(batch.batch_size):
            return self._newest
        size = max(batch.batch_size, 1)
        estimates = self._by_size.get(size)
        if estimates is None:
            if self._own is None:
                self._own = RateModel(self._context, cold_draft_margin=0.0)
            rates = self._own.rates(batch)
            estimates = self._by_size[size] = _checked(size, rates.tokens, rates.ms[rates.grid], rates)
        self._newest = estimates
        return estimates

    def doubt(self, estimates: Estimates, tier: int, baseline: int) -> float:
        """Standard deviation of the log of what ``baseline`` would bring in place of a step of ``tier``.

        Tiers are indices. It is 0 where the estimates are the policy's own: it decides by them. What a
        smaller tier would have brought is seen (``comparison.py``): of that only the time is in doubt.
        """
        rates, own = estimates.rates, self._own
        if tier == baseline or rates is None or own is None:
            return 0.0
        asked = (estimates.batch_size.bit_length(), tier, baseline)
        known = self._doubts.get(asked)
        if known is None:
            if baseline < tier:
                of_time = own.cost.log_covariance(rates.grid)
                variance = of_time[tier, tier] + of_time[baseline, baseline] - 2 * of_time[tier, baseline]
                known = math.sqrt(max(float(variance), 0.0))
            else:
                known = float(own.log_ratio_sd(rates)[tier, baseline])
            self._doubts[asked] = known
        return known

    def knows(self, batch_size: int, num_steps: int) -> bool:
        """Whether the guard's own model has taken in steps at that tier in such batches."""
        taken_in = self._taken_in.get((batch_size.bit_length(), num_steps))
        return taken_in is not None and taken_in.wanted <= _FIRST_STEPS - _FEW_STEPS

    def _has_learnt(self) -> None:
        self._newest = None
        self._by_size.clear()
        self._doubts.clear()

    def _is_due(self, step: StepObservation, baseline_num_steps: int) -> bool:
        cell = (step.batch_size.bit_length(), step.num_steps)
        taken_in = self._taken_in.get(cell)
        if taken_in is None:
            taken_in = self._taken_in[cell] = _TakenIn(_FIRST_STEPS)
        elif abs(step.step_id - taken_in.last_step_id) > _AWAY_STEPS or (
            0 < step.num_steps <= baseline_num_steps and self._surprises(step, taken_in)
        ):
            taken_in.wanted = max(taken_in.wanted, _FEW_STEPS)
        taken_in.last_step_id = step.step_id
        taken_in.passed += 1
        if not taken_in.wanted and taken_in.passed < _THEN_ONE_IN:
            return False
        taken_in.wanted, taken_in.passed = max(taken_in.wanted - 1, 0), 0
        return True

    def _surprises(self, step: StepObservation, taken_in: _TakenIn) -> bool:
        """Whether steps of late brought other tokens than are expected, by more than chance."""
        live = len(step.accepted)
        if not live or taken_in.wanted:
            return False
        expected = self._tokens_a_request[self._index[step.num_steps]] * live
        taken_in.surprise += _GAIN * (step.output_tokens / expected - 1.0 - taken_in.surprise)
        if abs(taken_in.surprise) * math.sqrt(live) <= _SURPRISE:
            return False
        taken_in.surprise = 0.0
        return True


@dataclass(slots=True)
class _TakenIn:
    """Of a tier in an octave: steps that are wanted one by one, passed by since the last one that was taken
    in, and by what share steps bring more tokens than expected."""

    wanted: int
    passed: int = 0
    last_step_id: int = 0
    surprise: float = 0.0


def _checked(batch_size: int, tokens: Floats, ms: Floats, rates: Rates | None) -> Estimates:
    estimates = Estimates(batch_size, tokens.tolist(), ms.tolist(), rates)
    least = min(*estimates.tokens, *estimates.ms)
    if not (math.isfinite(sum(estimates.tokens) + sum(estimates.ms)) and least > 0):
        raise PolicyError(
            f"the policy expects {estimates.tokens} tokens in {estimates.ms} ms by tier, which cannot be"
        )
    return estimates
