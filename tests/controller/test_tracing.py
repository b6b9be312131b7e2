"""Traces: what a span says, that they are off unless asked for, and that nothing waits for a collector."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specgov.controller import tracing
from specgov.controller.config import ConfigError, TracingConfig, load_config
from specgov.controller.tracing import Tracing, TracingError
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Takes the place of OTLP in every ``Tracing`` of the test."""
    in_memory = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "_otlp_exporter", lambda config: in_memory)
    return in_memory


def config(**changes: Any) -> TracingConfig:
    return TracingConfig(endpoint="http://127.0.0.1:4317", **changes)


def finished(sidecar: Any, exporter: InMemorySpanExporter, eventually: Make, count: int) -> list[Any]:
    """The spans, of which there must come to be ``count``; a call may end before its span does."""

    def there() -> bool:
        sidecar.sidecar.tracing.flush()
        return len(exporter.get_finished_spans()) >= count

    eventually(there, "the spans' end")
    spans = exporter.get_finished_spans()
    assert len(spans) == count
    return list(spans)


def test_an_admin_call_is_a_span_in_the_callers_trace(
    start: Make, exporter: InMemorySpanExporter, eventually: Make
) -> None:
    sidecar = start(tracing=config(decisions_share=0.0))
    sidecar.stream()
    # The example of the W3C recommendation "Trace Context", section 3.2.3.
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    request = pb.SetModeRequest(engine_id="engine-1", mode=pb.MODE_FROZEN)
    sidecar.admin.SetMode(request, timeout=60, metadata=(("traceparent", parent),))
    (span,) = finished(sidecar, exporter, eventually, 1)
    assert span.name == "specgov.v1.ControllerAdmin/SetMode"
    assert f"{span.context.trace_id:032x}" == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert dict(span.attributes) == {
        "rpc.system": "grpc",
        "rpc.service": "specgov.v1.ControllerAdmin",
        "rpc.method": "SetMode",
        "specgov.engine_id": "engine-1",
        "specgov.mode": "frozen",
        "rpc.grpc.status_code": 0,
    }


def test_a_refused_call_is_an_error(start: Make, exporter: InMemorySpanExporter, eventually: Make) -> None:
    sidecar = start(tracing=config())
    with pytest.raises(grpc.RpcError):
        sidecar.admin.GetEngine(pb.GetEngineRequest(engine_id="nobody"), timeout=60)
    with pytest.raises(grpc.RpcError):
        sidecar.admin.SetMode(pb.SetModeRequest(engine_id="n" * 300, mode=77), timeout=60)  # type: ignore[arg-type]
    span, second = finished(sidecar, exporter, eventually, 2)
    assert (second.attributes["specgov.engine_id"], second.attributes["specgov.mode"]) == ("n" * 200, 77)
    assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert (span.status.is_ok, span.status.description) == (False, "NOT_FOUND")


def test_a_watch_is_one_span_from_its_beginning_to_its_end(
    start: Make, exporter: InMemorySpanExporter, make_report: Make, eventually: Make
) -> None:
    sidecar = start(tracing=config(decisions_share=0.0))
    stream = sidecar.stream()
    watch = sidecar.admin.Watch(pb.WatchRequest(), timeout=60)
    eventually(lambda: len(sidecar.sidecar.watchers.all) == 1, "the watch's beginning")
    stream.send(make_report(1))
    assert next(watch).step_id == 1
    watch.cancel()
    stream.close()
    (span,) = finished(sidecar, exporter, eventually, 1)
    assert span.name == "specgov.v1.ControllerAdmin/Watch"


def test_health_and_the_hot_path_are_not_traced_as_calls(
    start: Make, exporter: InMemorySpanExporter, eventually: Make
) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    sidecar = start(tracing=config(decisions_share=0.0))
    stream = sidecar.stream()
    stream.close()
    stream.end()
    health_pb2_grpc.HealthStub(sidecar.channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    sidecar.admin.ListEngines(pb.ListEnginesRequest(), timeout=60)
    (span,) = finished(sidecar, exporter, eventually, 1)
    assert span.name == "specgov.v1.ControllerAdmin/ListEngines"


def test_a_decision_says_what_and_why(
    start: Make, exporter: InMemorySpanExporter, make_report: Make, eventually: Make
) -> None:
    sidecar = start(tracing=config(decisions_share=1.0))
    stream = sidecar.stream()  # threshold:3:5
    stream.send(make_report(1))
    stream.decision_that_knows(1)
    first, second = finished(sidecar, exporter, eventually, 2)
    assert (first.attributes["specgov.reports"], first.attributes["specgov.num_steps"]) == (0, 5)
    assert dict(second.attributes) == {
        "specgov.engine_id": "engine-1",
        "specgov.decision_id": 2,
        "specgov.known_step_id": 1,
        "specgov.reports": 1,
        "specgov.num_steps": 0,
        "specgov.reason": "policy",
        "specgov.policy": "threshold",
        "specgov.policy_version": "1",
        "specgov.batch_size": 4,
    }


class FixedDraws:
    """Draws the numbers that it was given."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = iter(numbers)

    def random(self) -> float:
        return next(self._numbers)


def test_the_share_of_decisions_and_the_time_that_one_took() -> None:
    exporter = InMemorySpanExporter()
    draws: Any = FixedDraws(0.0, 0.2499, 0.25, 0.9)
    traces = Tracing(config(decisions_share=0.25), exporter, rng=draws, wall_clock_ns=lambda: 2_000_000)
    engine: Any = type("E", (), {"info": pb.EngineInfo(engine_id="e")})
    for number in range(4):
        traces.decided(engine, (), pb.Decision(decision_id=number, reason=pb.REASON_HOLD), seconds=0.0015)
    traces.flush()
    spans = exporter.get_finished_spans()
    assert [span.attributes and span.attributes["specgov.decision_id"] for span in spans] == [0, 1]
    assert (spans[0].start_time, spans[0].end_time) == (500_000, 2_000_000)  # ns: 1.5 ms before, and now


class StuckExporter(SpanExporter):
    """A collector that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.began = threading.Event()
        self.ended = threading.Event()
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.began.set()
        self.let_go.wait()
        self.taken += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.ended.set()


def test_a_collector_that_hangs_costs_spans_and_nothing_else(eventually: Make) -> None:
    exporter = StuckExporter()
    traces = Tracing(config(decisions_share=1.0, queue_spans=8), exporter)
    engine: Any = type("E", (), {"info": pb.EngineInfo(engine_id="e")})
    for _ in range(8):
        traces.decided(engine, (), pb.Decision(reason=pb.REASON_HOLD), 0.0)
    exporter.began.wait(60.0)
    for _ in range(1000):  # none of them waits for the exporter, which takes nothing
        traces.decided(engine, (), pb.Decision(reason=pb.REASON_HOLD), 0.0)
    traces.close(timeout_s=0.0)
    exporter.let_go.set()
    eventually(exporter.ended.is_set, "the end")
    assert 8 <= exporter.taken <= 16  # what was being sent, and a queue's worth


def test_without_an_endpoint_nothing_of_it_is_loaded(start: Make) -> None:
    assert start().sidecar.tracing is None
    code = (
        "import sys; from specgov.controller.server import Sidecar;"
        "from specgov.controller.config import ServeConfig;"
        "Sidecar(ServeConfig(listen='127.0.0.1:0', insecure=True));"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingError, match=r"pip install 'specgov\[otel\]'"):
        Tracing(config())


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "ftp://host", "http://", ""])
def test_an_endpoint_that_is_no_url_is_refused(tmp_path: Any, endpoint: str) -> None:
    file = tmp_path / "specgov.toml"
    file.write_text(f'[tracing]\nendpoint = "{endpoint}"\n')
    with pytest.raises(ConfigError, match=r"specgov.toml, line 2: tracing.endpoint"):
        load_config(file)
