"""What a step may lose against the baseline: as expected, with doubt, and as such steps were measured."""

from __future__ import annotations

import math
from typing import NamedTuple

DOUBTS = 2.0
"""Standard deviations by which the baseline may bring more than is estimated: that much is charged."""
_GAIN = 0.25


class Record:
    """What steps of one tier in place of another were measured to lose of late, whatever was expected.

    Attributes: share: mean share that was lost of what the other would have brought; None before the first
        such step.

    """

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share: float | None = None

    def took(self, share: float) -> float:
        """A step lost that share; returns how far that is from the mean before it."""
        off = 0.0 if self.share is None else share - self.share
        self.share = share - (1.0 - _GAIN) * off
        return off


class Loss(NamedTuple):
    """What a step at ``tier`` is expected to lose against ``baseline``; both are indices.

    ``tokens`` are lost, ``baseline_tokens`` are what the baseline would bring in the step's time. ``doubt``
    is the standard deviation of the log of that; ``record`` is of such steps.
    """

    tier: int
    baseline: int
    tokens: float
    baseline_tokens: float
    doubt: float
    record: Record

    @property
    def is_none(self) -> bool:
        """Whether the step is the baseline's own."""
        return self.tier == self.baseline

    def doubt_tokens(self, baseline_tokens: float) -> float:
        """How many more than ``baseline_tokens`` it may be."""
        return baseline_tokens * math.expm1(DOUBTS * self.doubt)

    def most_tokens(self) -> float:
        """With doubt, and no less than such steps lost of late."""
        most, of_baseline, of_late = self.tokens, self.baseline_tokens, self.record.share
        if self.tier == self.baseline:
            return most
        if self.doubt:
            most += self.doubt_tokens(of_baseline)
        return most if of_late is None else max(most, of_baseline * of_late)


NO_LOSS = Loss(0, 0, 0.0, 0.0, 0.0, Record())
"""Of a step that is known to be the baseline's."""
