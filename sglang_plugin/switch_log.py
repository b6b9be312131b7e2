"""Bounds what SGLang keeps and logs at each switch of tiers."""

from __future__ import annotations

import logging
from typing import Any, final

SOURCE = "adaptive_spec.restore"
"""Who writes at a switch, in SGLang's records of settings that it changed."""
MAX_ENTRIES = 256
LINE = "Switch adaptive runtime state"
LINES_AT_START = 10
SECONDS_BETWEEN_LINES = 60.0


def trim(record: list[Any]) -> None:
    """Shorten a record of SGLang's in place: of the switches, only the last counts for what it is read for.

    The record is a list of (source, settings) that is replayed in order, so the last switch keeps its place.
    """
    if len(record) <= MAX_ENTRIES:
        return
    switches = [index for index, entry in enumerate(record) if entry[0] == SOURCE]
    superseded = set(switches[:-1])
    if superseded:
        record[:] = [entry for index, entry in enumerate(record) if index not in superseded]


@final
class SwitchLines(logging.Filter):
    """Lets the first lines about switches pass, then one a minute, which says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = 0
        self._left_out = 0
        self._last_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is to be logged; ``record.created`` is the clock."""
        if not isinstance(record.msg, str) or not record.msg.startswith(LINE):
            return True
        if self._passed >= LINES_AT_START and record.created - self._last_s < SECONDS_BETWEEN_LINES:
            self._left_out += 1
            return False
        if self._left_out:
            record.msg += f" ({self._left_out} such lines left out)"
        self._passed += 1
        self._left_out = 0
        self._last_s = record.created
        return True
