"""The guard as a whole: latency targets."""

from __future__ import annotations

from guard_bench import MS, TOKENS, Bench, choice

from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.config import GuardConfig, LatencyTargets
from specgov.controller.validation import Cause
from specgov.policies.types import BatchView, Choice, Reason, TierRange
from specgov.proto.v1 import specgov_pb2 as pb


def test_tiers_that_break_a_target_are_replaced_in_every_range() -> None:
    """8 ms a step for 1.5 tokens a request are 5.3 ms a token at tier 1; 8 and 8 ms at tiers 0 and 3."""
    bench = Bench(wants=3, tpot_mean_ms=6.0)
    bench.rule.choice = Choice(
        (TierRange(1, 3, 1), TierRange(4, 9, 3), TierRange(10, 64, 0)),
        expected_tokens=TOKENS,
        expected_ms=MS,
    )
    verdict = bench.step()
    assert verdict.cause is GuardCause.LATENCY
    assert verdict.cause.reason is Reason.GUARD
    assert verdict.choice.ranges == (TierRange(1, 64, 1),)


def test_a_target_binds_the_baseline_too_and_costs_the_policy_no_budget() -> None:
    """Steps may take 8.8 / 1.1 = 8 ms: tiers 0 and 1, of which 1 is faster. The baseline would be tier 3."""
    bench = Bench(wants=3, baseline="static:3", tpot_p99_ms=8.8, allowance_tokens=0.0, loss_share=0.0)
    bench.steps(10)
    assert (bench.newest.cause, bench.tier) == (GuardCause.LATENCY, 1)
    bench.guard.rejected(Cause.IMPOSSIBLE_COUNT, pb.StepReport())
    bench.step()
    assert (bench.newest.cause, bench.tier) == (GuardCause.IMPOSSIBLE_REPORT, 1)


def test_a_target_binds_a_policy_that_is_the_baseline() -> None:
    """No step takes a microsecond: the shortest, at tier 0, is the nearest to it."""
    bench = Bench(wants=3, baseline="static:3", tpot_p99_ms=1e-3)
    bench.rule.choice = choice(3, tokens=None, ms=None)
    assert (bench.step().cause, bench.tier) == (GuardCause.LATENCY, 0)


def test_a_target_holds_for_the_batch_that_is_there_while_the_policy_is_not_asked() -> None:
    """At the alarm it was one request, for which tier 3 keeps the target; then there are 64."""
    bench = Bench(wants=3, baseline="static:3", tpot_p99_ms=16.0 * 1.1)
    bench.rule.choice = choice(3, TOKENS / 4, MS)
    assert bench.guard.decide(bench.rule, BatchView(1)).choice.num_steps_for(1) == 3
    bench.guard.rejected(Cause.IMPOSSIBLE_COUNT, pb.StepReport())
    assert bench.guard.decide(bench.rule, BatchView(1)).choice.num_steps_for(1) == 3
    expected = bench.guard._accounts._estimator.own(BatchView(64))
    assert bench.guard.decide(bench.rule, BatchView(64)).cause is GuardCause.IMPOSSIBLE_REPORT
    assert bench.guard._accounts.estimates is expected


def test_targets_by_engine() -> None:
    config = GuardConfig(tpot_mean_ms=5.0, engines={"engine-2": LatencyTargets(tpot_p99_ms=9.0)})
    assert config.targets("engine-1").tpot_mean_ms == 5.0
    assert config.targets("engine-2") == LatencyTargets(tpot_p99_ms=9.0)  # in place of both
