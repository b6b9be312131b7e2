"""The watchdog: what is stuck, what is not, and what health says; rounds are the test's own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specgov.controller import doors
from specgov.controller.liveness import STUCK_ROUNDS, UNREAD_ROUNDS, Waits, Watchdog
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


@dataclass
class Stream:
    """A stream that waits for what the test says."""

    waits_for: Waits = Waits.NOTHING
    moves: int = 0
    name: str = "engine-1"
    cuts: int = 0

    def cut_off(self) -> None:
        self.cuts += 1


class Bench:
    """A watchdog over streams that a test changes, and what it said."""

    def __init__(self, *streams: Stream) -> None:
        self.streams = list(streams)
        self.said: list[bool] = []
        self.cuts = 0
        self.lost: list[str] = []
        self.watchdog = Watchdog(
            lambda: self.streams, [], self.said.append, self._cut, lambda: list(self.lost)
        )

    def _cut(self) -> None:
        self.cuts += 1

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.watchdog.check()


def test_an_idle_sidecar_is_alive_for_ever() -> None:
    bench = Bench(Stream(), Stream())
    bench.rounds(100_000)
    assert (bench.said, bench.cuts) == ([], 0)


def test_without_streams_too() -> None:
    bench = Bench()
    bench.rounds(1000)
    assert bench.said == []


def test_a_stream_with_work_and_no_move_is_stuck_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(Waits.SIDECAR)
    bench = Bench(Stream(name="other"), stream)
    bench.rounds(STUCK_ROUNDS)
    assert bench.said == []  # the first round sees it, and so many later it has not moved
    bench.rounds(1)
    assert (bench.said, bench.watchdog.stuck) == ([False], 1)
    bench.rounds(50)
    assert bench.said == [False]  # said once
    stream.moves += 1
    bench.rounds(1)
    assert (bench.said, bench.watchdog.stuck) == ([False, True], 0)
    assert "engine-1" in caplog.text


def test_a_busy_stream_that_moves_is_not_stuck() -> None:
    """Whenever the watchdog looks there is work, as at full load; but each time it is other work."""
    stream = Stream(Waits.SIDECAR)
    bench = Bench(stream)
    for _ in range(1000):
        stream.moves += 1
        bench.rounds(1)
    assert bench.said == []


def test_one_move_in_ten_rounds_is_enough() -> None:
    stream = Stream(Waits.SIDECAR)
    bench = Bench(stream)
    for _ in range(100):
        bench.rounds(STUCK_ROUNDS)
        stream.moves += 1
    assert bench.said == []


def test_a_stuck_stream_that_ends_is_no_alarm_any_more() -> None:
    bench = Bench(Stream(Waits.SIDECAR))
    bench.rounds(STUCK_ROUNDS + 1)
    bench.streams.clear()
    bench.rounds(1)
    assert bench.said == [False, True]


def test_another_stream_in_the_place_of_an_old_one_starts_anew() -> None:
    bench = Bench(Stream(Waits.SIDECAR))
    for _ in range(10):
        bench.rounds(STUCK_ROUNDS - 1)
        bench.streams[0] = Stream(Waits.SIDECAR)
    assert bench.said == []


def test_a_peer_that_does_not_read_is_cut_and_no_alarm() -> None:
    stream = Stream(Waits.PEER)
    bench = Bench(stream)
    bench.rounds(UNREAD_ROUNDS)
    assert stream.cuts == 0
    bench.rounds(1)
    assert (stream.cuts, bench.cuts, bench.said) == (1, 1, [])


def test_a_peer_that_reads_slowly_is_not_cut() -> None:
    stream = Stream(Waits.PEER)
    bench = Bench(stream)
    for _ in range(20):
        bench.rounds(UNREAD_ROUNDS)
        stream.moves += 1
    assert stream.cuts == 0


def test_a_lost_socket_is_told_once_beside_what_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Stream(Waits.SIDECAR))
    bench.lost.append("/run/s.sock")
    bench.rounds(STUCK_ROUNDS)
    assert (bench.said, bench.watchdog.stuck) == ([False], 1)
    bench.rounds(1)
    assert (bench.said, bench.watchdog.stuck) == ([False], 2)
    bench.rounds(50)
    assert caplog.text.count("/run/s.sock") == caplog.text.count("decisions are stuck") == 1
    bench.streams.clear()
    bench.rounds(1)
    assert (bench.said, bench.watchdog.stuck) == ([False], 1)
    bench.lost.clear()
    bench.rounds(1)
    assert (bench.said, bench.watchdog.stuck) == ([False, True], 0)


def _remove(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))  # while it is there the new file cannot have its inode
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))


def _remove_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


@pytest.mark.parametrize("lose", [_remove, _replace, _remove_folder])
@pytest.mark.parametrize("door", ["listen", "admin_listen"])
def test_a_sidecar_whose_socket_is_lost_says_what_to_do(
    start: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lose: Callable[[Path], None],
    door: str,
) -> None:
    """Whoever is connected is served on, and asks in vain for nothing: health and metric say it."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "s.sock"
    doors_of = {"listen": f"unix://{tmp_path}/engines.sock", "admin_listen": f"unix://{tmp_path}/admin.sock"}
    sidecar = start(**{**doors_of, door: f"unix://{path}"})
    sidecar.sidecar._ticker.stop()
    stream = sidecar.stream()
    sidecar.sidecar.watchdog.check()
    assert (health(sidecar), sidecar.metric("specgov_stuck")) == ("SERVING", 0)
    lose(path)
    for _ in range(3):
        sidecar.sidecar.watchdog.check()
    assert (health(sidecar), sidecar.metric("specgov_stuck")) == ("NOT_SERVING", 1)
    told = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert [("restart the sidecar" in text, "serving" in text) for text in told][-1:] == [(True, False)]
    assert sum("restart the sidecar" in text for text in told) == 1
    stream.close()


def test_a_socket_that_cannot_be_looked_at_or_comes_back_is_not_lost(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = start()
    path = sidecar.sidecar.address.path
    moved = path.rename(path.with_suffix(".moved"))
    assert sidecar.sidecar._doors.lost_sockets() == [str(path)]
    moved.rename(path)
    assert sidecar.sidecar._doors.lost_sockets() == []

    def refuse(path: Path) -> None:
        raise PermissionError(str(path))

    monkeypatch.setattr(Path, "lstat", refuse)
    assert sidecar.sidecar._doors.lost_sockets() == []


def test_a_pool_without_a_free_thread_is_stuck() -> None:
    said: list[bool] = []
    hold = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        watchdog = Watchdog(list, [pool], said.append, lambda: None)
        try:
            occupied = pool.submit(hold.wait)
            for _ in range(STUCK_ROUNDS):
                watchdog.check()
            assert said == []
            watchdog.check()
            assert said == [False]
        finally:
            hold.set()
        occupied.result(60)
        pool.submit(int).result(60)  # behind the watchdog's own task, which is done by then
        watchdog.check()
        assert said == [False, True]
    watchdog.check()  # of a pool that was shut down: no alarm, no error
    assert said == [False, True]


def test_health_follows_the_decision_path(
    start: Make, make_report: Make, eventually: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that hangs while its engine's lock is held, in a real sidecar whose rounds the test makes."""
    sidecar = start()
    sidecar.sidecar._ticker.stop()
    other = sidecar.stream(engine_id="other")
    stream = sidecar.stream()
    rule, go_on = sidecar.sidecar.engines.get("engine-1").policy, threading.Event()

    def observe(self: Any, step: Any) -> None:
        if self is rule:
            go_on.wait()

    monkeypatch.setattr(type(rule), "observe", observe)
    stream.send(make_report(1))
    try:
        eventually(
            lambda: any(s.waits_for is Waits.SIDECAR for s in sidecar.sidecar._controller.sessions),
            "the report's arrival",
        )
        assert health(sidecar) == "SERVING"
        rounds(sidecar, STUCK_ROUNDS + 1)
        assert health(sidecar) == health(sidecar, "specgov.v1.SpeculationController") == "NOT_SERVING"
        assert sidecar.metric("specgov_stuck") == 1
        other.send(make_report(1))  # the others are served meanwhile
        assert other.decision().known_step_id == 1
    finally:
        go_on.set()
    stream.decision_that_knows(1)
    rounds(sidecar, 1)
    assert health(sidecar) == "SERVING"


def rounds(sidecar: Any, count: int) -> None:
    """Rounds of the watchdog in each of which the threads of the pool had their turn."""
    for _ in range(count):
        sidecar.sidecar.watchdog.check()
        for pool in sidecar.sidecar.watchdog._pools:
            pool._probe.result(60)


def health(sidecar: Any, service: str = "") -> str:
    stub = health_pb2_grpc.HealthStub(sidecar.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK, END_HEADERS = 1, 4


class HandMadePeer:
    """An engine of HTTP/2 frames (RFC 9113) that grants no window beyond the one that all begin with.

    ``reads``: it reads and answers pings and settings; else it never reads a byte.
    """

    def __init__(self, path: Path, *, reads: bool = True) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._reader = threading.Thread(target=self._read, daemon=True) if reads else None
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/specgov.v1.SpeculationController/Control",
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        # Each a literal field without indexing and with a new name (RFC 7541, 6.2.2), no Huffman code.
        block = b"".join(
            bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()
            for name, value in fields.items()
        )
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send_frame(SETTINGS, 0, 0, b"")
        self._send_frame(HEADERS, END_HEADERS, 1, block)

    def __enter__(self) -> HandMadePeer:
        if self._reader is not None:
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join()
        self._socket.close()

    def send(self, message: pb.EngineMessage) -> None:
        data = message.SerializeToString()
        self._send_frame(DATA, 0, 1, b"\0" + len(data).to_bytes(4, "big") + data)

    def _send_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._socket.sendall(head + payload)

    def _read(self) -> None:
        with self._socket.makefile("rb") as file, contextlib.suppress(OSError):
            while len(head := file.read(9)) == 9:
                payload = file.read(int.from_bytes(head[:3], "big"))
                if head[3] in (SETTINGS, PING) and not head[4] & ACK:
                    self._send_frame(head[3], ACK, 0, payload if head[3] == PING else b"")


@pytest.fixture
def many_ranges() -> str:
    """Another tier for each batch size: decisions of a quarter of a kilobyte."""
    return "schedule:" + ":".join(f"{size}={(0, 3)[size % 2]}" for size in range(1, 61))


@contextlib.contextmanager
def blocked(sidecar: Any, peer: HandMadePeer, make_info: Make, eventually: Make) -> Iterator[Any]:
    """An engine over ``peer`` whose session sends decisions until none goes out any more."""
    with peer:
        peer.send(pb.EngineMessage(info=make_info()))
        eventually(lambda: sidecar.metric("specgov_connected_engines") == 1, "the stream's beginning")
        (session,) = sidecar.sidecar._controller.sessions
        engine = sidecar.sidecar.engines.get("engine-1")

        def stands_still() -> bool:
            decisions = engine.decisions
            session.refresh()
            return session._mailbox.qsize() > 100 and engine.decisions == decisions

        eventually(stands_still, "the end of what the connection takes")
        assert session.waits_for is Waits.PEER
        assert engine.decisions < 1000
        yield session


def test_a_peer_that_takes_no_decision_is_cut_and_holds_no_memory(
    start: Make, make_info: Make, eventually: Make, many_ranges: str
) -> None:
    """It answers pings, and lets no more through than the 65,535 bytes that HTTP/2 begins with. The stream's
    thread stands still, nothing grows, and after half a minute of rounds the engine's place is free.
    """
    sidecar = start(policy=many_ranges)
    sidecar.sidecar._ticker.stop()
    with blocked(sidecar, HandMadePeer(sidecar.sidecar.address.path), make_info, eventually):
        rounds(sidecar, UNREAD_ROUNDS + 1)
        eventually(lambda: sidecar.metric("specgov_connected_engines") == 0, "the end of the stream")
        assert sidecar.metric("specgov_streams_cut_total") == 1
        assert health(sidecar) == "SERVING"
        sidecar.stream()


def test_a_peer_that_reads_no_byte_holds_its_place_no_longer(
    start: Make, make_info: Make, eventually: Make, many_ranges: str
) -> None:
    """The socket's buffer is full: no ping and not even the stream's end can be written, and gRPC keeps the
    call. The engine's place is free all the same.
    """
    sidecar = start(policy=many_ranges)
    sidecar.sidecar._ticker.stop()
    peer = HandMadePeer(sidecar.sidecar.address.path, reads=False)
    with blocked(sidecar, peer, make_info, eventually):
        rounds(sidecar, UNREAD_ROUNDS + 1)
        eventually(lambda: sidecar.metric("specgov_connected_engines") == 0, "the end of the stream")
        assert sidecar.metric("specgov_streams_cut_total") == 1
        assert health(sidecar) == "SERVING"
        sidecar.stream()


def test_a_peer_that_answers_no_ping_is_gone(
    start: Make, make_info: Make, eventually: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is silent, so that pings can be written."""
    monkeypatch.setattr(doors, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(doors, "PING_TIMEOUT_MS", 1000)
    sidecar = start()
    with HandMadePeer(sidecar.sidecar.address.path, reads=False) as peer:
        peer.send(pb.EngineMessage(info=make_info()))
        eventually(lambda: sidecar.metric("specgov_streams_total") == 1, "the stream's beginning")
        eventually(lambda: sidecar.metric("specgov_connected_engines") == 0, "the end of the stream")


def test_a_silent_engine_is_not_cut(start: Make, make_report: Make, eventually: Make) -> None:
    """One that has nothing to do for hours: no rounds of the watchdog end its stream."""
    sidecar = start()
    sidecar.sidecar._ticker.stop()
    stream = sidecar.stream()
    (session,) = sidecar.sidecar._controller.sessions
    eventually(lambda: session.waits_for is Waits.NOTHING, "the end of sending the first decision")
    rounds(sidecar, 1000)
    stream.send(make_report(1))
    assert stream.decision().known_step_id == 1
