"""What the bandit rules share: octaves of batch sizes, and a reward for a step.

A bandit takes each tier for an arm whose reward it knows only by playing it. Rewards differ with the batch
size, so each octave of batch sizes (1, 2, 3-4, 5-8, ...) has a bandit of its own, as in Nightjar
(arXiv:2512.22420), where each batch size has one; octaves, because a batch size alone sees too few steps.

The reward of a timed step is its output rate by request, ``mean accept length / step_ms``: what requests of
any number gain from a tier, so that batch sizes of one octave can be compared. Steps without a valid time
teach nothing. A result counts for the tier that made it, not for the one wanted when it arrives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from specgov.policies.learnt import Learnt
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, EngineSpec, PolicyContext, StepObservation, TierRange

Floats = NDArray[np.float64]


class Octaves:
    """Batch sizes in octaves, each ending with a power of two."""

    def __init__(self, engine: EngineSpec) -> None:
        self._engine = engine
        powers = range((engine.largest_batch_size - 1).bit_length())
        self.firsts = (1, *(2**power + 1 for power in powers))

    def __len__(self) -> int:
        return len(self.firsts)

    def index(self, batch_size: int) -> int:
        """The octave of ``batch_size``; the last for anything larger."""
        return min((max(batch_size, 1) - 1).bit_length(), len(self.firsts) - 1)

    def ranges(self, num_steps: list[int]) -> tuple[TierRange, ...]:
        """Ranges of batch sizes from a tier for each octave."""
        return tier_ranges(self._engine, zip(self.firsts, num_steps, strict=True))


def request_rate(step: StepObservation) -> float | None:
    """Output tokens of a request in a ms; None where the step has no valid time or no live request."""
    if step.step_ms is None or not 0 < step.step_ms < np.inf or not len(step.accepted):
        return None
    return step.output_tokens / (len(step.accepted) * step.step_ms)


class OctaveBandit(Learnt, ABC):
    """A rule with one bandit for each octave: what is the same whatever the bandit.

    A rule of this kind says how an octave learns from a reward and which arm (index of a tier) is next.
    """

    current: list[int]

    def __init__(self, context: PolicyContext) -> None:
        self.tiers = context.engine.tiers
        self.octaves = Octaves(context.engine)
        self._arm_of = {tier: arm for arm, tier in enumerate(self.tiers)}
        self.forget()

    @abstractmethod
    def start(self) -> None:
        """Forget everything."""

    @abstractmethod
    def learn(self, octave: int, arm: int, reward: float) -> None:
        """Take in a reward (`request_rate`)."""

    @abstractmethod
    def select(self, octave: int) -> int:
        """The arm to play next; called once after each reward, and once at the start."""

    def means(self) -> Floats:
        """Mean reward by octave and arm, shape (octaves, arms); NaN where there is none."""
        return np.full((len(self.octaves), len(self.tiers)), np.nan)

    def observe(self, step: StepObservation) -> None:
        """Learn from a timed step at a known tier, and choose anew in its octave."""
        arm, reward = self._arm_of.get(step.num_steps), request_rate(step)
        if arm is None or reward is None:
            return
        octave = self.octaves.index(step.batch_size)
        self.learn(octave, arm, reward)
        self.current[octave] = self.select(octave)

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002 every octave has its arm
        """Each octave's arm."""
        return Choice(self.octaves.ranges([self.tiers[arm] for arm in self.current]), propensity=1.0)

    def forget(self) -> None:
        """Start anew: rewards depend on acceptance."""
        self.start()
        self.current = [self.select(octave) for octave in range(len(self.octaves))]

    def estimates(self) -> dict[str, float]:
        """Mean output tokens of a request in a ms, by octave and tier, where something was seen."""
        found = self.means()
        return {
            f"rate_from_batch_{self.octaves.firsts[octave]}_k{self.tiers[arm]}": float(found[octave, arm])
            for octave, arm in np.argwhere(np.isfinite(found)).tolist()
        }
