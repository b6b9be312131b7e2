"""The watchdog alone: what is stuck, and what is not; rounds are the test's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from specgov.controller.liveness import STUCK_ROUNDS, UNREAD_ROUNDS, Waits, Watchdog


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
