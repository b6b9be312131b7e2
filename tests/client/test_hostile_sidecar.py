"""Whatever a sidecar says, the engine gets one of its own tiers or none, for as long as its limits allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from specgov.client import Report, StreamClient, StreamLimits
from specgov.client.life import DecisionLife
from specgov.client.messages import MAX_NEIGHBOURS, MAX_POLICY_CHARS, decision_from_proto
from specgov.client.packets import pack_decision, pack_stats, unpack_decision, unpack_stats
from specgov.client.stream import MAX_ERROR_CHARS
from specgov.proto.v1 import specgov_pb2 as pb

TIERS = frozenset((0, 1, 3))
MAX_TTL_STEPS, MAX_TTL_S = 100, 2.0
U32 = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1))
U64 = st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1))
RANGES = st.builds(pb.TierRange, batch_size_min=U32, batch_size_max=U32, num_steps=st.integers(0, 4))
DECISIONS = st.builds(
    pb.Decision,
    decision_id=U64,
    known_step_id=U64,
    num_steps=st.integers(0, 4),
    batch_size_min=U32,
    batch_size_max=U32,
    neighbours=st.lists(RANGES, max_size=4),
    ttl_steps=U32,
    ttl_ms=U32,
    reason=st.integers(-(2**31), 2**31 - 1),
    policy=st.text(max_size=8),
    policy_version=st.text(max_size=8),
    propensity=st.one_of(st.none(), st.floats()),
    estimates=st.lists(st.builds(pb.TierEstimate, num_steps=U32, expected_ms=st.floats()), max_size=3),
)


@given(DECISIONS, st.integers(0, 70_000), U64)
def test_any_decision_is_a_tier_of_the_engines_or_none(
    message: pb.Decision, batch_size: int, step_id: int
) -> None:
    decision = decision_from_proto(message, TIERS, received_s=5.0)
    if decision is None:
        assert {message.num_steps, *(n.num_steps for n in message.neighbours)} - TIERS
        return
    assert decision.num_steps_for(batch_size) in {None, *TIERS}
    # Through the relay it stays what it was; NaN is not equal to itself.
    again = unpack_decision(pack_decision(decision))
    same = [a == b or (a != a and b != b) for a, b in zip(again, decision, strict=True)]
    assert all(same)
    life = DecisionLife()
    life.hold(decision, MAX_TTL_STEPS, MAX_TTL_S)
    if step_id > message.known_step_id + MAX_TTL_STEPS:
        assert life.current(step_id, 5.0) is None
    life.reported(5.0, after_idle=False)
    life.reported(5.0 + 1.01 * MAX_TTL_S, after_idle=False)
    assert life.current(step_id, 5.0 + 1.01 * MAX_TTL_S) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_decision_as_above_or_no_message(data: bytes) -> None:
    try:
        message = pb.Decision.FromString(data)
    except DecodeError:
        return
    decision = decision_from_proto(message, TIERS, received_s=0.0)
    assert decision is None or decision.num_steps in TIERS


def test_the_longest_decision_that_is_taken_is_short_work() -> None:
    """What the engine's thread may have to go through for a step: the ranges of one decision."""
    message = pb.Decision(
        num_steps=3,
        neighbours=[pb.TierRange(batch_size_min=1, batch_size_max=2, num_steps=1)] * MAX_NEIGHBOURS,
        policy="p" * MAX_POLICY_CHARS,
    )
    assert decision_from_proto(message, TIERS, 0.0) is not None
    message.neighbours.add(num_steps=1)
    assert decision_from_proto(message, TIERS, 0.0) is None


def test_what_a_sidecar_says_cannot_forge_lines_or_fill_the_engines_log(
    sidecar: Any,
    make_client: Callable[..., StreamClient],
    eventually: Callable[[Callable[[], Any]], None],
    caplog: Any,
) -> None:
    def refuse(messages: Any, context: grpc.ServicerContext) -> Iterator[pb.Decision]:
        context.abort(grpc.StatusCode.INTERNAL, "no\n2026-01-01 ERROR forged \x1b[2J" + "x" * 4000)
        yield pb.Decision()

    sidecar.behaviour = refuse
    client = make_client(limits=StreamLimits(backoff_base_s=0.01, backoff_max_s=0.05))
    client.submit(Report(1, 1, 3))
    eventually(lambda: sidecar.streams >= 3 and client.stats().last_error)
    said = client.stats().last_error
    assert said.isprintable()
    assert said.startswith(r"INTERNAL: no\n2026-01-01 ERROR forged \x1b[2J")
    assert len(said) < 2 * MAX_ERROR_CHARS
    assert all(
        record.getMessage().isprintable() for record in caplog.records if "forged" in record.getMessage()
    )
    assert unpack_stats(pack_stats(client.stats())).last_error == said
