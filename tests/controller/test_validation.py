"""Every bad input has a cause and a message that says what is wrong; good ones keep their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from specgov.controller.validation import Cause, RejectedMessage, check_engine_rule, check_info, check_report
from specgov.policies.types import EngineSpec
from specgov.proto.v1 import specgov_pb2 as pb

ENGINE = EngineSpec(tiers=(0, 1, 3, 5), max_running_requests=64)
MakeReport = Callable[..., pb.StepReport]
MakeInfo = Callable[..., pb.EngineInfo]

BAD_REPORTS: list[tuple[str, dict[str, Any], Cause, str]] = [
    ("tier that the engine does not have", {"num_steps": 2}, Cause.UNKNOWN_TIER, "num_steps 2 is not in"),
    ("step id 0", {"step_id": 0}, Cause.STEP_ID_NOT_NEW, "step_id 0"),
    ("step id beyond 63 bits", {"step_id": 2**63}, Cause.STEP_ID_NOT_NEW, "step_id"),
    ("empty batch", {"batch_size": 0}, Cause.IMPOSSIBLE_COUNT, "batch_size 0 is not in 1..64"),
    ("batch above the engine's limit", {"batch_size": 65}, Cause.IMPOSSIBLE_COUNT, "batch_size 65"),
    (
        "more entries than requests",
        {"batch_size": 3},
        Cause.IMPOSSIBLE_COUNT,
        "4 entries for a batch of 3",
    ),
    (
        "more accepted than drafted",
        {"accepted_drafts": bytes([0, 4, 1, 1])},
        Cause.IMPOSSIBLE_COUNT,
        "4 accepted drafts cannot come from num_steps 3",
    ),
    (
        "-1 as a byte",
        {"accepted_drafts": bytes([255, 0, 0, 0])},
        Cause.IMPOSSIBLE_COUNT,
        "255 accepted drafts",
    ),
    (
        "accepted drafts without speculation",
        {"num_steps": 0, "accepted_drafts": bytes([0, 1, 0, 0])},
        Cause.IMPOSSIBLE_COUNT,
        "1 accepted drafts cannot come from num_steps 0",
    ),
    ("slots for fewer entries", {"slots_u16le": bytes(6)}, Cause.LENGTH_MISMATCH, "6 bytes for 4 entries"),
    ("half a slot", {"slots_u16le": bytes(7)}, Cause.LENGTH_MISMATCH, "7 bytes"),
    (
        "generations for fewer slots",
        {"slot_generations_u8": bytes(3)},
        Cause.LENGTH_MISMATCH,
        "3 entries for 4 slots",
    ),
    (
        "generations without slots",
        {"slots_u16le": b"", "slot_generations_u8": bytes(4)},
        Cause.LENGTH_MISMATCH,
        "4 entries for 0 slots",
    ),
    (
        "a slot twice",
        {"slots_u16le": bytes([1, 0, 2, 1, 3, 0, 2, 1])},
        Cause.DUPLICATE_SLOT,
        "slot 258 occurs more than once",
    ),
    (
        "longest longer than all together",
        {"sum_seq_len_tokens": 399},
        Cause.IMPOSSIBLE_COUNT,
        "cannot have 399 together",
    ),
    (
        "all together longer than each at the longest",
        {"sum_seq_len_tokens": 1601},
        Cause.IMPOSSIBLE_COUNT,
        "4 requests of at most 400 tokens cannot have 1601 together",
    ),
    (
        "absurd length",
        {"max_seq_len_tokens": 100_000_001, "sum_seq_len_tokens": 0},
        Cause.OUT_OF_RANGE,
        "max_seq_len_tokens 100000001",
    ),
    (
        "absurd sum",
        {"max_seq_len_tokens": 0, "sum_seq_len_tokens": 400_000_001},
        Cause.OUT_OF_RANGE,
        "sum_seq_len_tokens 400000001",
    ),
    ("padded to less", {"padded_batch_size": 3}, Cause.IMPOSSIBLE_COUNT, "padded_batch_size 3 is less"),
    ("absurd padding", {"padded_batch_size": 65_536}, Cause.OUT_OF_RANGE, "padded_batch_size 65536"),
    ("absurd queue", {"waiting_requests": 10_000_001}, Cause.OUT_OF_RANGE, "waiting_requests 10000001"),
    ("KV use NaN", {"kv_use_ratio": float("nan")}, Cause.NOT_A_NUMBER, "kv_use_ratio is nan"),
    ("KV use infinite", {"kv_use_ratio": float("inf")}, Cause.NOT_A_NUMBER, "kv_use_ratio is inf"),
    ("KV use negative", {"kv_use_ratio": -0.5}, Cause.OUT_OF_RANGE, "kv_use_ratio -0.5 is not in 0..1"),
    ("KV use above 1", {"kv_use_ratio": 1.5}, Cause.OUT_OF_RANGE, "kv_use_ratio 1.5"),
    ("step time zero", {"step_time_us": 0}, Cause.OUT_OF_RANGE, "step_time_us 0 is marked valid"),
    ("step time of minutes", {"step_time_us": 60_000_001}, Cause.OUT_OF_RANGE, "step_time_us 60000001"),
    (
        "own rule's tier unknown",
        {"engine_rule_num_steps": 4},
        Cause.UNKNOWN_TIER,
        "engine_rule_num_steps 4 is not in",
    ),
]

BAD_INFOS: list[tuple[str, dict[str, Any], Cause, str]] = [
    ("no engine id", {"engine_id": ""}, Cause.BAD_NAME, "engine_id is empty"),
    ("no boot id", {"boot_id": ""}, Cause.BAD_NAME, "boot_id is empty"),
    ("long engine id", {"engine_id": "x" * 129}, Cause.BAD_NAME, "at most 128 printable"),
    ("control characters", {"engine_id": "a\nb"}, Cause.BAD_NAME, "printable"),
    ("control characters in a text", {"gpu": "\x1b[2J"}, Cause.BAD_NAME, "gpu holds characters"),
    ("a line break in a text", {"model": "m\nlevel=error"}, Cause.BAD_NAME, "model holds characters"),
    ("long model", {"model": "x" * 513}, Cause.OUT_OF_RANGE, "model is longer than 512"),
    ("no tiers", {"tiers": []}, Cause.BAD_TIERS, "tiers is empty"),
    ("tiers descend", {"tiers": [3, 1]}, Cause.BAD_TIERS, "ascending and distinct, not [3, 1]"),
    ("a tier twice", {"tiers": [1, 1, 3]}, Cause.BAD_TIERS, "ascending and distinct"),
    ("absurd tier", {"tiers": [0, 33]}, Cause.BAD_TIERS, "at most 32 steps"),
    ("graph sizes descend", {"graph_batch_sizes": [8, 4]}, Cause.BAD_GRAPH_SIZES, "ascending"),
    ("graph size 0", {"graph_batch_sizes": [0, 4]}, Cause.BAD_GRAPH_SIZES, "1..65535"),
    ("absurd graph size", {"graph_batch_sizes": [4, 65_536]}, Cause.BAD_GRAPH_SIZES, "1..65535"),
    ("too many graph sizes", {"graph_batch_sizes": range(1, 4098)}, Cause.BAD_GRAPH_SIZES, "4096 of them"),
    ("absurd batch", {"max_running_requests": 65_536}, Cause.OUT_OF_RANGE, "max_running_requests 65536"),
    ("absurd lag", {"decision_lag_steps": 1001}, Cause.OUT_OF_RANGE, "decision_lag_steps 1001"),
    ("absurd cache", {"kv_capacity_tokens": 2**48 + 1}, Cause.OUT_OF_RANGE, "kv_capacity_tokens"),
]


def _check(report: pb.StepReport, last_step_id: int = 0) -> None:
    check_report(report, ENGINE, last_step_id)
    check_engine_rule(report, ENGINE)


@pytest.mark.parametrize(
    ("changes", "cause", "says"), [case[1:] for case in BAD_REPORTS], ids=[case[0] for case in BAD_REPORTS]
)
def test_bad_report(make_report: MakeReport, changes: dict[str, Any], cause: Cause, says: str) -> None:
    with pytest.raises(RejectedMessage) as raised:
        _check(make_report(**changes))
    assert raised.value.cause is cause
    assert says in str(raised.value)


@pytest.mark.parametrize("step_id", [9, 10])
def test_step_ids_grow(make_report: MakeReport, step_id: int) -> None:
    with pytest.raises(RejectedMessage, match=f"step_id {step_id} does not follow 10") as raised:
        _check(make_report(step_id=step_id), last_step_id=10)
    assert raised.value.cause is Cause.STEP_ID_NOT_NEW
    _check(make_report(step_id=15), last_step_id=10)  # gaps are allowed


@pytest.mark.parametrize(
    ("changes", "cause", "says"), [case[1:] for case in BAD_INFOS], ids=[case[0] for case in BAD_INFOS]
)
def test_bad_info(make_info: MakeInfo, changes: dict[str, Any], cause: Cause, says: str) -> None:
    with pytest.raises(RejectedMessage) as raised:
        check_info(make_info(**changes))
    assert raised.value.cause is cause
    assert says in str(raised.value)


def test_good_report_keeps_its_values(make_report: MakeReport) -> None:
    step = check_report(
        make_report(
            padded_batch_size=8,
            cuda_graph_ran=True,
            waiting_requests=2,
            kv_use_ratio=0.25,
            after_prefill=True,
            warm_up=True,
        ),
        ENGINE,
        last_step_id=0,
    )
    assert step.accepted.tolist() == [0, 1, 2, 3]
    assert step.slots.tolist() == [7, 8, 9, 256]  # 0x0007, 0x0008, 0x0009, 0x0100: little-endian
    assert step.generations.tolist() == [1, 1, 2, 1]
    assert step.step_ms == 6.5
    assert (step.padded_batch_size, step.cuda_graph_ran, step.waiting_requests) == (8, True, 2)
    assert step.kv_use_ratio == 0.25
    assert (step.after_prefill, step.after_idle, step.has_grammar, step.warm_up) == (True, False, False, True)
    assert step.output_tokens == 10  # 0 + 1 + 2 + 3 accepted, and 4 bonus tokens


def test_absent_fields_mean_not_known() -> None:
    step = check_report(pb.StepReport(step_id=1, batch_size=2, num_steps=3), ENGINE, last_step_id=0)
    assert len(step.accepted) == len(step.slots) == len(step.generations) == 0
    assert (step.step_ms, step.kv_use_ratio, step.cuda_graph_ran) == (None, None, None)


def test_step_time_counts_only_where_valid(make_report: MakeReport) -> None:
    assert check_report(make_report(step_time_valid=False), ENGINE, 0).step_ms is None


def test_generation_offset_wraps_as_the_generations_do(make_report: MakeReport) -> None:
    step = check_report(make_report(), ENGINE, 0, generation_offset=255)
    assert step.generations.tolist() == [0, 0, 1, 0]  # 1, 1, 2, 1 plus 255 modulo 256


def test_smallest_info() -> None:
    spec = check_info(pb.EngineInfo(engine_id="e", boot_id="b", tiers=[0, 2]))
    # Nothing is said of the lag: the usual 2 of an overlapping engine, and one step for the round trip.
    assert spec == EngineSpec(tiers=(0, 2), decision_lag_steps=3)


def test_info_keeps_its_values(make_info: MakeInfo) -> None:
    spec = check_info(
        make_info(
            graph_batch_sizes=[1, 8], draft_kv_stays_warm=False, kv_capacity_tokens=9, decision_lag_steps=1
        )
    )
    assert spec == EngineSpec(
        tiers=(0, 1, 3, 5),
        graph_batch_sizes=(1, 8),
        max_running_requests=64,
        decision_lag_steps=2,
        draft_kv_stays_warm=False,
        kv_capacity_tokens=9,
    )


small = st.integers(0, 80)
reports = st.builds(
    pb.StepReport,
    step_id=st.integers(0, 2**64 - 1),
    batch_size=small,
    padded_batch_size=small,
    num_steps=st.integers(0, 6),
    accepted_drafts=st.lists(st.integers(0, 6), max_size=8).map(bytes),
    slots_u16le=st.binary(max_size=16),
    slot_generations_u8=st.binary(max_size=8),
    sum_seq_len_tokens=st.integers(0, 2**64 - 1) | small,
    max_seq_len_tokens=st.integers(0, 2**64 - 1) | small,
    waiting_requests=st.integers(0, 2**32 - 1),
    kv_use_ratio=st.none() | st.floats(width=32) | st.floats(0, 1, width=32),
    step_time_us=st.integers(0, 2**32 - 1),
    step_time_valid=st.booleans(),
    engine_rule_num_steps=st.none() | st.integers(0, 6),
)


@given(reports)
def test_a_report_is_rejected_or_makes_sense(report: pb.StepReport) -> None:
    try:
        _check(report)
    except RejectedMessage:
        return
    step = check_report(report, ENGINE, last_step_id=0)
    assert step.num_steps in ENGINE.tiers
    assert len(step.accepted) <= step.batch_size <= 64
    assert all(step.accepted <= step.num_steps)
    assert len(step.slots) in (0, len(step.accepted))
    assert len(step.generations) == len(step.slots) == len(np.unique(step.slots))
    assert step.step_ms is None or 0 < step.step_ms <= 60_000
    assert step.kv_use_ratio is None or 0 <= step.kv_use_ratio <= 1


@given(st.binary(max_size=200))
def test_random_bytes_are_no_harm(data: bytes) -> None:
    try:
        message = pb.EngineMessage.FromString(data)
    except DecodeError:  # gRPC's affair
        return
    for check in (lambda: check_info(message.info), lambda: _check(message.report)):
        try:
            check()
        except RejectedMessage:
            continue
