"""Orders and their journey between ranks, slots, the switch record and its lines, the guard."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.sglang_plugin.guarded import Guard
from specgov.sglang_plugin.orders import ENGINES_RULE, OWN_RULE, Kind, Order, RankShare
from specgov.sglang_plugin.slots import MAX_AWAY, SlotTable
from specgov.sglang_plugin.switch_log import MAX_ENTRIES, SwitchLines, trim

TABLE = Order(Kind.TABLE, ((4, 8, 1), (1, 3, 3)))


# Orders and ranks.


def test_a_table_answers_for_its_ranges_only() -> None:
    assert [TABLE.num_steps_for(b) for b in (1, 3, 4, 8, 9)] == [3, 3, 1, 1, None]
    assert OWN_RULE.num_steps_for(1) is None


def test_an_order_travels_once_and_comes_into_force_on_every_rank_after_the_broadcast() -> None:
    ranks = [RankShare(OWN_RULE) for _ in range(3)]
    sent = ranks[0].attach(["request"], TABLE)
    assert sent == [("specgov.order", 1, ((4, 8, 1), (1, 3, 3))), "request"]
    assert [type(part) for part in sent[0]] == [str, int, tuple]  # nothing that a receiver must import
    assert ranks[0].in_force == OWN_RULE
    assert [rank.detach(list(sent)) for rank in ranks] == [["request"]] * 3
    assert {rank.in_force for rank in ranks} == {TABLE}
    assert ranks[0].attach([], Order(Kind.TABLE, ((4, 8, 1), (1, 3, 3)))) == []  # no news
    assert [rank.detach([]) for rank in ranks] == [[]] * 3
    assert {rank.in_force for rank in ranks} == {TABLE}
    sent = ranks[0].attach([], ENGINES_RULE)
    assert [rank.detach(list(sent)) for rank in ranks] == [[]] * 3
    assert {rank.in_force for rank in ranks} == {ENGINES_RULE}


def test_tuples_that_are_not_ours_are_left_alone() -> None:
    share = RankShare(OWN_RULE)
    assert share.detach([("other", 1)]) == [("other", 1)]
    assert share.in_force == OWN_RULE


# Slots.


def test_slots_are_kept_and_reused_with_the_next_generation() -> None:
    table = SlotTable()
    slots, generations = table.assign(["a", "b"])
    assert slots.dtype == np.uint16
    assert generations.dtype == np.uint8
    assert (slots.tolist(), generations.tolist()) == ([0, 1], [1, 1])
    assert table.assign(["a", "b"])[0] is slots
    table.release(["a"])
    slots, generations = table.assign(["b", "c"])
    assert (slots.tolist(), generations.tolist()) == ([1, 0], [1, 2])
    # The same id once more, after its release, is another request.
    table.release(["c"])
    assert [part.tolist() for part in table.assign(["b", "c"])] == [[1, 0], [1, 3]]


def test_a_request_that_was_away_comes_back_to_its_slot() -> None:
    table = SlotTable()
    table.assign(["a", "b"])
    table.assign(["b", "c"])
    assert [part.tolist() for part in table.assign(["c", "a"])] == [[2, 0], [1, 1]]


def test_generations_wrap_at_256() -> None:
    table = SlotTable()
    for _ in range(256):
        table.assign(["a"])
        table.release(["a"])
    assert table.assign(["a"])[1].tolist() == [1]  # 257 modulo 256


def test_ids_that_occur_twice_have_no_slots() -> None:
    slots, generations = SlotTable().assign(["a", "a"])
    assert (len(slots), len(generations)) == (0, 0)


def test_those_that_stay_away_are_forgotten_in_the_end() -> None:
    table = SlotTable()
    for number in range(3 * MAX_AWAY):
        slots, _ = table.assign([f"r{number}"])
    assert slots.max() <= MAX_AWAY + 1


@given(st.lists(st.tuples(st.sets(st.integers(0, 30), max_size=8), st.sets(st.integers(0, 30), max_size=4))))
def test_a_slot_and_generation_name_one_request(steps: list[tuple[set[int], set[int]]]) -> None:
    table = SlotTable()
    lives = dict.fromkeys(range(31), 0)  # how often each id was released
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    for batch, finished in steps:
        slots, generations = table.assign([str(i) for i in batch])
        assert len(set(slots.tolist())) == len(batch)
        for i, slot, generation in zip(batch, slots.tolist(), generations.tolist(), strict=True):
            assert owner.setdefault((slot, generation), (i, lives[i])) == (i, lives[i])
        table.release([str(i) for i in finished])
        for i in finished:
            lives[i] += 1


# The switch record and its lines.


def switch(steps: int) -> tuple[str, dict[str, int]]:
    return ("adaptive_spec.restore", {"speculative_num_steps": steps})


def replayed(record: list[Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for _, fields in record:
        settings |= fields
    return settings


def test_the_record_stays_short_and_replays_to_the_same_settings() -> None:
    record: list[Any] = [("start", {"a": 1, "speculative_num_steps": 9})]
    longest = 0
    for number in range(10_000):
        record.append(switch(number % 4))
        if number % 1000 == 500:
            record.append(("operator", {"b": number}))
        expected = replayed(record)
        trim(record)
        assert replayed(record) == expected
        longest = max(longest, len(record))
    assert longest <= MAX_ENTRIES + 1
    assert [source for source, _ in record if source != "adaptive_spec.restore"] == [
        "start",
        *["operator"] * 10,
    ]


def line(text: str, second: float) -> logging.LogRecord:
    record = logging.LogRecord("sglang", logging.INFO, "f.py", 1, text, None, None)
    record.created = second
    return record


def test_lines_about_switches_are_limited_and_others_are_not() -> None:
    lines = SwitchLines()
    # 600 s of 100 switches a second: ten at the start, then one whenever a minute has gone by.
    passed = [
        r for s in range(60_000) if lines.filter(r := line("Switch adaptive runtime state: 1 -> 3", s / 100))
    ]
    assert len(passed) == 10 + 9
    assert passed[10].msg == "Switch adaptive runtime state: 1 -> 3 (5999 such lines left out)"
    assert all(lines.filter(line("Something else", 600.0)) for _ in range(100))
    assert lines.filter(logging.LogRecord("x", 20, "f", 1, ValueError("not a text"), None, None))


# The guard.


def test_the_guard_trips_once_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(3)
    for number in range(10):
        try:
            raise ValueError(f"number {number}\nsecond line")
        except ValueError as error:
            guard.failed("observe", error)
        assert guard.tripped == (number >= 2)
    assert guard.errors["observe"] == 10
    first, record = caplog.records
    assert first.levelno == logging.WARNING
    assert "in observe: ValueError: number 0 second line (" in first.getMessage()
    assert record.levelno == logging.ERROR
    assert "after 3 exceptions" in record.getMessage()
    assert "ValueError: number 2 second line (" in record.getMessage()
    assert "test_small_parts.py:" in record.getMessage()
    assert "\n" not in record.getMessage()
