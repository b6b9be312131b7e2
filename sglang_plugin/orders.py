"""What the ranks of an engine are to apply, and how rank 0 tells the others.

An order is small and means the same on every rank: a table from batch sizes to tiers, "your own rule" (each
rank evaluates the fallback on the batch that forms), or "SGLang's rule". It travels as a plain tuple in front
of the requests that SGLang broadcasts at the top of each iteration, and only when it changed.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, final

TAG = "specgov.order"
Range = tuple[int, int, int]
"""First batch size, last batch size, num_steps."""


class Kind(enum.IntEnum):
    """What decides the tier."""

    TABLE = 1
    OWN_RULE = 2
    ENGINES_RULE = 3


class Order(NamedTuple):
    """``ranges`` only with ``Kind.TABLE``; the first that holds the batch size counts."""

    kind: Kind
    ranges: tuple[Range, ...] = ()

    def num_steps_for(self, batch_size: int) -> int | None:
        """The table's tier for ``batch_size``; None where it says nothing of that size."""
        for first, last, num_steps in self.ranges:
            if first <= batch_size <= last:
                return num_steps
        return None


OWN_RULE = Order(Kind.OWN_RULE)
ENGINES_RULE = Order(Kind.ENGINES_RULE)


@final
class RankShare:
    """One rank's end of the broadcast; ``in_force`` is the same on every rank at every step.

    Rank 0 changes ``in_force`` where the others do, after the broadcast, and nowhere else.
    """

    __slots__ = ("_sent", "in_force")

    def __init__(self, initial: Order) -> None:
        self.in_force = initial
        self._sent = initial

    def attach(self, requests: list[Any], wanted: Order) -> list[Any]:
        """On rank 0, before the broadcast: the requests, behind ``wanted`` where that is news."""
        if wanted == self._sent:
            return requests
        self._sent = wanted
        return [(TAG, int(wanted.kind), wanted.ranges), *requests]

    def detach(self, requests: list[Any]) -> list[Any]:
        """On every rank, after the broadcast: the requests alone; the order that came with them counts."""
        if not requests or type(requests[0]) is not tuple or requests[0][0] != TAG:
            return requests
        _, kind, ranges = requests[0]
        self.in_force = Order(Kind(kind), ranges)
        return requests[1:]
