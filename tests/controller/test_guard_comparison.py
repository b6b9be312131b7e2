"""Like is compared with like: what the baseline would have brought, and that nobody is set aside for less."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specgov.controller.config import ServeConfig
from specgov.controller.engine import Engine
from specgov.controller.guard.backoff import Backoff
from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.comparison import Comparison
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.estimates import Estimates
from specgov.controller.guard.guard import Guard
from specgov.controller.guard.output_rate import OutputRate
from specgov.controller.validation import check_info
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, Choice, EngineSpec, Policy, PolicyContext, StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

ENGINE = EngineSpec(tiers=(0, 1, 3), max_running_requests=64, decision_lag_steps=1)
TOKENS, MS = [4.0, 6.0, 8.0], [8.0, 8.0, 10.0]
"""A batch of 4. Tier 1 brings 0.75 tokens a ms, tier 3 0.8."""


def observed(num_steps: int, accepted: list[int], batch_size: int = 4, **fields: Any) -> StepObservation:
    return StepObservation(
        fields.pop("step_id", 1),
        batch_size,
        num_steps,
        np.array(accepted, np.uint8),
        np.zeros(0, np.uint16),
        np.zeros(0, np.uint8),
        400,
        100,
        **fields,
    )


def brought(step: StepObservation, output_tokens: float, baseline: int, *timed: tuple[int, float]) -> float:
    compare = Comparison(ENGINE.tiers)
    for tier, ratio in timed:
        for _ in range(500):
            compare.timed(4, tier, ratio)
    tier = ENGINE.tiers.index(step.num_steps)
    return compare.baseline_tokens(step, output_tokens, Estimates(4, TOKENS, MS), tier, baseline)


# What the baseline would have brought. A step at tier 3 takes 10 ms, one at a smaller tier 8.


@pytest.mark.parametrize(
    ("baseline", "tokens"),
    [
        (0, 4 * 10 / 8),  # one token a request
        (1, (0 + 1 + 1 + 1 + 4) * 10 / 8),  # of 0, 1, 2 and 3 accepted drafts at most one each
        (2, 10.0),  # itself
    ],
)
def test_what_a_smaller_tier_would_have_brought_is_seen(baseline: int, tokens: float) -> None:
    assert brought(observed(3, [0, 1, 2, 3]), 10.0, baseline) == tokens


def test_requests_that_ended_unreported_are_counted_as_the_others() -> None:
    """Two of four are reported: 1 + 2 tokens at tier 1, so 6 of all."""
    assert brought(observed(3, [0, 3]), 10.0, 1) == 6 * 10 / 8


def test_a_larger_tier_would_have_fared_as_much_worse_than_expected() -> None:
    """Tier 1 brings 4.5 of 6 expected tokens: tier 3 would bring 6 of 8, in 8 of 10 ms."""
    assert brought(observed(1, [1, 0, 0, 0]), 4.5, 2) == pytest.approx(6 * 8 / 10)


def test_a_tier_that_takes_longer_than_claimed_pays_for_it() -> None:
    """Tier 3 takes twice its 10 ms, step after step; the baseline what is said of it."""
    assert brought(observed(3, [1] * 4), 8.0, 1, (2, 2.0)) == pytest.approx(8 * 20 / 8)


def test_a_server_on_which_all_tiers_take_longer_is_nobodys_fault() -> None:
    assert brought(observed(3, [1] * 4), 8.0, 1, (2, 2.0), (1, 2.0)) == pytest.approx(8 * 10 / 8)


def test_stalls_do_not_count() -> None:
    """Every fifth step takes three times as long, as beside prefills.

    In balance a stall's move of 0.01 is what four steps move back, each by a quarter of the distance: so
    that is 0.01, or 1 %.
    """
    compare = Comparison(ENGINE.tiers)
    for step in range(1000):
        compare.timed(4, 2, 3.0 if step % 5 == 0 else 1.0)
    brings = compare.baseline_tokens(observed(3, [1] * 4), 8.0, Estimates(4, TOKENS, MS), 2, 1)
    assert brings == pytest.approx(8 * 10 / 8, rel=0.02)


def test_what_is_not_known_is_no_reason() -> None:
    """Short by 40 %, where the estimate may be off by 25 % once and twice; then it is known to 10 %."""
    judge = OutputRate(32, 0.05, Backoff(100, 1000))
    assert not any(judge.measure(60.0, 100.0, 25.0) for _ in range(100))
    assert any(judge.measure(60.0, 100.0, 10.0) for _ in range(32))


def typical_of(compare: Comparison, batch_size: int) -> float:
    """What tier 1 would have brought in place of a step at tier 3, over what its times are said to give."""
    step = observed(3, [1] * batch_size, batch_size)
    estimates = Estimates(batch_size, [batch_size * tokens for tokens in (1.0, 1.5, 2.0)], MS)
    output_tokens = 2.0 * batch_size
    return compare.baseline_tokens(step, output_tokens, estimates, 2, 1) / (output_tokens * 10 / 8)


def test_an_error_that_all_tiers_share_at_one_batch_size_is_nobodys_fault() -> None:
    """All take twice as long as said at 32 requests and no longer at 4, and tier 3 runs mostly at 32."""
    compare = Comparison(ENGINE.tiers)
    for step in range(2000):
        at_32 = step % 4 != 0
        compare.timed(32 if at_32 else 4, 2, 2.0 if at_32 else 1.0)
        compare.timed(4 if at_32 else 32, 1, 1.0 if at_32 else 2.0)
    assert typical_of(compare, 32) == pytest.approx(1.0, rel=1e-3)
    assert typical_of(compare, 4) == pytest.approx(1.0, rel=1e-3)


def test_of_a_tier_that_did_not_run_at_that_batch_size_the_nearest_counts() -> None:
    """Tier 1 takes 1.5 times as long as said at 4 and 1.2 times at 16; where it never ran as at 16."""
    compare = Comparison(ENGINE.tiers)
    assert typical_of(compare, 32) == 1.0
    for _ in range(1000):
        compare.timed(4, 1, 1.5)
        compare.timed(16, 1, 1.2)
        compare.timed(32, 2, 2.0)
    assert typical_of(compare, 32) == pytest.approx(2.0 / 1.2, rel=1e-3)


# The guard.


class Says:
    """Always one tier, of which it claims what it is told to claim."""

    name, version = "says", "1"

    def __init__(self, num_steps: int, ms: list[float] = MS) -> None:
        ranges = make_policy(f"static:{num_steps}", context()).choose(BatchView(4)).ranges
        self.choice = Choice(ranges, expected_tokens=np.array(TOKENS), expected_ms=np.array(ms))

    def choose(self, batch: BatchView) -> Choice:
        return self.choice

    def observe(self, step: StepObservation) -> None:
        pass

    def forget(self) -> None:
        pass

    def estimates(self) -> dict[str, float]:
        return {}


def context() -> PolicyContext:
    return PolicyContext(ENGINE, np.random.default_rng(0), lambda: 0.0)


ACCEPTED = {0: [0, 0, 0, 0], 1: [1, 1, 0, 0], 3: [2, 2, 0, 0]}


def causes(
    policy: Policy,
    step_ms: Callable[[int, int], float | None],
    steps: int = 2000,
    gap: Callable[[int], dict[str, Any]] = lambda _: {},
    wait_s: Callable[[int], float] = lambda _: 0.0,
) -> list[GuardCause]:
    """Why each decision was made, on an engine whose steps bring ``ACCEPTED``, in times by tier and step.

    ``gap`` is what a step says of what was before it, ``wait_s`` how long that was.
    """
    now_s = 0.0
    guard = Guard(
        GuardConfig(baseline="static:1"), "e", PolicyContext(ENGINE, np.random.default_rng(0), lambda: now_s)
    )
    found, verdict = [], guard.decide(policy, BatchView(4))
    for step_id in range(1, steps + 1):
        now_s += wait_s(step_id)
        tier = verdict.choice.num_steps_for(4)
        fields = {"step_id": step_id, "step_ms": step_ms(tier, step_id), **gap(step_id)}
        step = observed(tier, ACCEPTED[tier], **fields)
        if guard.admit(step, followed=True, reports_dropped=0):
            policy.observe(step)
        verdict = guard.decide(policy, BatchView(4, 400, 100, step_id=step_id))
        found.append(verdict.cause)
    return found


def test_prefills_beside_decode_steps_set_no_good_policy_aside() -> None:
    """Tier 3 is better than the baseline; a step in five takes three times as long, whatever its tier."""

    def step_ms(tier: int, step_id: int) -> float:
        return MS[ENGINE.tiers.index(tier)] * (3.0 if step_id % 5 == 0 else 1.0)

    assert set(causes(Says(3), step_ms)) == {GuardCause.NONE}


GAPS: dict[str, tuple[Callable[[int], dict[str, Any]], float]] = {
    "prefills, of which the steps beside them have no time": (lambda _: {"after_prefill": True}, 0.5),
    "an idle engine": (lambda _: {"after_idle": True, "step_ms": None}, 3600.0),
    "a long queue, whose prefills have step ids of their own": (
        lambda n: {"after_prefill": True, "step_ms": None, "step_id": 1000 * n, "waiting_requests": 500},
        60.0,
    ),
    "steps that were reported late": (lambda n: {"step_id": n + 40 * (n // 5), "step_ms": None}, 9.0),
}
"""What lies before one step in five, and how long it takes; a step after it has no time of its own."""


def timed(tier: int, step_id: int) -> float | None:
    return None if step_id % 5 in (0, 4) else MS[ENGINE.tiers.index(tier)]


@pytest.mark.parametrize("kind", GAPS)
def test_time_between_steps_is_no_time_without_output(kind: str) -> None:
    """Nothing that passes between decode steps is held against a policy that is better than the baseline."""
    gap, seconds = GAPS[kind]
    found = causes(
        Says(3),
        timed,
        gap=lambda n: gap(n) if n % 5 == 0 else {"step_id": n + 40 * (n // 5)} if "late" in kind else {},
        wait_s=lambda n: seconds if n % 5 == 0 else 0.01,
    )
    assert set(found) == {GuardCause.NONE}


@pytest.mark.parametrize("kind", ["prefills, of which the steps beside them have no time", "an idle engine"])
def test_steps_without_a_time_do_not_hide_a_policy_that_falls_short(kind: str) -> None:
    """Tier 3 takes 20 ms where it claims 10; the steps that have a time show it."""
    gap, seconds = GAPS[kind]

    def step_ms(tier: int, step_id: int) -> float | None:
        return None if timed(tier, step_id) is None else (20.0 if tier == 3 else 8.0)

    found = causes(
        Says(3),
        step_ms,
        gap=lambda n: gap(n) if n % 5 == 0 else {},
        wait_s=lambda n: seconds if n % 5 == 0 else 0.01,
    )
    assert GuardCause.OUTPUT_RATE in found[:512]


def test_a_policy_that_hides_how_long_its_tier_takes_is_set_aside() -> None:
    """It claims 10 ms for steps that take 20, in which the baseline would have brought 15 tokens, not 8."""
    found = causes(Says(3), lambda tier, _: 20.0 if tier == 3 else 8.0)
    assert found.index(GuardCause.OUTPUT_RATE) < 256
    assert found.count(GuardCause.OUTPUT_RATE) > 1000


def test_a_profile_of_a_faster_machine_costs_a_good_policy_one_turn() -> None:
    """All steps take 1.5 times what the policy expects; once the baseline was measured too, that is known."""
    found = causes(Says(3), lambda tier, _: 1.5 * MS[ENGINE.tiers.index(tier)])
    assert found.count(GuardCause.OUTPUT_RATE) <= 256


def test_requests_worse_than_the_model_thinks_are_no_fault_of_a_careful_policy() -> None:
    """The guard's own model has never seen a draft accepted or refused: static:0 beside a draft of no use."""
    policy = make_policy("static:0", context())
    guard = Guard(GuardConfig(baseline="static:3"), "e", context())
    verdict = guard.decide(policy, BatchView(4))
    tripped = 0
    for step_id in range(1, 3000):
        tier = verdict.choice.num_steps_for(4)
        guard.admit(
            observed(tier, [0] * 4, step_id=step_id, step_ms=8.0 + tier), followed=True, reports_dropped=0
        )
        verdict = guard.decide(policy, BatchView(4, 400, 100, step_id=step_id))
        tripped += verdict.cause is GuardCause.OUTPUT_RATE
    assert tripped == 0


# A canary.


def test_a_candidate_that_falls_short_ends_the_canary_and_not_the_policy(
    make_info: Callable[..., pb.EngineInfo], make_report: Callable[..., pb.StepReport]
) -> None:
    """The policy is the baseline, static:1; the candidate's tier 5 takes five times as long for as much."""
    info = make_info()
    config = ServeConfig(policy="static:1", guard=GuardConfig(baseline="static:1"))
    engine = Engine(info, check_info(info), config, lambda: 0.0)
    engine.start_canary("static:5", share=0.5, block_steps=16)
    decision = engine.decide()
    for step_id in range(1, 1500):
        assert decision is not None
        tier = decision.num_steps
        report = make_report(
            step_id,
            num_steps=tier,
            accepted_drafts=bytes([0, 1, 1, 1]),
            step_time_us=5000 * max(tier, 1),
            decision_id=decision.decision_id,
        )
        engine.observe(report)
        decision = engine.decide()
        assert decision is not None
        assert decision.guard_cause != pb.GUARD_CAUSE_OUTPUT_RATE
    assert not engine.seat.has_canary
    assert "output rate" in engine.state().canary.ended
    assert engine.guard.trips == 0
    assert engine.policy_text == "static:1"


# An idle engine.


def test_an_idle_engine_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its policy is replaced meanwhile: that one decision is the baseline's, until the next report."""
    caplog.set_level(logging.INFO)
    now_s = 0.0
    guard = Guard(
        GuardConfig(baseline="static:1"),
        "e",
        PolicyContext(ENGINE, np.random.default_rng(0), lambda: now_s),
    )
    policy = Says(3)
    for turn in range(3):
        step = observed(3, ACCEPTED[3], step_id=turn + 1, step_ms=10.0)
        guard.admit(step, followed=True, reports_dropped=0)
        batch = BatchView(4, step_id=turn + 1)
        assert guard.decide(policy, batch).cause is GuardCause.NONE
        now_s += 3600.0
        assert guard.decide(policy, batch).cause is GuardCause.STALE
    assert caplog.records == []
