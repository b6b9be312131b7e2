"""Buckets of messages and log lines, in time that the test makes pass."""

from __future__ import annotations

import pytest

from specgov.controller.limits import LinePace, MessagePace, Refusals


def test_a_stream_may_send_its_rate_and_two_seconds_of_it_at_once() -> None:
    pace = MessagePace(10, now_s=0.0)
    assert pace.surplus(20, 0.0) == 0  # two seconds' worth
    assert pace.surplus(3, 0.0) == 3
    assert pace.surplus(5, 0.5) == 0  # half a second has brought five
    assert pace.surplus(1, 0.5) == 1
    assert pace.surplus(25, 100.0) == 5  # and a long pause no more than two seconds' worth


def test_an_engine_at_its_limit_is_never_hopeless() -> None:
    pace = MessagePace(10, now_s=0.0)
    assert [pace.surplus(1, step / 10) for step in range(10_000)] == [0] * 10_000
    assert not pace.is_hopeless


def test_twice_the_limit_is_shed_by_half_and_endured() -> None:
    """Each second 20 come, 10 are shed, and 10 are forgiven: the count of what is shed stays at 10."""
    pace = MessagePace(10, now_s=0.0)
    pace.surplus(20, 0.0)
    assert [pace.surplus(20, float(second)) for second in range(1, 100)] == [10] * 99
    assert not pace.is_hopeless


def test_far_beyond_the_limit_for_long_is_hopeless() -> None:
    """Each second 40 come: 30 are shed and 10 forgiven. What is shed is 30 after the first, grows by 20 a
    second, and is above 100, ten seconds' worth, in the fifth.
    """
    pace = MessagePace(10, now_s=0.0)
    pace.surplus(20, 0.0)
    hopeless = []
    for second in range(1, 6):
        assert pace.surplus(40, float(second)) == 30
        hopeless.append(pace.is_hopeless)
    assert hopeless == [False, False, False, False, True]


def test_a_clock_that_goes_back_earns_nothing_and_costs_nothing() -> None:
    pace = MessagePace(10, now_s=1000.0)
    assert pace.surplus(20, 0.0) == 0
    assert pace.surplus(1, 0.0) == 1
    assert pace.surplus(10, 1.0) == 0


def test_lines_that_were_left_out_are_told_of() -> None:
    pace = LinePace(burst=2, per_s=0.5, now_s=0.0)
    assert [pace.take(0.0) for _ in range(5)] == [0, 0, None, None, None]
    assert pace.take(1.9) is None
    assert pace.take(2.0) == 4
    assert pace.take(2.0) is None
    assert [pace.take(100.0) for _ in range(3)] == [1, 0, None]


@pytest.mark.parametrize("per_s", [1, 1_000_000])
def test_limits_at_their_bounds(per_s: int) -> None:
    pace = MessagePace(per_s, now_s=0.0)
    assert pace.surplus(3 * per_s, 0.0) == per_s


def test_refusals_are_counted_by_engine_and_cause_and_only_so_many_are_kept() -> None:
    refusals = Refusals(most=2)
    assert [refusals.count("a", "bad_tiers") for _ in range(3)] == [1, 2, 3]
    assert refusals.count("a", "policy") == 1
    assert refusals.count("b", "policy") == 1  # and the first makes room
    assert refusals.count("a", "policy") == 2
    assert refusals.count("a", "bad_tiers") == 1
