"""What an engine writes for its relay: every packet once, in order and whole, or not at all."""

from __future__ import annotations

import mmap
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.client.ring import RING_BYTES, ROOM_BYTES, Ring

HEAD_BYTES = 8  # before each packet: its length and its check sum, of four bytes each


def ends() -> tuple[Ring, Ring, mmap.mmap]:
    """The engine's end of a ring, the relay's, and the memory."""
    memory = mmap.mmap(-1, RING_BYTES)
    return Ring(memory, 0), Ring(memory, 0), memory


@given(st.lists(st.integers(0, ROOM_BYTES // 3), min_size=1, max_size=30), st.integers(0, 4))
def test_packets_come_in_order_and_whole_however_the_room_is_divided(sizes: list[int], behind: int) -> None:
    """The relay takes with a delay of up to four packets; one that finds no room is not written at all."""
    engine, relay, _ = ends()
    waiting: deque[bytes] = deque()
    for number, size in enumerate(sizes):
        packet = bytes([number % 256]) * size
        fits = sum(len(other) + HEAD_BYTES for other in waiting) + size + HEAD_BYTES <= ROOM_BYTES
        assert engine.write(packet) == fits
        if fits:
            waiting.append(packet)
        while len(waiting) > behind:
            assert relay.take() == waiting.popleft()
    while waiting:
        assert relay.take() == waiting.popleft()
    assert relay.take() is None


def test_a_packet_longer_than_the_room_finds_none() -> None:
    engine, relay, _ = ends()
    assert not engine.write(bytes(ROOM_BYTES - HEAD_BYTES + 1))
    assert engine.write(bytes(ROOM_BYTES - HEAD_BYTES))
    assert relay.take() == bytes(ROOM_BYTES - HEAD_BYTES)


@pytest.mark.parametrize("rounds", [0, 1], ids=["new memory", "the same packets a round before"])
@given(at=st.integers(0, HEAD_BYTES + 99), value=st.integers(0, 255))
def test_a_packet_that_is_not_whole_is_not_taken_until_it_is(rounds: int, at: int, value: int) -> None:
    """Any byte of it that the memory does not show yet."""
    engine, relay, memory = ends()
    size = HEAD_BYTES + 100
    if rounds:
        for _ in range(ROOM_BYTES // size):
            assert engine.write(b"a" * 100)
            relay.take()
        rest = ROOM_BYTES % size
        assert engine.write(bytes(rest + size - HEAD_BYTES))
        relay.take()
    place = RING_BYTES - ROOM_BYTES + engine._written % ROOM_BYTES
    stale = memory[place + at]
    assert engine.write(b"a" * 100)
    whole = memory[place + at]
    memory[place + at] = value
    taken = relay.take()
    if value != whole:
        assert taken is None
        memory[place + at] = stale
        assert stale == whole or relay.take() is None
        memory[place + at] = whole
        taken = relay.take()
    assert taken == b"a" * 100


def test_a_reader_is_woken_where_it_does_not_look_or_does_not_take() -> None:
    engine, relay, _ = ends()
    engine.write(b"one")
    assert engine.must_be_woken(10.0)  # it has never said that it looks
    assert relay.take() == b"one"
    relay.promise(11.0)
    engine.write(b"two")
    assert not engine.must_be_woken(10.9)
    assert engine.must_be_woken(11.0)
    engine.write(b"three")  # and "two" still lies there: it hangs, or is gone
    assert engine.must_be_woken(10.9)
    assert relay.take() == b"two"
    assert not engine.must_be_woken(10.9)


def test_what_a_reader_did_not_take_can_be_had_back() -> None:
    engine, relay, _ = ends()
    for packet in (b"one", b"two", b"three"):
        engine.write(packet)
    relay.take()
    assert engine.left() == [b"two", b"three"]
