"""TurboSpec: the tier with the largest predicted goodput, from one acceptance rate and a profile.

Formula: alpha is a moving average of the rate at which single drafts are accepted, and

    goodput(k) = b (1 - alpha^(k+1)) / (1 - alpha) / T(b, k, c)

with b the batch size, c its context and T the step time. The present tier is left for the best one when that
promises more than ``margin`` above it.

Source: Liu et al., "TurboSpec: Closed-loop Speculation Control System for Optimizing LLM Serving Goodput",
arXiv:2406.14066v3 (v1 as "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
SmartSpec): goodput from an online acceptance rate and step times profiled off-line. Titles and abstracts
were checked, the formula against public vLLM forks with this controller (class ``DSD``), not in the paper.
Regimes: any load, if acceptance is alike at all positions and between requests; one number stands for all.
Defaults: a weight of 0.05 for the newest step, margin 2 %.
What was chosen here: alpha of a step is accepted drafts over decided ones (accepted, and one rejected in
each request that did not accept all), which is the estimate of largest likelihood; it begins at 0.7, as in
one of those forks; the weight and the margin, whose values in the paper could not be checked; at tier 0,
which tells nothing of acceptance, one step in ``probe_every_steps`` drafts the smallest positive tier; step
times are the profile's with the project's online correction (``cost.py``) instead of a linear fit, which is
TurboSpec at its best, and the same estimator from nothing where there is no profile. All requests of a batch
have one tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.cost import CostEstimator
from specgov.policies.learnt import Learnt
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, Reason, StepObservation

Floats = NDArray[np.float64]


@final
class TurboSpec(Learnt):
    """The tier with the largest goodput, by one acceptance rate and the profile's step times."""

    name: ClassVar[str] = "turbospec"
    version: ClassVar[str] = "1"

    _cost: CostEstimator
    _current: NDArray[np.intp]
    _acceptance: float
    _blind_steps: int

    @dataclass(frozen=True, slots=True)
    class Config:
        """Options, as in the module's docstring."""

        margin: float = 0.02
        newest_weight: float = 0.05
        first_acceptance: float = 0.7
        probe_every_steps: int = 50

        def __post_init__(self) -> None:
            if self.margin < 0:
                raise PolicyError(f"margin must be 0 or more, not {self.margin}")
            for name in ("newest_weight", "first_acceptance"):
                if not 0 < getattr(self, name) <= 1:
                    raise PolicyError(f"{name} must lie above 0 and at 1 or below, not {getattr(self, name)}")
            if self.probe_every_steps < 1:
                raise PolicyError(f"probe_every_steps must be 1 or more, not {self.probe_every_steps}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._config = config
        self._engine = context.engine
        self._tiers = np.asarray(context.engine.tiers)
        self._cost = CostEstimator(context.engine, context.step_time)
        self._firsts = np.concatenate([[1], self._cost.batch_sizes[:-1] + 1]).tolist()
        self._current = np.full(len(self._firsts), -1)
        self._acceptance, self._blind_steps = config.first_acceptance, 0

    def observe(self, step: StepObservation) -> None:
        """Move the acceptance rate, and learn the step time."""
        self._cost.observe(step)
        self._blind_steps = 0 if step.num_steps > 0 else self._blind_steps + 1
        if step.num_steps > 0 and len(step.accepted):
            accepted = int(step.accepted.sum())
            decided = accepted + int(np.count_nonzero(step.accepted < step.num_steps))
            self._acceptance += self._config.newest_weight * (accepted / decided - self._acceptance)

    def choose(self, batch: BatchView) -> Choice:
        """The best tier of every batch size, or a probe of the smallest positive one at the batch's own."""
        size = max(batch.batch_size, 1)
        grid = self._cost.grid_index(size)
        ms = self._cost.predict(batch.sum_seq_len_tokens / size)
        accept_length = np.array([(self._acceptance ** np.arange(k + 1)).sum() for k in self._tiers])
        self._settle(accept_length / ms)
        arms, reason = self._current, Reason.POLICY
        probe = int(np.argmax(self._tiers > 0))
        due = self._blind_steps > 0 and self._blind_steps % self._config.probe_every_steps == 0
        if due and self._tiers[arms[grid]] == 0 and self._tiers[probe] > 0:
            arms, reason = np.where(self._tiers[arms] == 0, probe, arms), Reason.EXPLORATION
        starts = zip(self._firsts, self._tiers[arms].tolist(), strict=True)
        return Choice(tier_ranges(self._engine, starts), reason, 1.0, size * accept_length, ms[grid])

    def forget(self) -> None:
        """Acceptance starts anew; step times stay."""
        self._acceptance, self._blind_steps = self._config.first_acceptance, 0

    def estimates(self) -> dict[str, float]:
        """The acceptance rate."""
        return {"acceptance": self._acceptance}

    def _settle(self, goodput: Floats) -> None:
        """Move each batch size of the grid to its best tier where that pays."""
        rows, best = np.arange(len(goodput)), np.argmax(goodput, axis=1)
        present = goodput[rows, self._current] * (1 + self._config.margin)
        moves = (self._current < 0) | (goodput[rows, best] > present)
        self._current = np.where(moves, best, self._current)
