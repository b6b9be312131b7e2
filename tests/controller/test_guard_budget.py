"""The guard as a whole: losses that its budget refuses, and switches that are too many."""

from __future__ import annotations

import numpy as np
from guard_bench import ENGINE, TOKENS, Bench, choice

from specgov.controller.fallback import Fallback
from specgov.controller.guard.causes import GuardCause
from specgov.policies.types import BatchView, Choice, Reason

# Budget.


def test_losses_are_allowed_up_to_the_allowance_and_then_refused() -> None:
    """Each step at tier 3 loses 4 tokens; after three of them 12 are gone, and a fourth would need 16."""
    bench = Bench(wants=3, allowance_tokens=15.0, loss_share=0.0)
    causes = [bench.newest.cause, *bench.steps(4)]
    assert causes == [GuardCause.NONE] * 3 + [GuardCause.BUDGET] * 2
    assert (bench.tier, bench.newest.cause.reason) == (1, Reason.GUARD)
    assert bench.newest.choice.expected_tokens is TOKENS  # the decision still says what was expected
    assert bench.newest.choice.propensity is None
    state = bench.guard.state()
    assert (state.budget_tokens, state.estimated_gain_tokens) == (3.0, -12.0)
    assert bench.guard.interventions == {GuardCause.BUDGET: 2}


def test_the_share_lets_a_losing_policy_try_now_and_then() -> None:
    """A step at tier 3 costs 4 tokens less 1/8 of the 12 that the baseline would have brought: 2.5.

    One at the baseline, tier 1, brings 1/8 of 6: 0.75. So after 3 - 2.5 it takes three steps to have 2.75,
    then three to have 2.5 and pay all of it, and then four.
    """
    bench = Bench(wants=3, allowance_tokens=3.0, loss_share=0.125)
    ran = []
    for _ in range(14):
        ran.append(bench.tier)
        bench.step()
    assert ran == [3, 1, 1, 1, 3, 1, 1, 1, 3, 1, 1, 1, 1, 3]


def test_a_step_that_followed_the_engines_own_rule_costs_the_policy_nothing() -> None:
    bench = Bench(wants=3, allowance_tokens=5.0, loss_share=0.0)
    assert bench.steps(50, followed=False) == [GuardCause.NONE] * 50


def test_a_policy_without_a_model_is_judged_by_the_guards_own() -> None:
    """Nothing is ever accepted, and tier 3 costs twice the time: the guard's model learns that."""
    bench = Bench(wants=3, baseline="static:0", allowance_tokens=50.0, zero_acceptance_requests=10**6)
    bench.rule.choice = choice(3, tokens=None, ms=None)
    causes = bench.steps(400, accepted=0)
    assert causes.count(GuardCause.BUDGET) + causes.count(GuardCause.OUTPUT_RATE) > 200


def test_a_policy_that_is_the_baseline_needs_no_model() -> None:
    bench = Bench()
    bench.rule.choice = choice(1, tokens=None, ms=None)
    assert bench.steps(10) == [GuardCause.NONE] * 10
    assert bench.guard.state().estimated_baseline_tokens == 6.0  # of the step before that choice


def test_what_is_measured_counts_and_not_what_was_promised() -> None:
    """It claims 16 tokens for tier 3, so a gain of 4 over the baseline's 12; the step brings 8, a loss of 4.

    That is 2.5 beyond 1/8 of the baseline's, and from the first step on what counts, whatever it claims. Two
    are paid, and then the baseline has to bring 1/8 of 6 tokens twice before there is enough for another.
    """
    bench = Bench(allowance_tokens=6.0, loss_share=0.125)
    bench.rule.choice = choice(3, tokens=np.array([4.0, 6.0, 16.0]))
    bench.decide()
    budget = []
    for _ in range(5):
        budget.append((bench.step().cause, bench.guard.budget_tokens))
    no, refused = GuardCause.NONE, GuardCause.BUDGET
    assert budget == [(no, 3.5), (refused, 1.0), (refused, 1.75), (no, 2.5), (refused, 0.0)]


# Switches.


def test_thrashing_is_refused_and_the_tier_kept() -> None:
    """Two switches in a hundred steps; the third choice is kept out, whatever it is."""
    bench = Bench(wants=1, most_switches=2, switch_window_steps=100)
    seen = []
    for wants in (3, 1, 3, 1, 0):
        bench.rule.choice = choice(wants)
        seen.append((bench.step().cause, bench.tier))
    no, thrashing = GuardCause.NONE, GuardCause.THRASHING
    assert seen == [(no, 3), (no, 1), (thrashing, 1), (no, 1), (thrashing, 1)]
    assert thrashing.reason is Reason.GUARD


def test_a_tier_that_is_kept_has_to_be_paid_too() -> None:
    """Tier 3 loses 4 of 9 tokens a step: kept for want of a switch it is paid once more, and then no longer.

    The baseline takes its place, and is what is kept from then on.
    """
    bench = Bench(wants=1, most_switches=1, switch_window_steps=10_000, allowance_tokens=9.0, loss_share=0.0)
    bench.rule.choice = choice(3)
    bench.step()
    bench.rule.choice = choice(0)
    assert bench.steps(3) == [GuardCause.THRASHING, GuardCause.BUDGET, GuardCause.THRASHING]
    assert bench.tier == 1


def test_the_baseline_itself_is_never_refused() -> None:
    """A batch size that crosses its threshold at every step is no fault of the policy's."""
    bench = Bench(baseline="threshold:4:3", most_switches=1, switch_window_steps=10_000)
    bench.rule.choice = Choice(bench.guard.baseline.ranges, propensity=1.0)
    sizes = (3, 4) * 10
    verdicts = [bench.guard.decide(bench.rule, BatchView(b, step_id=i)) for i, b in enumerate(sizes)]
    assert {verdict.cause for verdict in verdicts} == {GuardCause.NONE}


def test_what_stands_in_for_a_failed_policy_costs_the_next_one_nothing() -> None:
    bench = Bench(wants=1, allowance_tokens=9.0, loss_share=0.0)
    bench.step()
    bench.rule.choice = Fallback(ENGINE).choose(BatchView(4))
    assert bench.steps(10) == [GuardCause.POLICY_FAILED] * 10
    assert bench.guard.budget_tokens == 9.0
