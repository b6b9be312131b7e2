"""An alarm on trial: was it a change, or did the host only hiccup?

Some steps in a row that take too long look like a change of the server until they end; by then they are
learnt, and a rule that has left the tier does not come back to find out. So what was believed before the
alarm is kept, and some steps after it, and once more later, the tier that was in force is asked for again,
for a few steps. If most of them are nearer to the old belief than to the new one, there was no change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST_STEPS = (24, 96)
"""Steps after the alarm with which a hearing begins."""

HEARD_STEPS = 4
"""Steps of a hearing; three must speak for the old belief."""

_LATE_STEPS = 16
"""For so long a hearing's steps may come in: a decision takes some steps to apply."""

_MOST_ASKED = 2 * HEARD_STEPS
"""How often a hearing asks at most: a rule that is frozen decides on and is shown no step that ends it."""


@dataclass(slots=True)
class Belief:
    """What an estimator of step times believes: its filter's mean and covariance, and what scales them."""

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    noise: float
    evidence: float
    surprise: float


@dataclass(slots=True)
class AlarmTrial:
    """The trial of one alarm.

    Attributes:
        tier: index of the tier that was in force at the alarm.
        before: what was believed then.
        steps: since the alarm.
        asked: how often this hearing has asked for the tier.
        heard: steps of this hearing so far; ``for_before`` of them speak for the old belief.

    """

    tier: int
    before: Belief
    steps: int = 0
    asked: int = 0
    heard: int = 0
    for_before: int = 0

    def pass_step(self) -> bool:
        """Count a step, whatever it tells; False when the trial is over."""
        self.steps += 1
        if self.steps in FIRST_STEPS:
            self.asked = self.heard = self.for_before = 0
        return self.steps < FIRST_STEPS[-1] + HEARD_STEPS + _LATE_STEPS

    def asks(self) -> bool:
        """Whether the decision that is being made should be for the tier."""
        is_on = any(first <= self.steps < first + HEARD_STEPS for first in FIRST_STEPS)
        self.asked += is_on
        return is_on and self.asked <= _MOST_ASKED

    def hears(self, tier: int) -> bool:
        """Whether a step at ``tier`` is evidence."""
        return tier == self.tier and self.steps >= FIRST_STEPS[0] and self.heard < HEARD_STEPS

    def hear(self, *, speaks_for_before: bool) -> bool:
        """Take in one step's evidence; True when it is found that there was no change."""
        self.heard += 1
        self.for_before += speaks_for_before
        return 2 * self.for_before > HEARD_STEPS
