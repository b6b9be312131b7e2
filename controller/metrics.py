"""Prometheus metrics of the sidecar: every name, label and bucket in one place.

Labels have few values: reasons, tiers and causes. Engine ids come from outside, so none is a label.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specgov.controller.validation import Cause
from specgov.proto.v1 import specgov_pb2 as pb

DECISION_SECONDS_BUCKETS = (
    10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 100e-3,
)  # fmt: skip


def reason_label(reason: int) -> str:
    """``policy`` for ``REASON_POLICY``, and so on."""
    return pb.Reason.Name(reason).removeprefix("REASON_").lower()  # type: ignore[arg-type]


class Metrics:
    """All metrics, in a registry of their own.

    ``connected_engines``, ``engines_on_fallback`` and ``log_rows_dropped`` are read when the endpoint is
    asked.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._decisions = Counter(
            "specgov_decisions_total", "Decisions sent", ["reason", "tier"], registry=self.registry
        )
        self._rejected = Counter(
            "specgov_messages_rejected_total", "Messages rejected", ["cause"], registry=self.registry
        )
        self.reports = Counter("specgov_reports_total", "Step reports accepted", registry=self.registry)
        self.reports_dropped = Counter(
            "specgov_reports_dropped_total", "Step reports that engines dropped", registry=self.registry
        )
        self.tier_switches = Counter(
            "specgov_tier_switches_total",
            "Decisions for another tier than the engine's decision before",
            registry=self.registry,
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
        self.decision_seconds = Histogram(
            "specgov_decision_seconds",
            "From taking reports to the decision's message",
            buckets=DECISION_SECONDS_BUCKETS,
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
        self._log_rows_dropped = Gauge(
            "specgov_decision_log_rows_dropped",
            "Decision log rows lost since the start, because the disk failed or was slow",
            registry=self.registry,
        )
        self._decision_counters: dict[tuple[int, int], Counter] = {}
        for cause in Cause:
            self._rejected.labels(cause.value)

    def count_decision(self, reason: int, tier: int) -> None:
        """Count a decision."""
        counter = self._decision_counters.get((reason, tier))
        if counter is None:
            counter = self._decisions.labels(reason_label(reason), str(tier))
            self._decision_counters[reason, tier] = counter
        counter.inc()

    def count_rejected(self, cause: Cause) -> None:
        """Count a rejected message."""
        self._rejected.labels(cause.value).inc()

    def watch(
        self,
        connected_engines: Callable[[], int],
        engines_on_fallback: Callable[[], int],
        log_rows_dropped: Callable[[], int],
    ) -> None:
        """Where the values that are read on demand come from."""
        self._connected_engines.set_function(connected_engines)
        self._engines_on_fallback.set_function(engines_on_fallback)
        self._log_rows_dropped.set_function(log_rows_dropped)
