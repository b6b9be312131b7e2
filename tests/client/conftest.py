"""A clock that stands still, a sidecar whose behaviour a test writes down, and waiting with a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from specgov.client import StreamClient
from specgov.proto.v1 import specgov_pb2 as pb

WAIT_S = 60.0
"""For what must happen: so long that only a fault, not a slow machine, reaches it."""

Behaviour = Callable[[Iterator[pb.EngineMessage], grpc.ServicerContext], Iterator[Any]]


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def answer(report: pb.StepReport, **changes: Any) -> pb.Decision:
    """A plain decision on ``report``: num_steps 3 for every batch size, 8 steps and 500 ms to live."""
    fields: dict[str, Any] = {
        "decision_id": report.step_id,
        "known_step_id": report.step_id,
        "num_steps": 3,
        "batch_size_min": 1,
        "batch_size_max": 256,
        "ttl_steps": 8,
        "ttl_ms": 500,
        "reason": pb.REASON_POLICY,
    }
    return pb.Decision(**(fields | changes))


def answer_all(messages: Iterator[pb.EngineMessage], context: grpc.ServicerContext) -> Iterator[pb.Decision]:
    """The behaviour of a healthy sidecar."""
    for message in messages:
        if message.HasField("report"):
            yield answer(message.report)


class FakeSidecar:
    """A gRPC server in this process; ``behaviour`` may be changed between streams.

    ``received`` has every message of every stream in order of arrival, ``streams`` counts streams.
    """

    def __init__(self, path: Path) -> None:
        self.target = f"unix://{path}"
        self.behaviour: Behaviour = answer_all
        self.received: queue.Queue[pb.EngineMessage] = queue.Queue()
        self.streams = 0
        self._server: grpc.Server | None = None

    def start(self) -> None:
        server = grpc.server(futures.ThreadPoolExecutor(16))
        # Bytes out, so that a test can send what is no Decision at all.
        method = grpc.stream_stream_rpc_method_handler(
            self._control,
            request_deserializer=pb.EngineMessage.FromString,
            response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        )
        service = pb.DESCRIPTOR.services_by_name["SpeculationController"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Control": method}),))
        server.add_insecure_port(self.target)
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(WAIT_S)
            self._server = None

    def next_message(self) -> pb.EngineMessage:
        return self.received.get(timeout=WAIT_S)

    def next_report(self) -> pb.StepReport:
        message = self.next_message()
        assert message.HasField("report"), message
        return message.report

    def next_report_of_any(self) -> pb.StepReport:
        """The next report of any stream."""
        while not (message := self.next_message()).HasField("report"):
            pass
        return message.report

    def _control(
        self, messages: Iterator[pb.EngineMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.Decision | bytes]:
        self.streams += 1
        return self.behaviour(self._recorded(messages), context)

    def _recorded(self, messages: Iterator[pb.EngineMessage]) -> Iterator[pb.EngineMessage]:
        for message in messages:
            self.received.put(message)
            yield message


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def info() -> pb.EngineInfo:
    return pb.EngineInfo(engine_id="engine", boot_id="boot", tiers=[0, 1, 3])


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[FakeSidecar]:
    fake = FakeSidecar(tmp_path / "s")
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def make_client(sidecar: FakeSidecar, info: pb.EngineInfo) -> Iterator[Callable[..., StreamClient]]:
    """Makes clients of ``sidecar``, started unless ``started=False``, and closes them at the end."""
    clients: list[StreamClient] = []

    def make(*, started: bool = True, target: str = sidecar.target, **arguments: Any) -> StreamClient:
        client = StreamClient(target, info, **arguments)
        clients.append(client)
        if started:
            client.start()
        return client

    yield make
    for client in clients:
        client.close(timeout_s=0.0)


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], None]:
    """Waits until a condition holds; fails after ``WAIT_S``."""
    tick = threading.Event()

    def wait(condition: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "the condition did not come to hold"
            tick.wait(0.005)

    return wait


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """Whether any thread of a process lives, and with it its files; not whether it was waited for."""

    def alive(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        except OSError:
            return False
        return state != "Z" or threads > 1

    return alive
