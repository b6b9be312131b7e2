"""Slot numbers for requests, so that a report can tell them apart in three bytes each."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

MAX_SLOTS = 65_536
MAX_AWAY = 1024
"""Requests that are remembered though they are not in the batch (retracted, say); above it all of them go."""

_NO_SLOTS = np.zeros(0, np.uint16)
_NO_GENERATIONS = np.zeros(0, np.uint8)


@final
class SlotTable:
    """Gives each request id a slot until it is released; counts how often each slot was given away.

    While the same requests follow each other the arrays of the last call are returned again: callers must
    leave them alone.
    """

    def __init__(self) -> None:
        self._slot_by_id: dict[str, int] = {}
        self._free: list[int] = []
        self._generations = bytearray()  # by slot, modulo 256
        self._last_ids: list[str] | None = None
        self._last: tuple[NDArray[np.uint16], NDArray[np.uint8]] = (_NO_SLOTS, _NO_GENERATIONS)

    def assign(self, ids: list[str]) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """The slots (uint16) and generations (uint8, 1 for a slot's first request) of ``ids``, in order.

        Both are empty, so that requests cannot be told apart, where an id occurs twice or there are too many.
        """
        if ids == self._last_ids:
            return self._last
        if len(set(ids)) != len(ids) or len(ids) > MAX_SLOTS - MAX_AWAY:
            return _NO_SLOTS, _NO_GENERATIONS
        by_id = self._slot_by_id
        slots = [by_id[i] if i in by_id else self._take(i) for i in ids]
        if len(by_id) > len(ids) + MAX_AWAY:
            self.release(list(by_id.keys() - set(ids)))
        generations = self._generations
        self._last_ids = ids
        self._last = (np.array(slots, np.uint16), np.array([generations[s] for s in slots], np.uint8))
        return self._last

    def release(self, ids: list[str]) -> None:
        """Free the slots of ``ids``; the ids may be given to other requests afterwards."""
        for i in ids:
            slot = self._slot_by_id.pop(i, None)
            if slot is not None:
                self._free.append(slot)
        if ids:
            self._last_ids = None

    def _take(self, request_id: str) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._generations)
            self._generations.append(0)
        self._generations[slot] = (self._generations[slot] + 1) % 256
        self._slot_by_id[request_id] = slot
        return slot
