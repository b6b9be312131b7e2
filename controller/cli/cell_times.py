"""What a growing decision log says of the step times of one batch size, and how surely."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from specgov.env.logged_steps import logged_step
from specgov.env.recording import Row, filtered

_HALF_NORMAL_95 = 1.96 / 2
_ONE_SHORT_IN = 64
"""Requests of which one may be missing: too few to be seen in the step time."""


class CellTime(NamedTuple):
    """The step time of a tier: median and 99th percentile (ms), the steps behind them, and the half width
    of the median's 95 % interval.

    The half width is relative to the median; infinite where there are too few steps to say. The percentile
    is the nearest step's.
    """

    num_steps: int
    median_ms: float
    p99_ms: float
    steps: int
    half_width: float


@final
class LogTail:
    """Reads the steps that a decision log gains."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_steps(self) -> list[Row]:
        """The steps of the whole lines that were written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        entries = (json.loads(line) for line in whole.splitlines())
        return [logged_step(entry, str(self._path)) for entry in entries if entry["kind"] == "step"]


def cell_times(rows: Sequence[Row], batch_size: int, tiers: Sequence[int]) -> list[CellTime]:
    """The step time of each tier at one batch size, from the steps that a calibration would use.

    A batch that is short of a few requests counts: a server that is full may keep one waiting.
    """
    used = filtered("", "", True, rows)
    missing = batch_size - used.batch_size
    at_size = (missing >= 0) & (missing <= batch_size // _ONE_SHORT_IN)
    times = {tier: used.step_ms[at_size & (used.num_steps == tier)] for tier in tiers}
    return [_cell(tier, step_ms) for tier, step_ms in times.items()]


def _cell(tier: int, step_ms: NDArray[np.float64]) -> CellTime:
    if not len(step_ms):
        return CellTime(tier, math.nan, math.nan, 0, math.inf)
    median, p99 = float(np.median(step_ms)), float(np.quantile(step_ms, 0.99, method="inverted_cdf"))
    return CellTime(tier, median, p99, len(step_ms), median_half_width(step_ms) / median)


def median_half_width(values: NDArray[np.float64]) -> float:
    """Half the width of the median's 95 % interval, by the binomial's normal approximation of its ranks.

    Source: order statistics of a sample; the ranks are n/2 -+ 1.96 sqrt(n)/2. Infinite below 6 values.
    """
    middle, reach = (len(values) - 1) / 2, _HALF_NORMAL_95 * math.sqrt(len(values))
    low, high = math.floor(middle - reach), math.ceil(middle + reach)
    if low < 0 or high >= len(values):
        return math.inf
    ordered = np.sort(values)
    return float(ordered[high] - ordered[low]) / 2
