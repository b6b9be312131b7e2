"""From protocol messages to what rules see: everything that an engine says is checked here and nowhere else.

A bad message raises ``RejectedMessage``; its cause is one of a fixed set, so that it can be a metric's label.
Nothing is learnt from a rejected message.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from specgov.policies.types import MAX_BATCH_SIZE, EngineSpec, StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

MAX_NUM_STEPS = 32
MAX_TIERS = 32
MAX_GRAPH_BATCH_SIZES = 4096
MAX_NAME_CHARS = 128
MAX_TEXT_CHARS = 512
MAX_POLICY_CHARS = 4096
MAX_SEQ_LEN_TOKENS = 100_000_000
MAX_KV_CAPACITY_TOKENS = 2**48
MAX_WAITING_REQUESTS = 10_000_000
MAX_DECISION_LAG_STEPS = 1000
MAX_STEP_MS = 60_000.0
MAX_STEP_ID = 2**63 - 1

DEFAULT_ENGINE_LAG_STEPS = 2
"""The engine's share of the decision lag where it names none."""
TRANSPORT_LAG_STEPS = 1
"""The round trip's usual share of the decision lag, added to the engine's."""

_UP_TO = [bytes(range(num_steps + 1)) for num_steps in range(MAX_NUM_STEPS + 1)]


class Cause(enum.StrEnum):
    """Why a message was rejected."""

    MISSING_INFO = "missing_info"
    REPEATED_INFO = "repeated_info"
    BAD_NAME = "bad_name"
    BAD_TIERS = "bad_tiers"
    BAD_GRAPH_SIZES = "bad_graph_sizes"
    UNKNOWN_TIER = "unknown_tier"
    UNKNOWN_PROFILE = "unknown_profile"
    NOT_A_NUMBER = "not_a_number"
    IMPOSSIBLE_COUNT = "impossible_count"
    LENGTH_MISMATCH = "length_mismatch"
    DUPLICATE_SLOT = "duplicate_slot"
    STEP_ID_NOT_NEW = "step_id_not_new"
    OUT_OF_RANGE = "out_of_range"
    MISSING_ACCEPTANCE = "missing_acceptance"
    UNREADABLE = "unreadable"
    TOO_MANY = "too_many"


class RejectedMessage(ValueError):  # noqa: N818 it names the message, not the act
    """A message that cannot be used; nothing was learnt from it. ``str()`` says what is wrong with it."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def check_tiers(tiers: Iterable[int]) -> tuple[int, ...]:
    """The tiers as a tuple.

    Raises:
        RejectedMessage: none, too many, too large, or not ascending and distinct.

    """
    tiers = tuple(tiers)
    if not tiers:
        raise RejectedMessage(Cause.BAD_TIERS, "tiers is empty: name at least one num_steps")
    if len(tiers) > MAX_TIERS or max(tiers) > MAX_NUM_STEPS:
        raise RejectedMessage(
            Cause.BAD_TIERS, f"at most {MAX_TIERS} tiers of at most {MAX_NUM_STEPS} steps are supported"
        )
    if not _ascending(tiers):
        raise RejectedMessage(Cause.BAD_TIERS, f"tiers must be ascending and distinct, not {list(tiers)}")
    return tiers


def read_message(data: bytes) -> pb.EngineMessage | RejectedMessage:
    """The message in ``data``, or why there is none: bytes that are no message must not end their stream."""
    try:
        return pb.EngineMessage.FromString(data)
    except DecodeError as error:
        return RejectedMessage(Cause.UNREADABLE, f"{len(data)} bytes that are no EngineMessage: {error}")


def check_policy_text(text: str) -> None:
    """Refuse a policy's text that is too long to be read.

    Raises:
        RejectedMessage: it is.

    """
    if len(text) > MAX_POLICY_CHARS:
        raise RejectedMessage(Cause.OUT_OF_RANGE, f"policy is longer than {MAX_POLICY_CHARS} characters")


def check_info(info: pb.EngineInfo) -> EngineSpec:
    """What an engine's first message says of it.

    Raises:
        RejectedMessage: it names no engine or boot, no usable tiers, or sizes that cannot be.

    """
    _check_name("engine_id", info.engine_id)
    _check_name("boot_id", info.boot_id)
    for field in ("engine", "engine_version", "model", "draft", "gpu", "profile", "client_version"):
        text = getattr(info, field)
        if len(text) > MAX_TEXT_CHARS:
            raise RejectedMessage(Cause.OUT_OF_RANGE, f"{field} is longer than {MAX_TEXT_CHARS} characters")
        if not text.isprintable():  # it is shown on terminals
            raise RejectedMessage(Cause.BAD_NAME, f"{field} holds characters that are not printable")
    _check_at_most("max_running_requests", info.max_running_requests, MAX_BATCH_SIZE)
    _check_at_most("decision_lag_steps", info.decision_lag_steps, MAX_DECISION_LAG_STEPS)
    _check_at_most("kv_capacity_tokens", info.kv_capacity_tokens, MAX_KV_CAPACITY_TOKENS)
    return EngineSpec(
        tiers=check_tiers(info.tiers),
        graph_batch_sizes=_graph_batch_sizes(info),
        max_running_requests=info.max_running_requests,
        decision_lag_steps=(info.decision_lag_steps or DEFAULT_ENGINE_LAG_STEPS) + TRANSPORT_LAG_STEPS,
        draft_kv_stays_warm=info.draft_kv_stays_warm if info.HasField("draft_kv_stays_warm") else True,
        kv_capacity_tokens=info.kv_capacity_tokens,
    )


def check_report(
    report: pb.StepReport, engine: EngineSpec, last_step_id: int, generation_offset: int = 0
) -> StepObservation:
    """The step that a report tells of; ``last_step_id`` is the newest accepted one of this boot, 0 if none.

    ``generation_offset`` is added to the slots' generations, modulo 256: one that differs from boot to boot
    marks all requests of a new boot as new, though its slots count from the start again.

    Raises:
        RejectedMessage: the report is out of order, or tells of something that cannot have happened.

    """
    step_id, batch_size, num_steps = report.step_id, report.batch_size, report.num_steps
    if not last_step_id < step_id <= MAX_STEP_ID:
        raise RejectedMessage(
            Cause.STEP_ID_NOT_NEW, f"step_id {step_id} does not follow {last_step_id} within one boot"
        )
    if num_steps not in engine.tiers:
        raise RejectedMessage(Cause.UNKNOWN_TIER, f"num_steps {num_steps} is not in {list(engine.tiers)}")
    if not 1 <= batch_size <= engine.largest_batch_size:
        raise RejectedMessage(
            Cause.IMPOSSIBLE_COUNT, f"batch_size {batch_size} is not in 1..{engine.largest_batch_size}"
        )
    total, longest = report.sum_seq_len_tokens, report.max_seq_len_tokens
    padded, waiting = report.padded_batch_size, report.waiting_requests
    _check_load(batch_size, total, longest, padded, waiting)
    accepted = report.accepted_drafts
    _check_accepted(accepted, batch_size, num_steps)
    slots = _slots(report.slots_u16le, len(accepted))
    return StepObservation(
        step_id=step_id,
        batch_size=batch_size,
        num_steps=num_steps,
        accepted=np.frombuffer(accepted, np.uint8),
        slots=slots,
        generations=_generations(report.slot_generations_u8, len(slots), generation_offset),
        sum_seq_len_tokens=total,
        max_seq_len_tokens=longest,
        padded_batch_size=padded,
        cuda_graph_ran=report.cuda_graph_ran if report.HasField("cuda_graph_ran") else None,
        waiting_requests=waiting,
        kv_use_ratio=_kv_use_ratio(report) if report.HasField("kv_use_ratio") else None,
        step_ms=_step_ms(report) if report.step_time_valid else None,
        after_prefill=report.after_prefill,
        after_idle=report.after_idle,
        has_grammar=report.has_grammar,
        warm_up=report.warm_up,
    )


def check_engine_rule(report: pb.StepReport, engine: EngineSpec) -> int | None:
    """What the engine's own rule would have chosen, None where the report does not say.

    Raises:
        RejectedMessage: it is not one of the engine's tiers.

    """
    if not report.HasField("engine_rule_num_steps"):
        return None
    if report.engine_rule_num_steps not in engine.tiers:
        raise RejectedMessage(
            Cause.UNKNOWN_TIER,
            f"engine_rule_num_steps {report.engine_rule_num_steps} is not in {list(engine.tiers)}",
        )
    return report.engine_rule_num_steps


def _check_accepted(accepted: bytes, batch_size: int, num_steps: int) -> None:
    if len(accepted) > batch_size:
        raise RejectedMessage(
            Cause.IMPOSSIBLE_COUNT,
            f"accepted_drafts has {len(accepted)} entries for a batch of {batch_size}",
        )
    if too_many := accepted.translate(None, _UP_TO[num_steps]):
        raise RejectedMessage(
            Cause.IMPOSSIBLE_COUNT,
            f"{max(too_many)} accepted drafts cannot come from num_steps {num_steps}",
        )


def _slots(slots_u16le: bytes, entries: int) -> NDArray[np.uint16]:
    """Slots, one for each of ``entries`` entries, or empty where there are none."""
    if len(slots_u16le) not in (0, 2 * entries):
        raise RejectedMessage(
            Cause.LENGTH_MISMATCH,
            f"slots_u16le has {len(slots_u16le)} bytes for {entries} entries of 2 bytes each",
        )
    return _distinct_slots(slots_u16le)


@lru_cache(maxsize=128)
def _distinct_slots(slots_u16le: bytes) -> NDArray[np.uint16]:
    """The slots; kept, since most steps have the requests of the step before, and read-only."""
    slots = np.frombuffer(slots_u16le, "<u2")
    ordered = np.sort(slots)
    same = ordered[1:] == ordered[:-1]
    if same.any():
        raise RejectedMessage(
            Cause.DUPLICATE_SLOT, f"slot {ordered[1:][same][0]} occurs more than once in the report"
        )
    return slots


def _generations(generations_u8: bytes, entries: int, offset: int) -> NDArray[np.uint8]:
    """Generations of ``entries`` slots; where the report has none they differ from boot to boot alone."""
    if len(generations_u8) not in (0, entries):
        raise RejectedMessage(
            Cause.LENGTH_MISMATCH,
            f"slot_generations_u8 has {len(generations_u8)} entries for {entries} slots",
        )
    generations = np.frombuffer(generations_u8 or bytes(entries), np.uint8)
    return generations + np.uint8(offset) if offset else generations


def _check_load(batch_size: int, total: int, longest: int, padded: int, waiting: int) -> None:
    """Sequence lengths, padding and queue against each other and against what can be."""
    largest_total = MAX_SEQ_LEN_TOKENS * batch_size
    if (
        longest > MAX_SEQ_LEN_TOKENS
        or total > largest_total
        or waiting > MAX_WAITING_REQUESTS
        or padded > MAX_BATCH_SIZE
    ):
        _check_at_most("max_seq_len_tokens", longest, MAX_SEQ_LEN_TOKENS)
        _check_at_most("sum_seq_len_tokens", total, largest_total)
        _check_at_most("waiting_requests", waiting, MAX_WAITING_REQUESTS)
        _check_at_most("padded_batch_size", padded, MAX_BATCH_SIZE)
    if total and longest and not longest <= total <= longest * batch_size:
        raise RejectedMessage(
            Cause.IMPOSSIBLE_COUNT,
            f"{batch_size} requests of at most {longest} tokens cannot have {total} together",
        )
    if padded and padded < batch_size:
        raise RejectedMessage(
            Cause.IMPOSSIBLE_COUNT, f"padded_batch_size {padded} is less than batch_size {batch_size}"
        )


def _kv_use_ratio(report: pb.StepReport) -> float:
    ratio = report.kv_use_ratio
    if not math.isfinite(ratio):
        raise RejectedMessage(Cause.NOT_A_NUMBER, f"kv_use_ratio is {ratio}")
    if not 0.0 <= ratio <= 1.0:
        raise RejectedMessage(Cause.OUT_OF_RANGE, f"kv_use_ratio {ratio:g} is not in 0..1")
    return ratio


def _step_ms(report: pb.StepReport) -> float:
    step_ms = report.step_time_us / 1000.0
    if not 0.0 < step_ms <= MAX_STEP_MS:
        raise RejectedMessage(
            Cause.OUT_OF_RANGE,
            f"step_time_us {report.step_time_us} is marked valid but is not in 1..{MAX_STEP_MS * 1000:.0f}",
        )
    return step_ms


def _graph_batch_sizes(info: pb.EngineInfo) -> tuple[int, ...]:
    sizes = tuple(info.graph_batch_sizes)
    if len(sizes) > MAX_GRAPH_BATCH_SIZES or (
        sizes and not (_ascending(sizes) and sizes[0] >= 1 and sizes[-1] <= MAX_BATCH_SIZE)
    ):
        raise RejectedMessage(
            Cause.BAD_GRAPH_SIZES,
            f"graph_batch_sizes must be ascending, distinct, in 1..{MAX_BATCH_SIZE}, "
            f"and at most {MAX_GRAPH_BATCH_SIZES} of them",
        )
    return sizes


def _check_name(field: str, value: str) -> None:
    if not value:
        raise RejectedMessage(Cause.BAD_NAME, f"{field} is empty")
    if len(value) > MAX_NAME_CHARS or not value.isprintable():
        raise RejectedMessage(
            Cause.BAD_NAME, f"{field} must be at most {MAX_NAME_CHARS} printable characters"
        )


def _check_at_most(field: str, value: int, limit: int) -> None:
    if value > limit:
        raise RejectedMessage(Cause.OUT_OF_RANGE, f"{field} {value} is above {limit}")


def _ascending(values: tuple[int, ...]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))
