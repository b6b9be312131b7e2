"""What the engine says and hears, free of protobuf, so that its thread neither builds nor parses messages."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgov.proto.v1 import specgov_pb2 as pb

MAX_NEIGHBOURS = 64
"""A decision with more neighbouring ranges is rejected: the engine's thread searches them one by one."""
MAX_POLICY_CHARS = 256
"""A decision whose policy has a longer name or version is rejected."""

_BYTE_DTYPE = np.dtype(np.uint8)
_SLOT_DTYPE = np.dtype("<u2")


class Report(NamedTuple):
    """The result of one decode step; the fields and their units are ``StepReport``'s in the protocol file.

    ``accepted`` has one byte for each request that was still live when the result was processed; ``slots``
    (two little-endian bytes each) and ``generations`` (one byte each) have as many entries or none. Each is
    bytes, or a numpy array that the caller leaves alone afterwards, since another thread reads it later. None
    means not known.
    """

    step_id: int
    batch_size: int
    num_steps: int
    accepted: bytes | NDArray[np.uint8] = b""
    slots: bytes | NDArray[np.uint16] = b""
    generations: bytes | NDArray[np.uint8] = b""
    sum_seq_len_tokens: int = 0
    max_seq_len_tokens: int = 0
    waiting_requests: int = 0
    step_time_us: int = 0
    step_time_valid: bool = False
    padded_batch_size: int = 0
    cuda_graph_ran: bool | None = None
    kv_use_ratio: float | None = None
    after_prefill: bool = False
    after_idle: bool = False
    has_grammar: bool = False
    warm_up: bool = False
    decision_id: int = 0
    engine_rule_num_steps: int | None = None


ReportFields: TypeAlias = tuple[
    int, int, int,
    bytes | NDArray[np.uint8], bytes | NDArray[np.uint16], bytes | NDArray[np.uint8],
    int, int, int, int, bool, int, bool | None, float | None, bool, bool, bool, bool, int, int | None,
]  # fmt: skip
"""Of ``Report``, in its order. ``tuple.__new__(Report, fields)`` makes one in a fraction of the time that
``Report(name=value, ...)`` takes, above all where that one's code has left the caches."""


class TierRange(NamedTuple):
    """A tier for the batch sizes ``batch_size_min`` to ``batch_size_max``, both included."""

    batch_size_min: int
    batch_size_max: int
    num_steps: int


class Decision(NamedTuple):
    """A tier to use, with the batch sizes that it is meant for; see ``Decision`` in the protocol file.

    ``ttl_steps`` counts from ``known_step_id``, ``ttl_ms`` from ``received_s`` (the client's clock, in
    seconds) and only while steps are being made. ``reason`` is the protocol's ``Reason`` as a number.
    ``propensity`` is None where it is not known.
    """

    decision_id: int
    known_step_id: int
    num_steps: int
    batch_size_min: int
    batch_size_max: int
    neighbours: tuple[TierRange, ...]
    ttl_steps: int
    ttl_ms: int
    reason: int
    policy: str
    policy_version: str
    propensity: float | None
    received_s: float

    def num_steps_for(self, batch_size: int) -> int | None:
        """The tier for ``batch_size``; None where the decision says nothing about that size."""
        if self.batch_size_min <= batch_size <= self.batch_size_max:
            return self.num_steps
        for low, high, num_steps in self.neighbours:
            if low <= batch_size <= high:
                return num_steps
        return None


def report_to_proto(report: Report, reports_dropped: int) -> pb.StepReport:
    """The wire form of ``report``.

    Raises:
        TypeError, ValueError: a value is of the wrong kind or outside its field's range.

    """
    return pb.StepReport(
        step_id=report.step_id,
        batch_size=report.batch_size,
        padded_batch_size=report.padded_batch_size,
        cuda_graph_ran=report.cuda_graph_ran,
        num_steps=report.num_steps,
        accepted_drafts=one_byte_each(report.accepted),
        slots_u16le=two_bytes_each(report.slots),
        slot_generations_u8=one_byte_each(report.generations),
        sum_seq_len_tokens=report.sum_seq_len_tokens,
        max_seq_len_tokens=report.max_seq_len_tokens,
        waiting_requests=report.waiting_requests,
        kv_use_ratio=report.kv_use_ratio,
        step_time_us=report.step_time_us,
        step_time_valid=report.step_time_valid,
        after_prefill=report.after_prefill,
        after_idle=report.after_idle,
        has_grammar=report.has_grammar,
        warm_up=report.warm_up,
        decision_id=report.decision_id,
        reports_dropped=reports_dropped,
        engine_rule_num_steps=report.engine_rule_num_steps,
    )


def decision_from_proto(message: pb.Decision, tiers: frozenset[int], received_s: float) -> Decision | None:
    """The decision in ``message``; None where a tier is outside ``tiers``, or it is too long."""
    if message.num_steps not in tiers or len(message.neighbours) > MAX_NEIGHBOURS:
        return None
    if max(len(message.policy), len(message.policy_version)) > MAX_POLICY_CHARS:
        return None
    neighbours = tuple(TierRange(n.batch_size_min, n.batch_size_max, n.num_steps) for n in message.neighbours)
    if any(n.num_steps not in tiers for n in neighbours):
        return None
    return Decision(
        message.decision_id,
        message.known_step_id,
        message.num_steps,
        message.batch_size_min,
        message.batch_size_max,
        neighbours,
        message.ttl_steps,
        message.ttl_ms,
        message.reason,
        message.policy,
        message.policy_version,
        message.propensity if message.HasField("propensity") else None,
        received_s,
    )


def one_byte_each(values: bytes | NDArray[np.uint8]) -> bytes:
    """The wire form of ``Report.accepted`` and ``Report.generations``.

    Raises:
        TypeError, AttributeError: ``values`` are neither bytes nor an array whose type fits in a byte.

    """
    if isinstance(values, bytes):
        return values
    return (values if values.dtype == _BYTE_DTYPE else values.astype(np.uint8, casting="safe")).tobytes()


def two_bytes_each(values: bytes | NDArray[np.uint16]) -> bytes:
    """The wire form of ``Report.slots``.

    Raises:
        TypeError, AttributeError: ``values`` are neither bytes nor an array whose type fits in two bytes.

    """
    if isinstance(values, bytes):
        return values
    return (values if values.dtype == _SLOT_DTYPE else values.astype(_SLOT_DTYPE, casting="safe")).tobytes()
