"""Numbers kept for each request, in the order of the newest report.

Requests come and go: a slot names one, its generation tells that it has been given to another. Rows follow
the reports, so that most steps, whose requests are those of the step before, cost nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from specgov.policies.learnt import GROWS, Learnt

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_FIRST_SLOTS = 256
_NOBODY = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class Changes:
    """Positions of new requests, whose rows are zero, and of those that were away, and how long."""

    new: Indices
    back: Indices
    away_steps: NDArray[np.int64]


class RequestRows(Learnt):
    """A column of ``width`` numbers for each live request, and for each that was live a while ago.

    Args:
        width: numbers a request.
        free_after_steps: a request not seen for so long is forgotten.

    Attributes: values: shape (width, live), in the order of the newest report; callers write to it.

    """

    values: Annotated[Floats, GROWS]
    _table: Annotated[Floats, GROWS]
    _generation: Annotated[NDArray[np.uint8], GROWS]
    _last_step: Annotated[NDArray[np.int64], GROWS]
    _slots: Annotated[Indices, GROWS]
    _names: bytes
    _step_id: int

    def __init__(self, width: int, free_after_steps: int) -> None:
        self._free_after_steps = free_after_steps
        self._table = np.zeros((width, _FIRST_SLOTS))
        self._generation = np.zeros(_FIRST_SLOTS, dtype=np.uint8)
        self._last_step = np.full(_FIRST_SLOTS, -1, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Forget everyone."""
        self._last_step[:] = -1
        self._slots = _NOBODY
        self._names = b""
        self._step_id = -1
        self.values = np.zeros((len(self._table), 0))

    def scale(self, rows: slice, factor: float) -> None:
        """Multiply some rows of every request, live or not."""
        self.values[rows] *= factor
        self._table[rows] *= factor

    def follow(
        self, slots: NDArray[np.uint16], generations: NDArray[np.uint8], step_id: int
    ) -> Changes | None:
        """Bring the rows into the order of a report; None where it has the requests of the one before it."""
        names = slots.tobytes() + generations.tobytes()
        before, self._step_id = self._step_id, step_id
        if names == self._names and 0 <= step_id - before <= self._free_after_steps:
            return None
        self._table[:, self._slots] = self.values
        self._last_step[self._slots] = before
        index = slots.astype(np.intp)
        largest = int(index.max(initial=0))
        if largest >= len(self._last_step):
            self._grow(largest + 1)
        away = step_id - self._last_step[index]
        is_new = (self._last_step[index] < 0) | (away < 0) | (away > self._free_after_steps)
        is_new |= self._generation[index] != generations
        self.values, self._slots, self._names = self._table.take(index, axis=1), index, names
        fresh = is_new.nonzero()[0]
        if len(fresh):
            self.values[:, fresh] = 0.0
            self._generation[index] = generations
        away -= step_id - before
        back = ((away > 0) & ~is_new).nonzero()[0]
        return Changes(fresh, back, away[back])

    def _grow(self, slots: int) -> None:
        more = max(slots, 2 * len(self._last_step)) - len(self._last_step)
        self._table = np.pad(self._table, ((0, 0), (0, more)))
        self._generation = np.pad(self._generation, (0, more))
        self._last_step = np.pad(self._last_step, (0, more), constant_values=-1)
