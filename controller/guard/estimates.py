"""What each tier would bring: by the policy's own model, or by the guard's where the policy has none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specgov.policies.rate_model import RateModel, Rates
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, StepObservation

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Estimates:
    """Expected output tokens of the whole batch in one step, and the step's time, by tier.

    ``losses`` keeps what was worked out from them, by num_steps and batch size: the same is asked for several
    times a step.
    """

    batch_size: int
    tokens: list[float]
    ms: list[float]
    losses: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, compare=False)

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


_EVERY_STEP_OF_FIRST = 512
_THEN_ONE_IN = 16


class Estimator:
    """Gives the estimates for a choice. It learns only once a policy came without a model of its own.

    Of the first steps it takes in each, of later ones one in sixteen, and between two of them its estimates
    stay while the batch is about the same: a yardstick, which need not be as keen as a policy's own model,
    for a fraction of the time.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._own: RateModel | None = None
        self._steps = 0
        self._has_learnt = False
        self._rates: Rates | None = None
        self._seen: tuple[int, Floats, Floats] | None = None
        self._estimates: Estimates

    def observe(self, step: StepObservation) -> None:
        """Learn from a sound step."""
        if self._own is None:
            return
        self._steps += 1
        if self._steps <= _EVERY_STEP_OF_FIRST or self._steps % _THEN_ONE_IN == 0:
            self._own.observe(step)
            self._has_learnt = True

    def forget(self) -> None:
        """Drop what is known of acceptance; step times stay."""
        if self._own is not None:
            self._own.acceptance.forget()
            self._steps, self._has_learnt = 0, True

    def of(self, choice: Choice, batch: BatchView) -> Estimates:
        """The estimates for the batch that the choice was made for; the same object while they are the same.

        Raises:
            PolicyError: the policy's own are no positive numbers.

        """
        tokens, ms = choice.expected_tokens, choice.expected_ms
        count = len(self._context.engine.tiers)
        if tokens is None or ms is None or len(tokens) != count or len(ms) != count:
            return self._of_own_model(batch)
        size = max(batch.batch_size, 1)
        seen = self._seen
        if seen is None or seen[0] != size or seen[1] is not tokens or seen[2] is not ms:
            self._estimates = _checked(size, tokens, ms)
            self._seen, self._rates = (size, tokens, ms), None
        return self._estimates

    def doubt(self, tier: int, baseline: int) -> float:
        """Standard deviation of the log ratio of two tiers' rates, which are indices.

        It is 0 where the estimates are the policy's own: it decides by them.
        """
        if self._own is None or self._rates is None:
            return 0.0
        return float(self._own.log_ratio_sd(self._rates)[tier, baseline])

    def _of_own_model(self, batch: BatchView) -> Estimates:
        if self._own is None:
            self._own = RateModel(self._context, cold_draft_margin=0.0)
        if self._rates is None or self._has_learnt or not self._estimates.fit(batch.batch_size):
            rates = self._rates = self._own.rates(batch)
            self._estimates = _checked(rates.batch_size, rates.tokens, rates.ms[rates.grid])
            self._seen, self._has_learnt = None, False
        return self._estimates


def _checked(batch_size: int, tokens: Floats, ms: Floats) -> Estimates:
    estimates = Estimates(batch_size, tokens.tolist(), ms.tolist())
    if not (math.isfinite(sum(estimates.tokens) + sum(estimates.ms)) and min(estimates.ms) > 0):
        raise PolicyError(
            f"the policy expects {estimates.tokens} tokens in {estimates.ms} ms by tier, which cannot be"
        )
    return estimates
