"""Exp3: exponential weights over tiers, for rewards that an adversary may choose.

Formula: each octave of batch sizes draws its tier with probability

    p_k = (1 - gamma) w_k / sum_j w_j + gamma / K

of its K tiers and keeps it for ``epoch_steps`` timed steps; their mean reward r in [0, 1] then gives
``w_k <- w_k exp(gamma r / (p_k K))``.

Source: Auer, Cesa-Bianchi, Freund and Schapire, "The nonstochastic multiarmed bandit problem", SIAM J.
Comput. 32(1), 2002 (Exp3). BanditSpec (Hou et al., arXiv:2505.15141) has an EXP3Spec; whether it mixes in
uniform exploration as here could not be checked.
Regimes: none that a server has; a guarantee without assumptions, paid for with exploration for ever.
Defaults: gamma 0.05.
What was chosen here: epochs, since a draw at every step pays for switching and would reach the engine before
the last one's result; r is the output rate of a request over the largest epoch mean that the octave has seen;
an epoch whose tier the engine did not run (a fallback) ends after ``4 epoch_steps`` steps without a reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.bandit import Octaves, request_rate
from specgov.policies.learnt import Learnt
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, Reason, StepObservation

Floats = NDArray[np.float64]


@final
class Exp3(Learnt):
    """Exponential weights on the output rate by tier, drawn by epoch, in each octave of batch sizes."""

    name: ClassVar[str] = "exp3"
    version: ClassVar[str] = "1"

    _rng: np.random.Generator
    _epochs: list[_Epoch]

    @dataclass(frozen=True, slots=True)
    class Config:
        """``gamma``: share of uniform exploration; ``epoch_steps``: timed steps that a draw is kept for."""

        gamma: float = 0.05
        epoch_steps: int = 10

        def __post_init__(self) -> None:
            if not 0 < self.gamma <= 1:
                raise PolicyError(f"gamma must lie above 0 and at 1 or below, not {self.gamma}")
            if self.epoch_steps < 1:
                raise PolicyError(f"epoch_steps must be 1 or more, not {self.epoch_steps}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._config = config
        self._tiers = context.engine.tiers
        self._octaves = Octaves(context.engine)
        self._rng = context.rng
        self.forget()

    def observe(self, step: StepObservation) -> None:
        """Count the step for its octave's epoch, if it ran the epoch's tier."""
        epoch, reward = self._epochs[self._octaves.index(step.batch_size)], request_rate(step)
        epoch.steps += 1
        if reward is not None and step.num_steps == self._tiers[epoch.arm]:
            epoch.rewards += 1
            epoch.sum += reward
        if epoch.rewards >= self._config.epoch_steps:
            self._learn(epoch)
        if epoch.rewards >= self._config.epoch_steps or epoch.steps >= 4 * self._config.epoch_steps:
            self._draw(epoch)

    def choose(self, batch: BatchView) -> Choice:
        """Each octave's tier of its present epoch, with the probability that it was drawn with."""
        ranges = self._octaves.ranges([self._tiers[epoch.arm] for epoch in self._epochs])
        here = self._epochs[self._octaves.index(batch.batch_size)]
        return Choice(ranges, Reason.POLICY, float(here.probabilities[here.arm]))

    def forget(self) -> None:
        """Equal weights in every octave."""
        self._epochs = [_Epoch(np.zeros(len(self._tiers))) for _ in range(len(self._octaves))]
        for epoch in self._epochs:
            self._draw(epoch)

    def estimates(self) -> dict[str, float]:
        """Probabilities by octave and tier, where they are no longer equal."""
        return {
            f"probability_from_batch_{first}_k{tier}": float(p)
            for first, epoch in zip(self._octaves.firsts, self._epochs, strict=True)
            if epoch.log_weights.any()
            for tier, p in zip(self._tiers, self._probabilities(epoch.log_weights), strict=True)
        }

    def _learn(self, epoch: _Epoch) -> None:
        mean = epoch.sum / epoch.rewards
        epoch.largest = max(epoch.largest, mean)
        gain = mean / epoch.largest / float(epoch.probabilities[epoch.arm])
        epoch.log_weights[epoch.arm] += self._config.gamma * gain / len(self._tiers)
        epoch.log_weights -= epoch.log_weights.max()

    def _draw(self, epoch: _Epoch) -> None:
        epoch.probabilities = self._probabilities(epoch.log_weights)
        epoch.arm = min(
            int(np.searchsorted(np.cumsum(epoch.probabilities), self._rng.random(), side="right")),
            len(self._tiers) - 1,
        )
        epoch.steps = epoch.rewards = 0
        epoch.sum = 0.0

    def _probabilities(self, log_weights: Floats) -> Floats:
        weights = np.exp(log_weights - log_weights.max())
        gamma = self._config.gamma
        return np.asarray((1 - gamma) * weights / weights.sum() + gamma / len(self._tiers))


class _Epoch(Learnt):
    """An octave's weights (logs, the largest 0 once anything was learnt) and its present draw."""

    log_weights: Floats
    probabilities: Floats
    arm: int
    largest: float
    steps: int
    rewards: int
    sum: float

    def __init__(self, log_weights: Floats) -> None:
        self.log_weights = log_weights
        self.probabilities = np.ones_like(log_weights)
        self.arm = 0
        self.largest = 0.0
        self.steps = self.rewards = 0
        self.sum = 0.0
