"""The guard's parts, each alone: budget, switches, output rate, backoff, latency targets, step times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.controller.guard.backoff import Backoff
from specgov.controller.guard.budget import Budget
from specgov.controller.guard.config import LatencyTargets
from specgov.controller.guard.estimates import Estimates
from specgov.controller.guard.latency import Latency
from specgov.controller.guard.losses import Loss, Record
from specgov.controller.guard.output_rate import OutputRate
from specgov.controller.guard.step_times import StepTimes
from specgov.controller.guard.switching import Switching

# Budget. Numbers are exact in binary where they are compared exactly: shares of 1/4, whole tokens.


def loss(tokens: float, baseline_tokens: float) -> Loss:
    """Of a tier that never ran and is not doubted."""
    return Loss(2, 1, tokens, baseline_tokens, 0.0, Record())


def test_budget_pays_losses_and_takes_in_a_share_of_the_baselines_output() -> None:
    budget = Budget(allowance_tokens=10.0, loss_share=0.25, lag_steps=1)
    budget.made(loss_tokens=6.0, baseline_tokens=8.0)
    assert budget.tokens == 10.0 - 6.0 + 2.0
    assert (budget.gain_tokens, budget.baseline_tokens) == (-6.0, 8.0)


def test_budget_refuses_what_it_cannot_pay() -> None:
    budget = Budget(allowance_tokens=10.0, loss_share=0.25, lag_steps=1)
    assert budget.affords(loss(12.0, 8.0))  # 12 - 2 is all there is
    assert not budget.affords(loss(12.5, 8.0))
    budget.made(12.0, 8.0)
    assert budget.tokens == 0.0
    assert budget.affords(loss(2.0, 8.0))  # within the share
    assert not budget.affords(loss(2.5, 8.0))


def test_gains_fill_the_budget_up_to_the_allowance_and_no_further() -> None:
    budget = Budget(allowance_tokens=10.0, loss_share=0.0, lag_steps=1)
    budget.made(6.0, 8.0)
    budget.made(-100.0, 8.0)
    assert budget.tokens == 10.0
    assert budget.gain_tokens == 94.0


def test_what_is_under_way_is_paid_in_advance() -> None:
    """With a lag of 3 two decided steps are not known yet when the next is decided."""
    budget = Budget(allowance_tokens=10.0, loss_share=0.0, lag_steps=3)
    budget.decided(loss(4.0, 8.0))
    budget.decided(loss(4.0, 8.0))
    assert budget.affords(loss(2.0, 8.0))
    assert not budget.affords(loss(2.5, 8.0))
    budget.decided(loss(-1.0, 8.0))  # the first is made by now; a gain is not counted before it is made
    assert budget.affords(loss(6.0, 8.0))


def test_what_is_under_way_counts_as_it_is_known_now() -> None:
    """A gain of 1 was promised of both steps; a third one was measured to lose 4 of 8 tokens meanwhile."""
    budget = Budget(allowance_tokens=10.0, loss_share=0.0, lag_steps=3)
    promised = loss(-1.0, 8.0)
    budget.decided(promised)
    budget.decided(promised)
    assert budget.affords(loss(10.0, 8.0))
    promised.record.took(0.5)
    assert budget.affords(loss(2.0, 8.0))
    assert not budget.affords(loss(2.5, 8.0))


def test_what_may_be_more_is_charged_and_is_no_loss() -> None:
    budget = Budget(allowance_tokens=10.0, loss_share=0.0, lag_steps=1)
    budget.made(2.0, 8.0, doubt_tokens=3.0)
    assert (budget.tokens, budget.gain_tokens, budget.baseline_tokens) == (5.0, -2.0, 8.0)


def test_the_luck_of_single_steps_is_kept_in_reserve() -> None:
    """Steps that lost 3 more and 4 fewer tokens than such steps do: together 5, and 10 are held back."""
    budget = Budget(allowance_tokens=100.0, loss_share=0.0, lag_steps=1)
    budget.made(20.0, 40.0, chance_tokens=3.0)
    budget.made(20.0, 40.0, chance_tokens=-4.0)
    assert budget.tokens == 60.0
    assert budget.affords(loss(50.0 - 0.01, 40.0))  # forgetting makes it a little less than 10
    assert not budget.affords(loss(50.0 + 0.01, 40.0))
    budget.made(-100.0, 40.0, chance_tokens=3.0)  # full again: a stretch begins anew
    assert budget.affords(loss(100.0, 40.0))


# Records and losses.


def test_a_record_follows_what_steps_lost() -> None:
    """The mean moves by a quarter of the distance; the first step is the mean."""
    record = Record()
    assert record.share is None
    assert (record.took(0.5), record.share) == (0.0, 0.5)
    assert (record.took(-0.5), record.share) == (-1.0, 0.25)


def test_the_most_that_a_step_may_lose() -> None:
    """8 of 40 expected tokens; with a doubt of ln 1.5 / 2 the baseline may bring half as much again: 28."""
    record = Record()
    assert Loss(2, 1, 8.0, 40.0, 0.0, record).most_tokens() == 8.0
    doubtful = Loss(2, 1, 8.0, 40.0, math.log(1.5) / 2, record)
    assert doubtful.most_tokens() == pytest.approx(28.0)
    assert Loss(1, 1, 0.0, 40.0, math.log(1.5) / 2, record).most_tokens() == 0.0
    record.took(0.9)  # whatever is expected: of late such steps lost nine tenths
    assert doubtful.most_tokens() == pytest.approx(36.0)


steps = st.lists(st.tuples(st.floats(-50, 50), st.floats(0, 50)), max_size=60)


@given(steps, st.floats(0, 100), st.floats(0, 1), st.integers(1, 5))
def test_no_stretch_of_steps_loses_more_than_allowance_and_share(
    wanted: list[tuple[float, float]], allowance: float, share: float, lag: int
) -> None:
    """Whatever a policy wants, decided a lag before it is made; a step that is refused loses nothing."""
    budget = Budget(allowance, share, lag)
    under_way: list[tuple[float, float]] = []
    beyond, least, worst = 0.0, 0.0, 0.0
    for lost, baseline in [*wanted, *[(0.0, 0.0)] * lag]:
        step = (lost, baseline) if budget.affords(loss(lost, baseline)) else (0.0, baseline)
        budget.decided(loss(*step))
        under_way.append(step)
        if len(under_way) >= lag:
            made = under_way.pop(0)
            budget.made(*made)
            beyond += made[0] - share * made[1]
            least = min(least, beyond)
            worst = max(worst, beyond - least)
            assert budget.tokens >= -1e-9
    assert worst <= allowance + 1e-9


# Switches of tier.


def test_switches_within_the_window_are_limited() -> None:
    """Two switches in ten steps: the third has to wait until the first is ten steps ago."""
    switching = Switching(most_switches=2, window_steps=10, dwell_steps=1)
    for step_id, num_steps in ((1, 3), (2, 0), (4, 3)):  # the first decision is no switch
        assert switching.allows(num_steps, step_id)
        switching.decided(num_steps, step_id)
    assert not switching.allows(0, 5)
    assert switching.allows(3, 5)  # staying is no switch
    assert not switching.allows(0, 11)
    assert switching.allows(0, 12)


def test_a_tier_is_kept_for_the_dwell() -> None:
    switching = Switching(most_switches=100, window_steps=100, dwell_steps=4)
    switching.decided(0, 1)
    switching.decided(3, 2)
    assert [step_id for step_id in range(2, 9) if switching.allows(0, step_id)] == [6, 7, 8]


def test_after_a_restart_steps_count_anew() -> None:
    switching = Switching(most_switches=1, window_steps=1000, dwell_steps=1)
    switching.decided(0, 500)
    switching.decided(3, 501)
    assert not switching.allows(0, 502)
    switching.restart()
    assert switching.allows(0, 1)


# Backoff.


def test_waits_double_up_to_the_limit_and_halve_down_to_the_first() -> None:
    backoff = Backoff(first_steps=2, largest_steps=8)
    waits = []
    for _ in range(4):
        backoff.fail()
        waits.append(backoff.left_steps)
    assert waits == [2, 4, 8, 8]
    for _ in range(3):
        backoff.step()
    assert backoff.left_steps == 5
    backoff.succeed()
    backoff.fail()
    assert backoff.left_steps == 4
    for _ in range(9):
        backoff.step()
    assert (backoff.left_steps, backoff.failures) == (0, 5)


# Output rate. A window of 32 steps is looked at every 4 steps; the first 8 steps of a policy do not count.


def rate(margin: float = 0.1) -> OutputRate:
    return OutputRate(32, margin, Backoff(100, 1000))


def test_a_policy_trips_once_it_is_short_by_the_margin_of_a_whole_window() -> None:
    """A tenth of 32 steps at 100 are 320 tokens: 20 short a step, passed at the 17th and seen at the 20th."""
    judge = rate()
    trips = [judge.measure(output_tokens=80.0, baseline_tokens=100.0) for _ in range(8 + 20)]
    assert trips == [False] * 27 + [True]
    assert judge.backoff.left_steps == 100


def test_less_than_the_margin_is_no_reason() -> None:
    judge = rate()
    assert not any(judge.measure(91.0, 100.0) for _ in range(200))
    assert judge.backoff.failures == 0


def test_what_may_be_chance_is_no_reason() -> None:
    """Steps that bring 100 or 10 in turn: 45 short a step in the mean, with a deviation of as much.

    After n steps the sum is 45 n with a standard deviation of 45 sqrt(n): five of those are passed at n = 28,
    the first look beyond 25.
    """
    judge = rate()
    trips = [judge.measure((100.0, 10.0)[step % 2], 100.0) for step in range(8 + 32)]
    assert trips.index(True) == 8 + 28 - 1


def test_doubts_count_for_the_steps_that_had_them() -> None:
    """Eight steps of which the estimate knew little, then some of which it knows all, and none is short."""
    judge = rate()
    for _ in range(8):  # not judged
        judge.measure(100.0, 100.0)
    assert not any(judge.measure(20.0, 100.0, doubt_tokens=50.0) for _ in range(8))
    assert not any(judge.measure(100.0, 100.0) for _ in range(24))
    assert judge.backoff.failures == 0


def test_another_policy_begins_anew() -> None:
    judge = rate()
    for _ in range(12):
        judge.measure(0.0, 100.0)
    assert judge.backoff.left_steps == 100
    judge.begin_anew()
    assert judge.backoff.left_steps == 0
    assert [judge.measure(0.0, 100.0) for _ in range(12)] == [False] * 11 + [True]
    assert judge.backoff.left_steps == 100  # not doubled


# Latency. Batch of 4; tiers 0, 1, 3 take 10, 12, 20 ms and bring 4, 6, 8 tokens: the mean time per output
# token is 10 * 4 / 4 = 10, 12 * 4 / 6 = 8 and 20 * 4 / 8 = 10 ms; rates are 0.4, 0.5 and 0.4 a ms.

ESTIMATES = Estimates(4, [4.0, 6.0, 8.0], [10.0, 12.0, 20.0])


def test_mean_time_per_output_token() -> None:
    latency = Latency(LatencyTargets(tpot_mean_ms=8.0))
    assert latency.excess(ESTIMATES) == [1.25, 1.0, 1.25]
    assert latency.instead(ESTIMATES, latency.excess(ESTIMATES)) == 1


def test_p99_is_that_of_a_request_with_no_draft_accepted() -> None:
    """One token a step, and steps up to 1.1 times slower than expected at first."""
    latency = Latency(LatencyTargets(tpot_p99_ms=11.0))
    assert latency.excess(ESTIMATES) == pytest.approx([1.0, 1.2, 2.0])


def test_p99_follows_how_steps_scatter() -> None:
    """The ratio settles where one step in a hundred lies above: each moves it up 99 times as far as down."""
    latency = Latency(LatencyTargets(tpot_p99_ms=10.0))
    for step in range(20_000):
        latency.observe(1.0 + (step * 37 % 1000) / 1000)  # evenly in 1..2: the percentile is 1.99
    assert latency.excess(ESTIMATES)[0] == pytest.approx(1.99, abs=0.05)


def test_where_no_tier_keeps_the_target_the_nearest_is_used() -> None:
    latency = Latency(LatencyTargets(tpot_mean_ms=1.0))
    excess = latency.excess(ESTIMATES)
    assert min(excess) > 1
    assert latency.instead(ESTIMATES, excess) == 1  # 8 ms are nearest to 1 ms


def test_of_those_that_keep_it_the_fastest_is_used() -> None:
    latency = Latency(LatencyTargets(tpot_p99_ms=13.5))  # 11 and 13.2 keep it, 22 does not
    assert latency.instead(ESTIMATES, latency.excess(ESTIMATES)) == 1


# Step times.


def learnt(factor: float = 10.0, believed_after: int = 20) -> StepTimes:
    times = StepTimes(factor, believed_after)
    for _ in range(8):
        assert not times.jumps(4, 3, 10.0)
    return times


def test_first_steps_are_what_is_usual() -> None:
    """Also where they differ wildly: nothing is known to compare with."""
    times = StepTimes(10.0, 20)
    assert not any(times.jumps(4, 3, ms) for ms in (1.0, 1000.0, 1.0, 1000.0, 1.0, 1000.0, 1.0, 1000.0))


def test_a_first_step_that_compiles_does_not_spoil_what_is_usual() -> None:
    """5 s and seven times 10 ms have the geometric mean of 21.7 ms."""
    times = StepTimes(10.0, 20)
    times.jumps(4, 3, 5000.0)
    assert not any(times.jumps(4, 3, 10.0) for _ in range(20))


@pytest.mark.parametrize(("step_ms", "jumps"), [(99.0, False), (101.0, True), (1.01, False), (0.99, True)])
def test_jumps_are_by_more_than_the_factor_either_way(step_ms: float, jumps: bool) -> None:
    assert learnt().jumps(4, 3, step_ms) is jumps


def test_kinds_are_apart() -> None:
    """Another octave of batch sizes or another tier has its own usual time; 4..7 is one octave."""
    times = learnt()
    assert times.jumps(7, 3, 1000.0)
    assert not times.jumps(8, 3, 1000.0)
    assert not times.jumps(4, 0, 1000.0)


def test_a_single_stall_moves_nothing_and_alarms_nobody() -> None:
    times = learnt()
    assert times.jumps(4, 3, 5000.0)
    assert not times.alarming
    assert not times.jumps(4, 3, 99.0)  # would be one above had the stall moved the usual time


def test_three_jumps_are_alarming_unless_sixteen_sound_steps_lie_between() -> None:
    times = learnt()
    for _ in range(3):
        times.jumps(4, 3, 5000.0)
    assert times.alarming
    times = learnt()
    for _ in range(10):
        times.jumps(4, 3, 5000.0)
        for _ in range(16):
            times.jumps(4, 3, 10.0)
    assert not times.alarming


def test_many_jumps_in_a_row_are_the_new_usual() -> None:
    times = learnt(believed_after=20)
    assert [times.jumps(4, 3, 5000.0) for _ in range(40)] == [True] * 20 + [False] * 20
    assert not times.alarming


def test_the_usual_time_follows() -> None:
    times = learnt()
    for step in range(200):
        assert not times.jumps(4, 3, 10.0 * math.exp(step / 40))  # to 148 times as much, slowly
