"""A sidecar in this process on a socket of the test's own, and an engine's end of a stream."""

from __future__ import annotations

import queue
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from specgov.controller.config import ServeConfig
from specgov.controller.server import Sidecar
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

sys.path.insert(0, str(Path(__file__).parent))  # for the modules of these tests

WAIT_S = 60.0
"""For what must happen: so long that only a fault, not a slow machine, reaches it."""

TIERS = (0, 1, 3, 5)


def make_info(**changes: Any) -> pb.EngineInfo:
    """An engine with tiers 0, 1, 3, 5 and at most 64 requests."""
    fields: dict[str, Any] = {
        "engine_id": "engine-1",
        "boot_id": "boot-1",
        "tiers": TIERS,
        "max_running_requests": 64,
        "decision_lag_steps": 2,
    }
    return pb.EngineInfo(**{**fields, **changes})


def make_report(step_id: int = 1, **changes: Any) -> pb.StepReport:
    """A step of 4 requests at num_steps 3 that accepted 0, 1, 2 and 3 drafts."""
    fields: dict[str, Any] = {
        "step_id": step_id,
        "batch_size": 4,
        "num_steps": 3,
        "accepted_drafts": bytes([0, 1, 2, 3]),
        "slots_u16le": bytes([7, 0, 8, 0, 9, 0, 0, 1]),  # 7, 8, 9, 256
        "slot_generations_u8": bytes([1, 1, 2, 1]),
        "sum_seq_len_tokens": 1000,
        "max_seq_len_tokens": 400,
        "step_time_us": 6500,
        "step_time_valid": True,
    }
    return pb.StepReport(**{**fields, **changes})


def message(of: pb.EngineInfo | pb.StepReport | pb.EngineEvent) -> pb.EngineMessage:
    """The message that carries it."""
    if isinstance(of, pb.EngineInfo):
        return pb.EngineMessage(info=of)
    if isinstance(of, pb.StepReport):
        return pb.EngineMessage(report=of)
    return pb.EngineMessage(event=of)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition()`` holds; what happens on another thread has no other sign."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {WAIT_S:g} s"
        time.sleep(0.005)


class DocumentedMetric(NamedTuple):
    """A row of the table in docs/metrics.md."""

    kind: str
    labels: frozenset[str]
    unit: str
    meaning: str


def read_documented_metrics() -> dict[str, DocumentedMetric]:
    """The table by name."""
    rows: dict[str, DocumentedMetric] = {}
    page = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (name := re.fullmatch(r"`(specgov_\w+)`", cells[0])):
            assert name[1] not in rows, f"{name[1]} stands in the table twice"
            labels = frozenset(re.findall(r"`(\w+)`", cells[2]))
            rows[name[1]] = DocumentedMetric(cells[1], labels, cells[3], cells[4])
    return rows


class EngineStream:
    """The engine's end of a ``Control`` stream."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: queue.SimpleQueue[pb.EngineMessage | None] = queue.SimpleQueue()
        stub = pb_grpc.SpeculationControllerStub(channel)
        self.call = stub.Control(iter(self._outbox.get, None), timeout=WAIT_S)

    def send(self, *parts: pb.EngineInfo | pb.StepReport | pb.EngineEvent) -> None:
        for part in parts:
            self._outbox.put(message(part))

    def send_raw(self, raw: pb.EngineMessage) -> None:
        self._outbox.put(raw)

    def decision(self) -> pb.Decision:
        """The next decision."""
        return next(self.call)

    def decision_that_knows(self, step_id: int) -> pb.Decision:
        """The first decision that knows the step."""
        while (decision := self.decision()).known_step_id < step_id:
            pass
        return decision

    def close(self) -> None:
        """End the engine's side; the stream ends without an error."""
        self._outbox.put(None)

    def end(self) -> tuple[grpc.StatusCode, str]:
        """The stream's status, after whatever decisions were still under way."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        return self.call.code(), self.call.details()


class Running:
    """A sidecar that serves, with channels to it."""

    def __init__(self, sidecar: Sidecar, stack: ExitStack) -> None:
        self.sidecar = sidecar
        self._stack = stack
        self.channel = self.new_channel()
        self.controller = pb_grpc.SpeculationControllerStub(self.channel)
        self.admin = pb_grpc.ControllerAdminStub(self.channel)

    def new_channel(self) -> grpc.Channel:
        return self._stack.enter_context(grpc.insecure_channel(self.sidecar.target))

    def stream(self, **changes: Any) -> EngineStream:
        """A stream that has sent its ``EngineInfo`` and received the first decision."""
        stream = self.silent_stream()
        stream.send(make_info(**changes))
        stream.decision()
        return stream

    def silent_stream(self) -> EngineStream:
        """A stream that has said nothing yet."""
        stream = EngineStream(self.channel)
        self._stack.callback(stream.call.cancel)
        self._stack.callback(stream.close)
        return stream

    def state(self, engine_id: str = "engine-1") -> pb.EngineState:
        return self.admin.GetEngine(pb.GetEngineRequest(engine_id=engine_id), timeout=WAIT_S).engine

    def metric(self, name: str, **labels: str) -> float:
        value = self.sidecar.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value


StartSidecar = Callable[..., Running]


@pytest.fixture(scope="session", name="make_info")
def _make_info() -> Callable[..., pb.EngineInfo]:
    return make_info


@pytest.fixture(scope="session", name="make_report")
def _make_report() -> Callable[..., pb.StepReport]:
    return make_report


@pytest.fixture(scope="session", name="eventually")
def _eventually() -> Callable[[Callable[[], bool], str], None]:
    return eventually


@pytest.fixture(scope="session")
def documented_metrics() -> dict[str, DocumentedMetric]:
    """The table in docs/metrics.md: type, labels, unit and meaning by name."""
    return read_documented_metrics()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartSidecar]:
    """Start a sidecar; arguments are those of ``ServeConfig``. All are stopped after the test."""
    with ExitStack() as stack:

        def start_one(**changes: Any) -> Running:
            fields: dict[str, Any] = {
                "listen": f"unix://{tmp_path}/specgov.sock",
                "policy": "threshold:3:5",  # tier 5 below batch size 3, tier 0 at and above it
            }
            sidecar = Sidecar(ServeConfig(**{**fields, **changes}))
            stack.callback(sidecar.stop)
            sidecar.start()
            return Running(sidecar, stack)

        yield start_one


@pytest.fixture
def sidecar(tmp_path: Path, make_info: Callable[..., pb.EngineInfo]) -> Iterator[Callable[..., Any]]:
    """Start engines whose states are kept, as in ``state_bench``, one after the other in the same folder."""
    from state_bench import Sidecar as KeptSidecar

    made: list[KeptSidecar] = []

    def start(**config: Any) -> KeptSidecar:
        made.append(KeptSidecar(tmp_path / "states", make_info, **config))
        return made[-1]

    yield start
    for one in made:
        one.stop()
