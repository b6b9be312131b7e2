"""What a relay shows its engine: the newest packet only, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.client.board import PLACE_BYTES, Board, new_board_file


@pytest.fixture
def boards() -> Iterator[tuple[Board, Board]]:
    """The writer's view of a board and the reader's."""
    file = new_board_file()
    both = Board(file), Board(file)
    os.close(file)
    yield both
    for board in both:
        board.close()


def test_the_newest_is_read_once(boards: tuple[Board, Board]) -> None:
    relay, engine = boards
    assert engine.decisions.news() is None
    relay.decisions.write(b"one")
    relay.decisions.write(b"two")
    assert engine.decisions.news() == b"two"
    assert engine.decisions.news() is None
    relay.decisions.write(b"")
    assert engine.decisions.news() == b""


def test_areas_are_apart(boards: tuple[Board, Board]) -> None:
    relay, engine = boards
    longest = bytes(range(256)) * (PLACE_BYTES // 256)
    longest = longest[: PLACE_BYTES - 16]  # less a place's head of 16 bytes
    for number in range(4):
        relay.decisions.write(longest[number:])
        relay.stats.write(longest[2 * number :])
        assert engine.decisions.news() == longest[number:]
        assert engine.stats.news() == longest[2 * number :]
    with pytest.raises(ValueError, match="too long"):
        relay.decisions.write(longest + b"x")
    assert engine.decisions.news() is None


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_packet_that_is_not_whole_is_not_read_until_it_is(at: int, value: int) -> None:
    """Any byte of number, place or packet that another write has not brought over yet, or already."""
    file = new_board_file()
    relay, engine = Board(file), Board(file)
    os.close(file)
    relay.decisions.write(b"a" * 100)
    assert engine.decisions.news() == b"a" * 100
    relay.decisions.write(b"b" * 100)
    place = relay.decisions._places[0]
    spot = at if at < 8 else place + at - 8  # the area's number, then the place of the second packet
    before = relay._memory[spot]
    relay._memory[spot] = value
    seen = engine.decisions.news()
    assert seen in (None, b"b" * 100)
    if at >= 8 and at < 8 + 16 + 100 and value != before:
        assert seen is None
    relay._memory[spot] = before
    assert (seen or engine.decisions.news()) == b"b" * 100
    relay.close()
    engine.close()
