"""Health, reflection, metrics and the end of a sidecar."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from specgov.controller.config import ServeConfig
from specgov.controller.listen import ListenError
from specgov.controller.server import Sidecar
from specgov.controller.telemetry import Telemetry
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

Make = Callable[..., Any]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "specgov.v1.SpeculationController", "specgov.v1.ControllerAdmin")


def _health(channel: grpc.Channel, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status


@pytest.mark.parametrize("service", SERVICES)
def test_healthy_while_serving(start: Make, service: str) -> None:
    assert _health(start().channel, service) == SERVING


def test_health_of_an_unknown_service(start: Make) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        _health(start().channel, "specgov.v2.SpeculationController")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("service", SERVICES)
def test_not_healthy_before_the_start_and_while_draining(tmp_path: Path, service: str) -> None:
    sidecar = Sidecar(ServeConfig(listen=f"unix://{tmp_path}/s.sock"))
    seen: list[int] = []
    request = health_pb2.HealthCheckRequest(service=service)
    sidecar.health.Watch(request, _Context(), send_response_callback=lambda r: seen.append(r.status))
    sidecar.start()
    sidecar.stop()
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]


class _Context:
    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True


def test_reflection(start: Make) -> None:
    database = ProtoReflectionDescriptorDatabase(start().channel)
    assert set(database.get_services()) == {
        *SERVICES[1:],
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    file = database.FindFileContainingSymbol("specgov.v1.StepReport")
    assert file.package == "specgov.v1"


def test_drain_ends_streams_with_a_status(start: Make, eventually: Make) -> None:
    sidecar = start()
    streams = [sidecar.stream(engine_id="a"), sidecar.silent_stream()]
    watch = sidecar.admin.Watch(pb.WatchRequest(), timeout=60)
    eventually(lambda: sidecar.sidecar.open_streams == 2, "both streams' beginning")
    eventually(lambda: len(sidecar.sidecar.watchers.all) == 1, "the watch's beginning")
    sidecar.sidecar.stop()
    for stream in streams:
        assert stream.end() == (grpc.StatusCode.UNAVAILABLE, "draining: this sidecar is being stopped")
    with pytest.raises(grpc.RpcError) as raised:
        next(watch)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    assert sidecar.metric("specgov_connected_engines") == 0


def test_metrics_values(start: Make, make_report: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()  # threshold:3:5 decides 5 for the guess of a batch of one
    stream.send(make_report(1, reports_dropped=4))  # a batch of 4: tier 0, a switch
    stream.decision_that_knows(1)
    stream.send(make_report(2))
    stream.decision_that_knows(2)
    stream.send(make_report(2), make_report(3, batch_size=2, accepted_drafts=b"", slots_u16le=b"",
                                            slot_generations_u8=b"", sum_seq_len_tokens=0))  # fmt: skip
    stream.decision_that_knows(3)
    of = {"engine": "engine-1"}
    assert sidecar.metric("specgov_decisions_total", reason="policy", tier="5", **of) == 2
    assert sidecar.metric("specgov_decisions_total", reason="policy", tier="0", **of) == 2
    assert sidecar.metric("specgov_tier_switches_total", **of) == 2
    assert sidecar.metric("specgov_steps_total", tier="3", **of) == 3
    assert sidecar.metric("specgov_reports_dropped_total", **of) == 4
    assert sidecar.metric("specgov_messages_rejected_total", cause="step_id_not_new") == 1
    assert sidecar.metric("specgov_messages_rejected_total", cause="bad_tiers") == 0
    assert sidecar.metric("specgov_decision_seconds_count") == 4
    assert sidecar.metric("specgov_connected_engines") == 1
    assert sidecar.metric("specgov_streams_total") == 1


def test_metrics_endpoint(start: Make) -> None:
    sidecar = start(metrics="127.0.0.1:0")
    sidecar.stream()
    address = sidecar.sidecar.metrics_address
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
        text = response.read().decode()
    assert "specgov_connected_engines 1.0" in text
    assert 'specgov_decisions_total{engine="engine-1",reason="policy",tier="5"} 1.0' in text


def test_metrics_port_is_busy(start: Make, tmp_path: Path) -> None:
    first = start(metrics="127.0.0.1:0")
    busy = str(first.sidecar.metrics_address)
    with pytest.raises(ListenError, match="Address already in use"):
        start(listen=f"unix://{tmp_path}/other.sock", metrics=busy)


def test_decision_time_is_measured(start: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    original = Telemetry.__init__

    def with_ticks(self: Telemetry, metrics: Any, log: Any = None, **more: Any) -> None:
        original(self, metrics, log, timer=lambda: float(next(ticks)), **more)

    monkeypatch.setattr(Telemetry, "__init__", with_ticks)
    sidecar = start()
    sidecar.stream()
    # The timer is read before and after the one decision: 1 s between.
    assert sidecar.metric("specgov_decision_seconds_sum") == 1.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "specgov.controller.cli.main", "serve", "--policy", "static:5"]
    command += ["--listen", f"unix://{tmp_path}/s.sock", "--decision-log", str(tmp_path / "log.jsonl")]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    yield running
    running.kill()
    running.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits(
    process: subprocess.Popen[str], tmp_path: Path, make_info: Make, make_report: Make, number: int
) -> None:
    """With a stream that nobody reads, too: it must not hold up the exit."""
    with grpc.insecure_channel(f"unix://{tmp_path}/s.sock") as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        stub = pb_grpc.SpeculationControllerStub(channel)
        messages = [pb.EngineMessage(info=make_info()), pb.EngineMessage(report=make_report(1))]
        hold = _Hold()
        call = stub.Control(hold.after(messages), timeout=60)
        assert next(call).num_steps == 5
        assert next(call).known_step_id == 1
        unread = stub.Control(
            hold.after([pb.EngineMessage(info=make_info(engine_id="unread"))]
                       + [pb.EngineMessage(report=make_report(i)) for i in range(1, 3000)]),
            timeout=60,
        )  # fmt: skip
        next(unread)
        process.send_signal(number)
        with pytest.raises(grpc.RpcError) as raised:
            for _ in call:
                pass
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=60) == 0
        hold.release()
    assert not (tmp_path / "s.sock").exists()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert '"engine_id":"engine-1","step_id":1' in lines[3]


def test_exit_waits_for_no_thread(tmp_path: Path) -> None:
    """A thread that never ends stands for one of gRPC's that hangs: the interpreter would wait for it."""
    code = (
        "import sys, threading\n"
        "from specgov.controller.cli.main import main\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        f"main(['serve', '--listen', 'unix://{tmp_path}/s.sock', '--policy', 'static'])\n"
    )
    with (
        subprocess.Popen([sys.executable, "-c", code]) as process,
        grpc.insecure_channel(f"unix://{tmp_path}/s.sock") as channel,
    ):
        try:
            grpc.channel_ready_future(channel).result(timeout=60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


class _Hold:
    """Keeps the engine's side of streams open until released."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def after(self, messages: list[pb.EngineMessage]) -> Iterator[pb.EngineMessage]:
        yield from messages
        os.read(self._read, 1)

    def release(self) -> None:
        os.close(self._write)


def test_serve_says_what_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "specgov.controller.cli.main", "serve"]
    (tmp_path / "specgov.toml").write_text("polcy = 'static'\n")
    wrong_file = [*command, "--config", str(tmp_path / "specgov.toml")]
    assert subprocess.run(wrong_file, check=False, timeout=60).returncode == 2
    assert "specgov.toml, line 1: polcy: unknown key" in capfd.readouterr().err
    no_folder = [*command, "--listen", f"unix://{tmp_path}/none/s.sock"]
    assert subprocess.run(no_folder, check=False, timeout=60).returncode == 1
    assert f"there is no folder {tmp_path}/none; make it first" in capfd.readouterr().err
