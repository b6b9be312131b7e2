"""Counts of values in buckets, which cost a step an addition; Prometheus' own type costs it ten."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Histogram:
    """Counts of values in buckets whose upper ends are ``bounds``, ends included. Not thread-safe."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Each bucket's upper end, as text, with the count of all values up to it."""
        ends = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._counts)), strict=True))


class SharedHistogram(Collector):
    """A histogram without labels that any thread may count in."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation = name, documentation
        self._histogram = Histogram(bounds)
        self._lock = threading.Lock()

    def observe(self, values: Iterable[float]) -> None:
        """Count values."""
        with self._lock:
            for value in values:
                self._histogram.add(value)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The histogram."""
        with self._lock:
            buckets, total = self._histogram.buckets(), self._histogram.sum
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total)
