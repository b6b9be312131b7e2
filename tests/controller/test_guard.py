"""The guard as a whole: in what order its rules speak, what it sends, and what it says of it."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from guard_bench import Bench, choice

from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.guard import Verdict
from specgov.controller.guard.guarded import Guarded
from specgov.controller.validation import MAX_STEP_MS, Cause
from specgov.policies.types import BatchView, Choice, PolicyError, Reason, TierRange
from specgov.proto.v1 import specgov_pb2 as pb

# What passes.


def test_a_good_choice_passes_as_it_is() -> None:
    bench = Bench()
    assert bench.step() == Verdict(bench.rule.choice, GuardCause.NONE)
    assert bench.newest.choice is bench.rule.choice
    assert bench.rule.observed == [1]


def test_nothing_is_touched_while_it_is_off() -> None:
    bench = Bench(wants=3, enabled=False, allowance_tokens=0.0, loss_share=0.0, tpot_mean_ms=1.0)
    bench.guard.rejected(Cause.IMPOSSIBLE_COUNT, pb.StepReport())
    bench.now_s += 1e9
    assert bench.steps(100) == [GuardCause.NONE] * 100
    assert len(bench.rule.observed) == 100
    assert bench.guard.state().enabled is False


@pytest.mark.parametrize(
    "ranges",
    [(), (TierRange(1, 64, 2),), (TierRange(1, 8, 1), TierRange(8, 64, 3)), (TierRange(9, 8, 1),)],
    ids=["none", "unknown tier", "overlap", "backwards"],
)
def test_what_the_engine_cannot_do_is_refused(ranges: tuple[TierRange, ...]) -> None:
    bench = Bench()
    bench.rule.choice = Choice(ranges)
    with pytest.raises(PolicyError, match="policy wants chose"):
        bench.decide()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_estimates_that_are_no_numbers_are_refused(bad: float) -> None:
    bench = Bench()
    bench.rule.choice = choice(1, tokens=np.array([4.0, bad, 8.0]))
    with pytest.raises(PolicyError, match="cannot be"):
        bench.decide()
    bench.rule.choice = choice(1, ms=np.array([0.0, 8.0, 16.0]))
    with pytest.raises(PolicyError, match="cannot be"):
        bench.decide()


@pytest.mark.parametrize("propensity", [np.nan, -0.1, 1.1])
def test_a_probability_that_is_none_is_refused(propensity: float) -> None:
    bench = Bench()
    bench.rule.choice = replace(choice(1), propensity=propensity)
    with pytest.raises(PolicyError, match="as a probability"):
        bench.decide()


# Alarms and age.


def test_an_alarm_sends_the_baseline_learns_nothing_and_ends() -> None:
    bench = Bench(wants=3)
    bench.guard.rejected(Cause.IMPOSSIBLE_COUNT, pb.StepReport())
    asked = bench.rule.asked
    assert bench.steps(4) == [GuardCause.IMPOSSIBLE_REPORT] * 4
    assert (bench.tier, bench.newest.cause.reason) == (1, Reason.FALLBACK)
    assert (bench.rule.asked, bench.rule.observed) == (asked, [])
    state = bench.guard.state()
    assert (state.standing_cause, state.clears_after_steps) == (pb.GUARD_CAUSE_IMPOSSIBLE_REPORT, 1)
    assert not state.learning
    assert bench.steps(2) == [GuardCause.NONE] * 2
    assert bench.rule.observed == [6]
    assert bench.guard.alarms == {GuardCause.IMPOSSIBLE_REPORT: 1}


@pytest.mark.parametrize(
    ("cause", "report", "alarm"),
    [
        (Cause.IMPOSSIBLE_COUNT, pb.StepReport(), GuardCause.IMPOSSIBLE_REPORT),
        (Cause.NOT_A_NUMBER, pb.StepReport(), GuardCause.IMPOSSIBLE_REPORT),
        (Cause.OUT_OF_RANGE, pb.StepReport(step_time_valid=True), GuardCause.STEP_TIME),
        (
            Cause.OUT_OF_RANGE,  # a negative time in an unsigned field
            pb.StepReport(step_time_valid=True, step_time_us=2**32 - 1),
            GuardCause.STEP_TIME,
        ),
        (
            Cause.OUT_OF_RANGE,
            pb.StepReport(step_time_valid=True, step_time_us=int(MAX_STEP_MS * 1000)),
            GuardCause.IMPOSSIBLE_REPORT,
        ),
        (Cause.STEP_ID_NOT_NEW, pb.StepReport(), GuardCause.NONE),
        (Cause.UNKNOWN_TIER, pb.StepReport(), GuardCause.NONE),
    ],
)
def test_which_rejected_reports_alarm(cause: Cause, report: pb.StepReport, alarm: GuardCause) -> None:
    bench = Bench()
    bench.guard.rejected(cause, report)
    assert bench.guard.standing is alarm


def test_a_useless_draft_gets_the_smallest_tier_and_probes_and_no_other_choice() -> None:
    """Also where the baseline would speculate; probes are at the smallest tier above 0."""
    bench = Bench(wants=3, baseline="static:3", zero_acceptance_requests=40, first_backoff_steps=20)
    assert bench.steps(9, accepted=0) == [GuardCause.NONE] * 9  # 36 requests
    ran = [bench.step(accepted=0).choice.num_steps_for(4) for _ in range(200)]
    assert ran[:20] == [0] * 20
    assert set(ran) == {0, 1}
    assert ran.count(1) == 4 * 3  # after 20, 40 and 80 steps
    assert bench.guard.alarms == {GuardCause.ZERO_ACCEPTANCE: 1}
    while bench.tier == 0:
        bench.step(accepted=0)
    bench.step(accepted=1)  # the draft is of use again
    assert (bench.newest.cause, bench.tier) == (GuardCause.NONE, 3)


def test_an_old_batch_is_not_decided_on() -> None:
    bench = Bench(wants=3, stale_s=10.0)
    bench.step()
    bench.now_s += 10.5
    assert bench.decide().cause is GuardCause.STALE
    assert bench.tier == 1
    assert bench.guard.state().silent_s == pytest.approx(10.5)
    assert bench.step().cause is GuardCause.NONE  # a report came


# Output rate.


def test_a_policy_that_promises_more_than_it_brings_loses_its_turn_again_and_again() -> None:
    """It claims 16 tokens for tier 3, which brings 8: half of what the baseline would have."""
    lies = choice(3, tokens=np.array([4.0, 6.0, 16.0]))
    bench = Bench(rate_window_steps=32, first_backoff_steps=50, largest_backoff_steps=100)
    bench.rule.choice = lies
    causes = bench.steps(400)
    assert bench.guard.trips >= 3
    turns = [cause for before, cause in zip([None, *causes], causes, strict=False) if before is not cause]
    assert turns[:4] == [GuardCause.NONE, GuardCause.OUTPUT_RATE] * 2
    first = causes.index(GuardCause.OUTPUT_RATE)
    second = causes.index(GuardCause.NONE, first)
    assert second - first == 50
    assert bench.rule.observed == list(range(1, 401))  # it learns on: nothing is wrong with the signals
    assert 4000 < bench.guard.budget_tokens < 5000
    bench.guard.policy_changed()
    assert bench.guard.standing is GuardCause.NONE


# What is said.


def test_one_line_for_many_interventions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(wants=3, allowance_tokens=0.0, loss_share=0.0)
    bench.steps(500)  # five seconds
    lines = [record.getMessage() for record in caplog.records if "'budget'" in record.getMessage()]
    assert len(lines) == 1
    bench.now_s += 60
    bench.step()
    lines = [record.getMessage() for record in caplog.records if "'budget'" in record.getMessage()]
    assert len(lines) == 2
    assert "'times': 501" in lines[1]


def test_causes_are_those_of_the_wire() -> None:
    wire = {name.removeprefix("GUARD_CAUSE_"): number for name, number in pb.GuardCause.items()}
    assert {cause.name: cause.value for cause in GuardCause} == {
        "NONE": wire.pop("UNSPECIFIED"),
        **wire,
    }


def test_guarded_is_one_rule() -> None:
    bench = Bench(wants=3, allowance_tokens=0.0, loss_share=0.0)
    rule = Guarded(bench.rule, bench.guard)
    chosen = rule.choose(BatchView(4))
    assert (chosen.num_steps_for(4), chosen.reason, rule.cause) == (1, Reason.GUARD, GuardCause.BUDGET)
    rule.forget()
    assert bench.rule.forgot == 1
