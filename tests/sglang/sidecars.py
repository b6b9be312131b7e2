"""The real sidecar as a process, and one in this process whose behaviour a test writes down."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from servers import wait_until

from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

Behaviour = Callable[[Iterator[pb.EngineMessage], grpc.ServicerContext], Iterator[Any]]


class SidecarProcess:
    """``specgov serve``; its log is ``log`` and its decision log ``decisions``."""

    def __init__(self, socket: Path, *arguments: str) -> None:
        self.target = f"unix://{socket}"
        self._log = socket.with_suffix(".log")
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "specgov"), "serve", "--listen", self.target, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait_until(lambda: '"serving"' in self.log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def engine(self) -> pb.EngineState | None:
        """The one engine that is known; None before there is one."""
        with grpc.insecure_channel(self.target, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            engines = (
                pb_grpc.ControllerAdminStub(channel).ListEngines(pb.ListEnginesRequest(), timeout=10).engines
            )
        return engines[0] if engines else None

    def set_mode(self, mode: pb.Mode.ValueType) -> None:
        engine = self.engine()
        assert engine is not None
        request = pb.SetModeRequest(engine_id=engine.info.engine_id, mode=mode)
        with grpc.insecure_channel(self.target, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            pb_grpc.ControllerAdminStub(channel).SetMode(request, timeout=10)

    def is_connected(self) -> bool:
        engine = self.engine()
        return engine is not None and engine.connected

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)


@contextlib.contextmanager
def sidecar_process(socket: Path, *arguments: str) -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(socket, *arguments)
    try:
        yield sidecar
    finally:
        sidecar.end()


class Recorder:
    """What engines said, in order of arrival."""

    def __init__(self) -> None:
        self.messages: list[pb.EngineMessage] = []
        self.streams = 0
        self.endings: list[str] = []

    @property
    def infos(self) -> list[pb.EngineInfo]:
        return [m.info for m in self.messages if m.HasField("info")]

    @property
    def reports(self) -> list[pb.StepReport]:
        return [m.report for m in self.messages if m.HasField("report")]

    @property
    def events(self) -> list[int]:
        return [m.event.kind for m in self.messages if m.HasField("event")]


@contextlib.contextmanager
def fake_sidecar(target: str, behaviour: Behaviour) -> Iterator[Recorder]:
    """A gRPC server in this process; ``behaviour`` yields decisions, or bytes that are none."""
    recorder = Recorder()

    def control(messages: Iterator[pb.EngineMessage], context: grpc.ServicerContext) -> Iterator[Any]:
        recorder.streams += 1
        yield from behaviour(_recorded(messages, recorder), context)

    server = grpc.server(futures.ThreadPoolExecutor(8))
    method = grpc.stream_stream_rpc_method_handler(
        control,
        request_deserializer=pb.EngineMessage.FromString,
        response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
    )
    service = pb.DESCRIPTOR.services_by_name["SpeculationController"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Control": method}),))
    server.add_insecure_port(target)
    server.start()
    try:
        yield recorder
    finally:
        server.stop(0).wait(10)
        Path(target.removeprefix("unix://")).unlink(missing_ok=True)


def _recorded(messages: Iterator[pb.EngineMessage], recorder: Recorder) -> Iterator[pb.EngineMessage]:
    try:
        for message in messages:
            recorder.messages.append(message)
            yield message
        recorder.endings.append("closed")
    except grpc.RpcError:
        recorder.endings.append("reset")


def decision(report: pb.StepReport, num_steps: int, **changes: Any) -> pb.Decision:
    """A decision on ``report``, for every batch size, with 50 steps and a second to live."""
    fields: dict[str, Any] = {
        "decision_id": report.step_id,
        "known_step_id": report.step_id,
        "num_steps": num_steps,
        "batch_size_min": 1,
        "batch_size_max": 256,
        "ttl_steps": 50,
        "ttl_ms": 1000,
        "reason": pb.REASON_POLICY,
    }
    return pb.Decision(**(fields | changes))


def reports_of(messages: Iterator[pb.EngineMessage]) -> Iterator[pb.StepReport]:
    return (message.report for message in messages if message.HasField("report"))


def at_tier(num_steps: int) -> Any:
    """A healthy sidecar's behaviour: always the one tier."""

    def behave(messages: Iterator[pb.EngineMessage], context: grpc.ServicerContext) -> Iterator[pb.Decision]:
        for report in reports_of(messages):
            yield decision(report, num_steps)

    return behave
