"""What a step may lose against the baseline: as expected, with doubt, and as such steps were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Loss:
    """What a step at ``tier`` is expected to lose against ``baseline``; both are indices.

    ``tokens`` are lost, ``baseline_tokens`` are what the baseline would bring in the step's time. ``doubt``
    is the standard deviation of the log of that; ``record`` is of such steps. Nobody changes one; it is made
    once for many steps.
    """

    tier: int
    baseline: int
    tokens: float
    baseline_tokens: float
    doubt: float
    record: Record
    _doubt_share: float = field(init=False, repr=False)
    _most_tokens: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._doubt_share = math.expm1(DOUBTS * self.doubt)
        self._most_tokens = self.tokens
        if self.doubt and not self.is_none:
            self._most_tokens += self.doubt_tokens(self.baseline_tokens)

    @property
    def is_none(self) -> bool:
        """Whether the step is the baseline's own."""
        return self.tier == self.baseline

    def doubt_tokens(self, baseline_tokens: float) -> float:
        """How many more than ``baseline_tokens`` it may be."""
        return baseline_tokens * self._doubt_share

    def most_tokens(self) -> float:
        """With doubt, and no less than such steps lost of late."""
        most, of_late = self._most_tokens, self.record.share
        if of_late is None or self.tier == self.baseline:
            return most
        measured = self.baseline_tokens * of_late
        return measured if measured > most else most


NO_LOSS = Loss(0, 0, 0.0, 0.0, 0.0, Record())
"""Of a step that is known to be the baseline's."""
