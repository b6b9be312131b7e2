"""Reports and decisions come out of their packets as they went in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.client import Decision, Report, TierRange
from specgov.client.board import PLACE_BYTES
from specgov.client.messages import MAX_NEIGHBOURS, report_to_proto
from specgov.client.packets import pack_decision, pack_report, unpack_decision, unpack_report

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
ratio = st.floats(0, 1, width=32)

REPORTS = st.integers(0, 5).flatmap(
    lambda entries: st.builds(
        Report,
        step_id=uint64,
        batch_size=uint32,
        num_steps=uint32,
        accepted=st.binary(min_size=entries, max_size=entries),
        slots=st.binary(min_size=2 * entries, max_size=2 * entries) | st.just(b""),
        generations=st.binary(min_size=entries, max_size=entries) | st.just(b""),
        sum_seq_len_tokens=uint64,
        max_seq_len_tokens=uint64,
        waiting_requests=uint32,
        step_time_us=uint32,
        step_time_valid=st.booleans(),
        padded_batch_size=uint32,
        cuda_graph_ran=st.none() | st.booleans(),
        kv_use_ratio=st.none() | ratio,
        after_prefill=st.booleans(),
        after_idle=st.booleans(),
        has_grammar=st.booleans(),
        warm_up=st.booleans(),
        decision_id=uint64,
        engine_rule_num_steps=st.none() | uint32,
    )
)
DECISIONS = st.builds(
    Decision,
    decision_id=uint64,
    known_step_id=uint64,
    num_steps=uint32,
    batch_size_min=uint32,
    batch_size_max=uint32,
    neighbours=st.lists(st.builds(TierRange, uint32, uint32, uint32), max_size=4).map(tuple),
    ttl_steps=uint32,
    ttl_ms=uint32,
    reason=st.integers(-(2**31), 2**31 - 1),  # an enum that a newer sidecar may have added to
    policy=st.text(max_size=20),
    policy_version=st.text(max_size=20),
    propensity=st.none() | st.floats(0, 1),
    received_s=st.floats(0, 1e9),
)


@given(REPORTS, uint32)
def test_a_report_with_every_field(report: Report, dropped: int) -> None:
    assert unpack_report(pack_report(report, dropped)) == (report, dropped)


def test_numpy_arrays_are_packed_as_their_bytes() -> None:
    arrays = {
        "accepted": np.array([3, 0], np.uint8),
        "slots": np.array([1, 258], np.uint16),
        "generations": np.array([7, 8], np.uint8),
    }
    report, _ = unpack_report(pack_report(Report(1, 2, 3, **arrays), 0))
    assert (report.accepted, report.slots, report.generations) == (b"\3\0", b"\1\0\2\1", b"\7\x08")


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_id": -1},
        {"batch_size": 2**32},
        {"num_steps": 1.5},
        {"accepted": [1]},
        {"slots": np.zeros(1, np.uint32)},
        {"kv_use_ratio": "all"},
        {"cuda_graph_ran": "yes"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_a_message_would_not_take_a_packet_does_not_either(wrong: dict[str, Any]) -> None:
    report = Report(1, 2, 3)._replace(**wrong)
    for form in (report_to_proto, pack_report):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            form(report, 0)


@given(DECISIONS)
def test_a_decision_with_every_field(decision: Decision) -> None:
    assert unpack_decision(pack_decision(decision)) == decision


@given(st.lists(st.tuples(DECISIONS, st.integers(1, 3), st.floats(-1e3, 1e3)), max_size=5))
def test_decisions_that_follow_each_other(followed: list[tuple[Decision, int, float]]) -> None:
    """Some with all but their number, step and time as in the last one."""
    for decision, times, ahead_s in followed:
        for number in range(times):
            own = decision._replace(decision_id=number, known_step_id=2 * number, received_s=3.0 * number)
            assert unpack_decision(pack_decision(own), ahead_s) == own._replace(
                received_s=3.0 * number + ahead_s
            )


def test_the_longest_decision_finds_room() -> None:
    decision = Decision(
        1, 1, 3, 1, 1, (TierRange(1, 2, 3),) * MAX_NEIGHBOURS, 1, 1, 1, "p" * 32_000, "v" * 32_000, None, 0.0
    )
    assert len(pack_decision(decision)) <= PLACE_BYTES - 16  # less a place's head
