"""What is counted of each engine, and shown to Prometheus when it asks.

Engine ids come from outside, so only ``MAX_ENGINES`` of them become labels; the engines beyond share one,
``OVERFLOW``. An engine keeps its label while it is away, until a connected one needs it; the series then end,
and begin at 0 should it come back.

A step only puts what is to be counted into its label's queue. It is counted, many steps at once, when the
queue is long or the endpoint is asked, which so sees every step. Prometheus' types are only made then.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from specgov.controller.guard.metrics import guard_families
from specgov.controller.histogram import Histogram, SharedHistogram
from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.engine import Engine
    from specgov.controller.guard.estimates import Outlook
    from specgov.controller.step_record import StepRecord

MAX_ENGINES = 64
OVERFLOW = "_other"
"""The label that engines beyond the limit share. They have counters, and no gauges."""

MAX_QUEUED = 32
"""Turns of a label's streams that wait to be counted, for those that count many at once."""

DECISION_SECONDS_BUCKETS = (
    10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 100e-3,
)  # fmt: skip
LAG_STEPS_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
ROUND_TRIP_SECONDS_BUCKETS = (0.2e-3, 0.5e-3, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 1.0)

MODES = {number: name.removeprefix("MODE_").lower() for name, number in pb.Mode.items() if number}


def reason_label(reason: int) -> str:
    """``policy`` for ``REASON_POLICY``, and so on."""
    return pb.Reason.Name(reason).removeprefix("REASON_").lower()  # type: ignore[arg-type]


class Handled(NamedTuple):
    """What a stream did in one turn: steps that were reported, and the decision on them, if one was made.

    ``outlook`` is what it is expected to bring; ``switched``: it is for another tier than the one before;
    ``seconds``: how long it took.
    """

    records: Sequence[StepRecord]
    decision: pb.Decision | None = None
    outlook: Outlook | None = None
    switched: bool = False
    seconds: float = 0.0


class _OfTier:
    """What is counted of the steps that ran at one tier."""

    __slots__ = ("output_tokens", "request_steps", "steps")

    def __init__(self) -> None:
        self.steps = self.request_steps = self.output_tokens = 0


class Tally:
    """What is counted under one label.

    ``handled`` queues what is to be counted, and ``settle`` counts it; any thread may call them. The counts
    are read with ``lock`` held. ``decision_seconds`` is shared by all labels.
    """

    __slots__ = (
        "_decision_seconds",
        "_queue",
        "baseline_output_tokens",
        "by_tier",
        "decisions",
        "expected_output_tokens",
        "lag_steps",
        "last_report_s",
        "lock",
        "reports_dropped",
        "reports_shed",
        "round_trip_seconds",
        "step_seconds",
        "steps_by_own_rule",
        "tier_switches",
        "timed_steps",
    )

    def __init__(self, decision_seconds: SharedHistogram) -> None:
        self.lock = threading.Lock()
        self.by_tier: dict[int, _OfTier] = defaultdict(_OfTier)
        self.timed_steps = 0
        self.step_seconds = 0.0
        self.steps_by_own_rule = 0
        self.reports_dropped = 0
        self.reports_shed = 0
        self.decisions: dict[tuple[int, int], int] = defaultdict(int)  # by reason and tier
        self.tier_switches = 0
        self.expected_output_tokens = 0.0
        self.baseline_output_tokens = 0.0
        self.last_report_s = 0.0
        self.lag_steps = Histogram(LAG_STEPS_BUCKETS)
        self.round_trip_seconds = Histogram(ROUND_TRIP_SECONDS_BUCKETS)
        self._decision_seconds = decision_seconds
        self._queue: deque[Handled] = deque()

    def handled(self, now_s: float, handled: Handled) -> None:
        """Queue what a stream did at ``now_s``, in seconds since 1970."""
        if handled.records:
            self.last_report_s = now_s
        self._queue.append(handled)

    @property
    def is_due(self) -> bool:
        """Whether so much is queued that it should be counted."""
        return len(self._queue) >= MAX_QUEUED

    def settle(self) -> None:
        """Count what is queued."""
        with self.lock:
            turns = [self._queue.popleft() for _ in range(len(self._queue))]
            for records, decision, outlook, switched, _ in turns:
                for record in records:
                    self._add_step(record)
                if decision is not None:
                    self.decisions[decision.reason, decision.num_steps] += 1
                    self.tier_switches += switched
                if outlook is not None and decision is not None:
                    self.expected_output_tokens += outlook.tokens
                    self.baseline_output_tokens += outlook.baseline_tokens
            self._decision_seconds.observe([turn.seconds for turn in turns if turn.decision is not None])

    def _add_step(self, record: StepRecord) -> None:
        step = record.step
        of_tier = self.by_tier[step.num_steps]
        of_tier.steps += 1
        of_tier.request_steps += len(step.accepted)
        of_tier.output_tokens += step.output_tokens
        if (step_ms := step.step_ms) is not None:
            self.timed_steps += 1
            self.step_seconds += 1e-3 * step_ms
        if not record.followed_decision_id:
            self.steps_by_own_rule += 1
        self.reports_dropped += record.reports_dropped
        self.reports_shed += record.reports_shed
        if (lag_steps := record.lag_steps) is not None:
            self.lag_steps.add(lag_steps)
        if (round_trip_ms := record.round_trip_ms) is not None:
            self.round_trip_seconds.add(1e-3 * round_trip_ms)


@dataclass(frozen=True, slots=True)
class _Labelled:
    engine: Engine
    tally: Tally


class EngineMetrics(Collector):
    """Tallies by engine, and the families that they make; ``wall_clock`` gives seconds since 1970."""

    def __init__(self, max_engines: int = MAX_ENGINES, wall_clock: Callable[[], float] = time.time) -> None:
        self._max_engines = max_engines
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._labelled: dict[str, _Labelled] = {}  # the longest connected first
        self._decision_seconds = SharedHistogram(
            "specgov_decision_seconds",
            "From taking reports to the decision's message",
            DECISION_SECONDS_BUCKETS,
        )
        self._overflow = Tally(self._decision_seconds)

    def connected(self, engine: Engine) -> None:
        """Give an engine that came a label, if there is one, and with it the tally to count in."""
        engine_id = engine.info.engine_id
        with self._lock:
            known = self._labelled.pop(engine_id, None)
            if known is None and not self._has_room():
                engine.tally = self._overflow
                return
            engine.tally = known.tally if known else Tally(self._decision_seconds)
            self._labelled[engine_id] = _Labelled(engine, engine.tally)

    def handled(self, engine: Engine, handled: Handled) -> None:
        """Note what an engine's stream did."""
        if engine.tally is not None:
            engine.tally.handled(self._wall_clock(), handled)

    def _has_room(self) -> bool:
        """Whether a label is free, or an engine that is away can give its own up."""
        if len(self._labelled) < self._max_engines:
            return True
        away = (name for name, one in self._labelled.items() if one.engine.session is None)
        longest_away = next(away, None)
        if longest_away is None:
            return False
        self._labelled.pop(longest_away).tally.settle()  # for what all labels share
        return True

    def collect(self) -> Iterator[Metric]:
        """Everything, as Prometheus wants it."""
        with self._lock:
            labelled = dict(self._labelled)
        tallies = {name: one.tally for name, one in labelled.items()}
        for tally in (*tallies.values(), self._overflow):
            tally.settle()
        yield from self._decision_seconds.collect()
        yield from _gauges({name: one.engine for name, one in labelled.items()})
        yield from guard_families({name: one.engine.guard for name, one in labelled.items()})
        yield from _counts(tallies | ({OVERFLOW: self._overflow} if self._overflow.decisions else {}))


def _gauges(engines: dict[str, Engine]) -> Iterator[GaugeMetricFamily]:
    """What the engines are like now."""
    info = GaugeMetricFamily(
        "specgov_engine_info",
        "Always 1; the labels say what the engine and its policy are",
        labels=[
            "engine",
            "model",
            "draft",
            "gpu",
            "engine_type",
            "engine_version",
            "policy",
            "policy_version",
        ],
    )
    connected = GaugeMetricFamily(
        "specgov_engine_connected", "1 while the engine has a stream", labels=["engine"]
    )
    mode = GaugeMetricFamily(
        "specgov_engine_mode", "1 for the engine's mode, 0 for the others", labels=["engine", "mode"]
    )
    failed = GaugeMetricFamily(
        "specgov_engine_policy_failed",
        "1 while the engine gets its smallest tier, because its policy failed",
        labels=["engine"],
    )
    batch = GaugeMetricFamily("specgov_batch_size", "Running requests in the newest step", labels=["engine"])
    waiting = GaugeMetricFamily(
        "specgov_waiting_requests", "Requests that waited at the newest step", labels=["engine"]
    )
    kv_use = GaugeMetricFamily(
        "specgov_kv_use_ratio", "Share of the KV cache in use at the newest step", labels=["engine"]
    )
    for name, engine in engines.items():
        about, policy = engine.info, engine.policy
        texts = (about.model, about.draft, about.gpu, about.engine, about.engine_version)
        info.add_metric([name, *texts, policy.name, policy.version], 1)
        connected.add_metric([name], engine.session is not None)
        for number, word in MODES.items():
            mode.add_metric([name, word], engine.mode == number)
        failed.add_metric([name], bool(engine.policy_failure))
        if engine.last_record is not None:
            step = engine.last_record.step
            batch.add_metric([name], step.batch_size)
            waiting.add_metric([name], step.waiting_requests)
            if step.kv_use_ratio is not None:
                kv_use.add_metric([name], step.kv_use_ratio)
    yield from (info, connected, mode, failed, batch, waiting, kv_use)


def _counts(
    tallies: dict[str, Tally],
) -> Iterator[Metric]:
    """What was counted."""
    by_tier = {
        "steps": CounterMetricFamily(
            "specgov_steps", "Decode steps reported, by the tier that ran", labels=["engine", "tier"]
        ),
        "request_steps": CounterMetricFamily(
            "specgov_request_steps",
            "Live requests summed over the steps, by the tier that ran",
            labels=["engine", "tier"],
        ),
        "output_tokens": CounterMetricFamily(
            "specgov_output_tokens",
            "Output tokens of the reported steps, by the tier that ran",
            labels=["engine", "tier"],
        ),
    }
    step_seconds = SummaryMetricFamily(
        "specgov_step_seconds", "Duration of the steps whose time is valid", labels=["engine"]
    )
    plain = {
        "steps_by_own_rule": CounterMetricFamily(
            "specgov_steps_by_own_rule",
            "Steps that followed the engine's own rule and no decision of the sidecar",
            labels=["engine"],
        ),
        "reports_dropped": CounterMetricFamily(
            "specgov_reports_dropped", "Step reports that the engine dropped", labels=["engine"]
        ),
        "reports_shed": CounterMetricFamily(
            "specgov_reports_shed",
            "Step reports that the sidecar left out, since newer ones waited",
            labels=["engine"],
        ),
        "tier_switches": CounterMetricFamily(
            "specgov_tier_switches",
            "Decisions for another tier than the engine's decision before",
            labels=["engine"],
        ),
        "expected_output_tokens": CounterMetricFamily(
            "specgov_expected_output_tokens",
            "Output tokens that the policy's model expects of a step, summed over its decisions",
            labels=["engine"],
        ),
        "baseline_output_tokens": CounterMetricFamily(
            "specgov_baseline_output_tokens",
            "Output tokens that it expects of the baseline in the same time",
            labels=["engine"],
        ),
    }
    decisions = CounterMetricFamily(
        "specgov_decisions", "Decisions sent, by reason and chosen tier", labels=["engine", "reason", "tier"]
    )
    last_report = GaugeMetricFamily(
        "specgov_last_report_timestamp_seconds", "When the newest report came, since 1970", labels=["engine"]
    )
    lag = HistogramMetricFamily(
        "specgov_decision_lag_steps",
        "Steps from the newest result that a decision knew to the step that followed it",
        labels=["engine"],
    )
    round_trip = HistogramMetricFamily(
        "specgov_round_trip_seconds",
        "From sending a report to its decision, as the engine's client measured it",
        labels=["engine"],
    )
    for name, tally in tallies.items():
        with tally.lock:
            for attribute, family in by_tier.items():
                for tier, of_tier in tally.by_tier.items():
                    family.add_metric([name, str(tier)], getattr(of_tier, attribute))
            for attribute, family in plain.items():
                family.add_metric([name], getattr(tally, attribute))
            for (reason, tier), count in tally.decisions.items():
                decisions.add_metric([name, reason_label(reason), str(tier)], count)
            step_seconds.add_metric([name], count_value=tally.timed_steps, sum_value=tally.step_seconds)
            if tally.last_report_s:
                last_report.add_metric([name], tally.last_report_s)
            lag.add_metric([name], buckets=tally.lag_steps.buckets(), sum_value=tally.lag_steps.sum)
            round_trip.add_metric(
                [name], buckets=tally.round_trip_seconds.buckets(), sum_value=tally.round_trip_seconds.sum
            )
    yield from (*by_tier.values(), step_seconds, *plain.values(), decisions, last_report, lag, round_trip)
