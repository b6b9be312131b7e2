"""Prometheus metrics of the sidecar, in a registry of their own; ``engine_metrics`` has those of each engine.

docs/metrics.md has a row for every metric, and a test compares it with the registry. Labels have few values:
causes, reasons, tiers, and a bounded number of engines.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from specgov.controller.engine_metrics import EngineMetrics
from specgov.controller.validation import Cause

# Else each counter brings a second series that says when it began, which is the process's start.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics: the sidecar's own, the process's, and ``engines``, which has those of each engine.

    The arguments of ``watch`` are asked when the endpoint is.
    """

    def __init__(self, engines: EngineMetrics | None = None) -> None:
        self.registry = CollectorRegistry()
        self.engines = EngineMetrics() if engines is None else engines
        self.registry.register(self.engines)
        ProcessCollector(registry=self.registry)
        build = Gauge(
            "specgov_build_info",
            "Always 1; the labels say which version runs",
            ["version", "python", "grpcio"],
            registry=self.registry,
        )
        build.labels(version("specgov"), platform.python_version(), version("grpcio")).set(1)
        self._rejected = Counter(
            "specgov_messages_rejected_total", "Messages rejected", ["cause"], registry=self.registry
        )
        self.streams = Counter("specgov_streams_total", "Streams that were accepted", registry=self.registry)
        self.streams_superseded = Counter(
            "specgov_streams_superseded_total",
            "Streams ended by a newer stream of the same engine",
            registry=self.registry,
        )
        self.watchers_dropped = Counter(
            "specgov_watchers_dropped_total", "Watch streams ended as too slow", registry=self.registry
        )
        self.streams_cut = Counter(
            "specgov_streams_cut_total",
            "Streams cut because their engine read no decision for half a minute",
            registry=self.registry,
        )
        self.stuck = Gauge(
            "specgov_stuck",
            "Streams and thread pools that make no progress, socket files that are gone",
            registry=self.registry,
        )
        self.admin_refused = Counter(
            "specgov_admin_calls_refused_total",
            "Calls of the admin service without one of its tokens",
            registry=self.registry,
        )
        self._connected_engines = Gauge(
            "specgov_connected_engines", "Engines with an open stream", registry=self.registry
        )
        self._engines_on_fallback = Gauge(
            "specgov_engines_on_fallback",
            "Engines whose policy failed and was set aside",
            registry=self.registry,
        )
        self._engines_rolled_back = Gauge(
            "specgov_engines_rolled_back",
            "Engines whose last new policy the sidecar rolled back by itself",
            registry=self.registry,
        )
        self._log_rows_dropped = _CounterElsewhere(
            "specgov_decision_log_rows_dropped",
            "Decision log rows lost, because the disk failed or was slow",
        )
        self.registry.register(self._log_rows_dropped)
        self._state_saves_failed = _CounterElsewhere(
            "specgov_state_saves_failed", "Saves of an engine's state that the disk did not take"
        )
        self.registry.register(self._state_saves_failed)
        for cause in Cause:
            self._rejected.labels(cause.value)

    def count_rejected(self, cause: Cause) -> None:
        """Count a rejected message."""
        self._rejected.labels(cause.value).inc()

    def watch(
        self,
        connected_engines: Callable[[], int],
        engines_on_fallback: Callable[[], int],
        engines_rolled_back: Callable[[], int],
        log_rows_dropped: Callable[[], int],
        state_saves_failed: Callable[[], int],
    ) -> None:
        """Where the values that are read on demand come from."""
        self._connected_engines.set_function(connected_engines)
        self._engines_on_fallback.set_function(engines_on_fallback)
        self._engines_rolled_back.set_function(engines_rolled_back)
        self._log_rows_dropped.read = log_rows_dropped
        self._state_saves_failed.read = state_saves_failed


class _CounterElsewhere(Collector):
    """A counter whose count is kept by something else, and read when the endpoint is asked."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name, self._documentation = name, documentation
        self.read: Callable[[], int] = lambda: 0

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The counter."""
        yield CounterMetricFamily(self._name, self._documentation, value=self.read())
