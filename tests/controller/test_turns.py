"""The order of the streams: one at a time, and nobody waits for one that is stuck or slow."""

from __future__ import annotations

import threading

import pytest

from specgov.controller.turns import LONG_S, TURNS_ASIDE, Pace, Turns


def test_turns_are_one_at_a_time() -> None:
    turns = Turns(patience_s=60.0)
    inside: list[int] = []
    most: list[int] = []

    def take(number: int) -> None:
        for _ in range(50):
            turn = turns.begin()
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)
            turn.release()

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(most), max(most)) == (400, 1)


def test_a_turn_that_is_stuck_is_not_waited_for_again() -> None:
    turns = Turns(patience_s=0.01)
    stuck = turns.begin()
    second = turns.begin()
    assert second is not stuck
    stuck.release()  # it went on after all: that ends nobody else's turn
    assert second.locked()
    second.release()
    assert turns.begin() is second


def test_turns_are_long_against_the_usual_one() -> None:
    turns, pace = Turns(), Pace()
    turns.took(pace, LONG_S)
    assert pace.aside == 0
    turns.took(pace, 1.1 * LONG_S)  # the usual one is assumed to take a millisecond
    assert pace.aside == TURNS_ASIDE
    for _ in range(TURNS_ASIDE):
        turns.took(pace, 0.0)
    assert pace.aside == 0
    for _ in range(300):  # load makes all turns long: the usual one becomes so
        turns.took(pace, 0.05)
    assert turns.usual_s == pytest.approx(0.05, rel=0.05)
    for _ in range(TURNS_ASIDE):
        turns.took(pace, 0.05)
    assert pace.aside == 0


def test_a_slow_stream_among_quick_ones_does_not_make_long_turns_usual() -> None:
    turns, slow, quick = Turns(), Pace(), Pace()
    for _ in range(500):
        turns.took(slow, 0.08)
        turns.took(quick, 0.001)
        turns.took(quick, 0.001)
    assert slow.aside == TURNS_ASIDE
    assert quick.aside == 0
    assert turns.usual_s < 0.0015
