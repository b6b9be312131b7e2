"""Decisions' messages: what is kept from one to the next never shows in another choice's."""

from __future__ import annotations

import numpy as np

from specgov.controller.decision import DecisionBuilder
from specgov.policies.registry import make_policy
from specgov.policies.types import Choice, EngineSpec, PolicyContext, Reason, TierRange
from specgov.proto.v1 import specgov_pb2 as pb

ENGINE = EngineSpec((0, 3), max_running_requests=64)
RANGES = (TierRange(1, 8, 3), TierRange(9, 64, 0))


def builder() -> DecisionBuilder:
    context = PolicyContext(ENGINE, np.random.default_rng(0), clock=lambda: 0.0)
    return DecisionBuilder(ENGINE, make_policy("static:3", context), ttl_steps=20, ttl_ms=200)


def choice(tokens: float, propensity: float | None) -> Choice:
    return Choice(
        RANGES,
        propensity=propensity,
        expected_tokens=np.array([1.0, tokens]),
        expected_ms=np.array([5.0, 6.0]),
    )


def expected(number: int, reason: Reason, num_steps: int, tokens: float | None, **more: float) -> pb.Decision:
    small = pb.TierRange(batch_size_min=1, batch_size_max=8, num_steps=3)
    large = pb.TierRange(batch_size_min=9, batch_size_max=64, num_steps=0)
    own, other = (small, large) if num_steps else (large, small)
    message = pb.Decision(
        decision_id=number,
        known_step_id=number + 10,
        num_steps=num_steps,
        batch_size_min=own.batch_size_min,
        batch_size_max=own.batch_size_max,
        neighbours=[other],
        ttl_steps=20,
        ttl_ms=200,
        policy="static",
        policy_version="1",
        reason=int(reason),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )
    if tokens is not None:
        message.estimates.add(num_steps=0, expected_tokens=1.0, expected_ms=5.0)
        message.estimates.add(num_steps=3, expected_tokens=tokens, expected_ms=6.0)
    return message


def test_a_choice_made_again_and_another_of_the_same_ranges() -> None:
    make = builder()
    first, second, plain = choice(2.5, 0.25), choice(3.5, None), Choice(RANGES)
    reason = Reason.HOLD
    assert make.build(first, 8, 1, 11, reason) == expected(1, reason, 3, 2.5, propensity=0.25)
    assert make.build(first, 8, 2, 12, Reason.SHADOW) == expected(2, Reason.SHADOW, 3, 2.5, propensity=0.25)
    assert make.build(first, 9, 3, 13, reason) == expected(3, reason, 0, 2.5, propensity=0.25)
    assert make.build(second, 9, 4, 14, reason) == expected(4, reason, 0, 3.5)
    assert make.build(plain, 9, 5, 15, reason) == expected(5, reason, 0, None)
    assert make.build(first, 1, 6, 16, reason) == expected(6, reason, 3, 2.5, propensity=0.25)


def test_what_is_written_into_a_decision_stays_out_of_the_next() -> None:
    make, made = builder(), choice(2.5, 0.25)
    decision = make.build(made, 8, 1, 11, Reason.POLICY)
    decision.ClearField("propensity")
    decision.guard_cause = pb.GUARD_CAUSE_BUDGET
    decision.estimates[0].expected_tokens = 9.0
    assert make.build(made, 8, 2, 12, Reason.POLICY) == expected(2, Reason.POLICY, 3, 2.5, propensity=0.25)
