"""Metrics: what is counted of each engine, how many labels there can be, and the page that documents them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import Metric

from specgov.controller.engine_metrics import MAX_QUEUED, OVERFLOW, EngineMetrics, Handled
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.guard import Guard
from specgov.controller.metrics import Metrics
from specgov.controller.step_record import StepRecord
from specgov.policies.types import EngineSpec, PolicyContext, StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

CONTEXT = PolicyContext(EngineSpec((0, 3)), np.random.default_rng(0), clock=lambda: 0.0)


@dataclass
class FakeEngine:
    """What the metrics read of an engine."""

    info: pb.EngineInfo
    session: object | None = "a stream"
    mode: int = pb.MODE_ACTIVE
    policy_failure: str = ""
    outlook: Any = None
    tally: Any = None
    policy: Any = field(default_factory=lambda: SimpleNamespace(name="greedy", version="1"))
    last_record: StepRecord | None = None
    guard: Guard = field(default_factory=lambda: Guard(GuardConfig(), "e", CONTEXT))


def engine(engine_id: str, **changes: Any) -> Any:
    return FakeEngine(pb.EngineInfo(engine_id=engine_id, model="m"), **changes)


def record(num_steps: int, *accepted: int, step_ms: float | None = None, **changes: Any) -> StepRecord:
    none = np.empty(0, np.uint8)
    step = StepObservation(
        step_id=1,
        batch_size=8,
        num_steps=num_steps,
        accepted=np.array(accepted, np.uint8),
        slots=none.astype(np.uint16),
        generations=none,
        sum_seq_len_tokens=0,
        max_seq_len_tokens=0,
        waiting_requests=3,
        kv_use_ratio=0.5,
        step_ms=step_ms,
    )
    return StepRecord(
        step,
        **{"followed_decision_id": 1, "lag_steps": None, "engine_rule_num_steps": None, "reports_dropped": 0}
        | changes,
    )


@pytest.fixture(name="metrics")
def _metrics() -> Metrics:
    return Metrics(EngineMetrics(max_engines=2, wall_clock=lambda: 1234.5))


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_steps_are_counted_by_tier(metrics: Metrics) -> None:
    one = engine("a")
    metrics.engines.connected(one)
    # 3 requests with 0 + 1 + 3 accepted drafts: 4 + 3 = 7 tokens; 2 requests without speculation: 2 tokens.
    metrics.engines.handled(
        one, Handled([record(3, 0, 1, 3, step_ms=6.0), record(0, 0, 0, step_ms=4.0), record(3)])
    )
    assert value(metrics, "specgov_steps_total", engine="a", tier="3") == 2
    assert value(metrics, "specgov_steps_total", engine="a", tier="0") == 1
    assert value(metrics, "specgov_request_steps_total", engine="a", tier="3") == 3
    assert value(metrics, "specgov_output_tokens_total", engine="a", tier="3") == 7
    assert value(metrics, "specgov_output_tokens_total", engine="a", tier="0") == 2
    assert value(metrics, "specgov_step_seconds_count", engine="a") == 2  # the third's time was not valid
    assert value(metrics, "specgov_step_seconds_sum", engine="a") == pytest.approx(0.010)
    assert value(metrics, "specgov_last_report_timestamp_seconds", engine="a") == 1234.5


def test_lag_and_round_trip_fall_into_buckets_whose_upper_ends_are_included(metrics: Metrics) -> None:
    one = engine("a")
    metrics.engines.connected(one)
    lags = (1, 3, 3, 7, 33)
    steps = [record(0, 0, lag_steps=lag, round_trip_ms=0.5, followed_decision_id=0) for lag in lags]
    metrics.engines.handled(one, Handled(steps))
    counts = {le: value(metrics, "specgov_decision_lag_steps_bucket", engine="a", le=le) for le in
              ("1.0", "2.0", "3.0", "6.0", "8.0", "32.0", "+Inf")}  # fmt: skip
    assert counts == {"1.0": 1, "2.0": 1, "3.0": 3, "6.0": 3, "8.0": 4, "32.0": 4, "+Inf": 5}
    assert value(metrics, "specgov_decision_lag_steps_sum", engine="a") == 47
    assert value(metrics, "specgov_decision_lag_steps_count", engine="a") == 5
    assert value(metrics, "specgov_round_trip_seconds_bucket", engine="a", le="0.0002") == 0
    assert value(metrics, "specgov_round_trip_seconds_bucket", engine="a", le="0.0005") == 5
    assert value(metrics, "specgov_steps_by_own_rule_total", engine="a") == 5


def test_what_an_engine_is_now(metrics: Metrics) -> None:
    one = engine("a", mode=pb.MODE_SHADOW, policy_failure="broke", last_record=record(3, 1))
    metrics.engines.connected(one)
    assert value(metrics, "specgov_engine_mode", engine="a", mode="shadow") == 1
    assert value(metrics, "specgov_engine_mode", engine="a", mode="active") == 0
    assert value(metrics, "specgov_engine_policy_failed", engine="a") == 1
    assert value(metrics, "specgov_batch_size", engine="a") == 8
    assert value(metrics, "specgov_waiting_requests", engine="a") == 3
    assert value(metrics, "specgov_kv_use_ratio", engine="a") == 0.5
    assert value(metrics, "specgov_engine_connected", engine="a") == 1
    one.session = None
    assert value(metrics, "specgov_engine_connected", engine="a") == 0


def test_engines_beyond_the_limit_share_a_label(metrics: Metrics) -> None:
    engines = [engine(name) for name in "abcd"]
    for one in engines:
        metrics.engines.connected(one)
        decision = pb.Decision(num_steps=3, reason=pb.REASON_HOLD)
        metrics.engines.handled(one, Handled([], decision, switched=True))
    assert labels_of(metrics, "specgov_tier_switches_total") == {"a": 1, "b": 1, OVERFLOW: 2}
    assert value(metrics, "specgov_decisions_total", engine=OVERFLOW, reason="hold", tier="3") == 2
    assert labels_of(metrics, "specgov_engine_connected") == {"a": 1, "b": 1}


def test_an_engine_that_is_away_gives_its_label_to_one_that_comes(metrics: Metrics) -> None:
    a, b, c = (engine(name) for name in "abc")
    for one in (a, b):
        metrics.engines.connected(one)
        metrics.engines.handled(one, Handled([record(3, 1)]))
    a.session = None
    assert labels_of(metrics, "specgov_steps_total") == {"a": 1, "b": 1}  # nobody needs it yet
    metrics.engines.connected(c)
    assert labels_of(metrics, "specgov_engine_connected") == {"b": 1, "c": 1}
    # a is back and finds none free: it is counted under the overflow, and from 0 where it gets one again.
    a.session = "a stream"
    metrics.engines.connected(a)
    metrics.engines.handled(a, Handled([], pb.Decision(reason=pb.REASON_POLICY)))
    assert OVERFLOW in labels_of(metrics, "specgov_decisions_total")


def test_an_engine_that_reconnects_keeps_its_counts(metrics: Metrics) -> None:
    first = engine("a")
    metrics.engines.connected(first)
    metrics.engines.handled(first, Handled([record(3, 1)]))
    again = engine("a")
    metrics.engines.connected(again)
    metrics.engines.handled(again, Handled([record(3, 1)]))
    assert value(metrics, "specgov_steps_total", engine="a", tier="3") == 2


def test_what_was_counted_of_all_engines_stays_when_a_label_goes(metrics: Metrics) -> None:
    a, b, c = (engine(name) for name in "abc")
    for one in (a, b):
        metrics.engines.connected(one)
        metrics.engines.handled(one, Handled([], pb.Decision(), seconds=0.25))
    a.session = None
    metrics.engines.connected(c)  # takes a's label
    assert value(metrics, "specgov_decision_seconds_count") == 2
    assert value(metrics, "specgov_decision_seconds_sum") == 0.5


def test_few_steps_wait_to_be_counted(metrics: Metrics) -> None:
    one = engine("a")
    metrics.engines.connected(one)
    for _ in range(MAX_QUEUED - 1):
        metrics.engines.handled(one, Handled([record(3, 1)]))
        assert not one.tally.is_due
    metrics.engines.handled(one, Handled([record(3, 1)]))
    assert one.tally.is_due
    one.tally.settle()
    assert not one.tally.is_due
    assert one.tally.by_tier[3].steps == MAX_QUEUED
    # And the endpoint tells of those that wait.
    metrics.engines.handled(one, Handled([record(3, 1)]))
    assert value(metrics, "specgov_steps_total", engine="a", tier="3") == MAX_QUEUED + 1


def test_streams_and_the_endpoint_count_each_step_once() -> None:
    """Four streams without labels count in one tally, which the endpoint is asked for all the while."""
    metrics = Metrics(EngineMetrics(max_engines=0))
    engines = [engine(name) for name in "abcd"]
    for one in engines:
        metrics.engines.connected(one)
    over = threading.Event()

    def stream(one: Any) -> None:
        for _ in range(1000):
            metrics.engines.handled(one, Handled([record(3, 1)], pb.Decision(num_steps=3), switched=True))
            if one.tally.is_due:
                one.tally.settle()

    def endpoint() -> None:
        while not over.is_set():
            list(metrics.engines.collect())

    threads = [threading.Thread(target=stream, args=(one,)) for one in engines]
    asking = threading.Thread(target=endpoint)
    for thread in (asking, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    asking.join()
    assert value(metrics, "specgov_steps_total", engine=OVERFLOW, tier="3") == 4000
    assert value(metrics, "specgov_output_tokens_total", engine=OVERFLOW, tier="3") == 8000
    assert value(metrics, "specgov_tier_switches_total", engine=OVERFLOW) == 4000
    assert value(metrics, "specgov_decision_seconds_count") == 4000


def test_any_text_of_an_engine_can_be_shown(metrics: Metrics) -> None:
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    hostile = 'a"b\\c\nd{e}=,\u2028 #'
    one = engine(hostile)
    one.info.model = hostile
    metrics.engines.connected(one)
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    (info,) = (family for family in families if family.name == "specgov_engine_info")
    assert (info.samples[0].labels["engine"], info.samples[0].labels["model"]) == (hostile, hostile)


def test_no_counter_brings_a_series_of_its_beginning(metrics: Metrics) -> None:
    from prometheus_client import generate_latest

    assert "_created" not in generate_latest(metrics.registry).decode()


def labels_of(metrics: Metrics, name: str) -> dict[str, float]:
    """The values of a metric by engine, summed over its other labels."""
    found: dict[str, float] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels["engine"]] = found.get(sample.labels["engine"], 0) + sample.value
    return found


# The page.


def registered() -> Iterator[tuple[Metric, frozenset[str]]]:
    """Every family of a fresh registry, with its labels (of which it has no samples yet)."""
    # collect() tells no label names of a family without samples; only private attributes do.
    for collector in list(Metrics().registry._collector_to_names):
        for family in collector.collect():
            names = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            if family.name.startswith("specgov_"):
                yield family, frozenset(names)


def sample_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_the_page_lists_every_metric_with_type_labels_and_meaning(documented_metrics: Any) -> None:
    exist = {
        sample_name(family): (family.type, labels, family.documentation) for family, labels in registered()
    }
    page = {name: (row.kind, row.labels, row.meaning) for name, row in documented_metrics.items()}
    assert page == exist


def test_names_follow_prometheus_conventions(documented_metrics: Any) -> None:
    for name, row in documented_metrics.items():
        assert row.unit, f"{name} has no unit"
        assert (row.kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|us|milli\w*|minutes|percent|kb|mb)(_|$)", name), (
            f"{name}: not a base unit"
        )
        if row.unit in ("seconds", "ratio", "tokens"):
            assert re.search(f"_{row.unit}(_total)?$", name), f"{name} does not end in its unit, {row.unit}"
