"""When a relay looks for packets: worked out by hand, in powers of two of a second, which are exact."""

from __future__ import annotations

import pytest

from specgov.client.pace import LONGEST_PAUSE_S, LOOKS_FOR_S, SHORTEST_PAUSE_S, Pace

MS = 2.0**-10


def looks(pace: Pace, from_s: float, until_s: float) -> list[float]:
    """The times of the looks after ``from_s``, up to the first at ``until_s`` or later."""
    times = [from_s]
    while times[-1] < until_s:
        times.append(times[-1] + pace.pause_s(times[-1]))
    return times[1:]


@pytest.mark.parametrize("step_ms", [4, 8, 16])
def test_five_looks_a_step(step_ms: int) -> None:
    pace = Pace()
    for number in range(3):
        pace.came(number * step_ms * MS)
    now_s = 2 * step_ms * MS
    pause_s = step_ms / 16 * MS
    assert pause_s <= LONGEST_PAUSE_S
    first_s = now_s + 12 * pause_s
    assert looks(pace, now_s, 3 * step_ms * MS) == [first_s + n * pause_s for n in range(5)]


def test_pauses_have_bounds() -> None:
    pace = Pace()
    for number in range(3):
        pace.came(number * MS)
    assert looks(pace, 2 * MS, 2.8 * MS) == [2.75 * MS, 2.75 * MS + SHORTEST_PAUSE_S]
    for number in range(1, 4):
        pace.came(number * 32 * MS)
    assert looks(pace, 96 * MS, 120.5 * MS) == [120 * MS, 120 * MS + LONGEST_PAUSE_S]


def test_one_long_step_delays_nothing() -> None:
    pace = Pace()
    for came_ms in (0, 4, 8, 40):
        pace.came(came_ms * MS)
    assert pace.pause_s(40 * MS) == 3 * MS
    pace.came(72 * MS)  # it was no exception
    assert pace.pause_s(72 * MS) == 24 * MS


def test_the_first_packets_are_looked_for_at_short_intervals_and_then_slowly() -> None:
    pace = Pace()
    assert not pace.looks(0.0)
    pace.came(1.0)
    assert pace.looks(1.0)
    assert pace.pause_s(1.0) <= LOOKS_FOR_S
    pace.came(1.0 + 4 * MS)
    assert pace.pause_s(1.0 + 4 * MS) == 3 * MS


def test_it_looks_a_little_longer_than_it_says() -> None:
    pace = Pace()
    pace.came(1.0)
    assert pace.looks(1.0 + LOOKS_FOR_S)
    assert pace.looks(1.0 + LOOKS_FOR_S + 1.5 * LONGEST_PAUSE_S)
    assert not pace.looks(1.0 + LOOKS_FOR_S + 2.5 * LONGEST_PAUSE_S)
