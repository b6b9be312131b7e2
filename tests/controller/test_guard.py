"""The guard as a whole: in what order its rules speak, what it sends, and what it says of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from specgov.controller.config import ConfigError, load_config
from specgov.controller.fallback import Fallback
from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.config import GuardConfig, LatencyTargets
from specgov.controller.guard.guard import Guard, Verdict
from specgov.controller.guard.guarded import Guarded
from specgov.controller.validation import MAX_STEP_MS, Cause
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    PolicyContext,
    PolicyError,
    Reason,
    StepObservation,
    TierRange,
)
from specgov.proto.v1 import specgov_pb2 as pb

ENGINE = EngineSpec(tiers=(0, 1, 3), max_running_requests=64, decision_lag_steps=1)
TOKENS, MS = np.array([4.0, 6.0, 8.0]), np.array([8.0, 8.0, 16.0])
"""A batch of 4: tier 1 brings 0.75 tokens a ms, tiers 0 and 3 bring 0.5. Beside tier 1 as the baseline a step
at tier 0 loses 2 of 6 tokens, and one at tier 3 loses 4 of 12."""
ACCEPTED = {0: (0, 0, 0, 0), 1: (1, 1, 0, 0), 3: (2, 2, 0, 0)}


def choice(num_steps: int, tokens: Any = TOKENS, ms: Any = MS, **changes: Any) -> Choice:
    ranges = tier_ranges(ENGINE, [(1, num_steps)])
    return Choice(ranges, propensity=1.0, expected_tokens=tokens, expected_ms=ms, **changes)


@dataclass
class Wants:
    """A rule that chooses what the test says."""

    name: ClassVar[str] = "wants"
    version: ClassVar[str] = "1"

    choice: Choice
    observed: list[int] = field(default_factory=list)
    asked: int = 0
    forgot: int = 0

    def choose(self, batch: BatchView) -> Choice:
        self.asked += 1
        return self.choice

    def observe(self, step: StepObservation) -> None:
        self.observed.append(step.step_id)

    def forget(self) -> None:
        self.forgot += 1

    def estimates(self) -> dict[str, float]:
        return {}


class Bench:
    """A guarded rule on an engine that follows its decisions; steps bring what ``TOKENS`` and ``MS`` say."""

    def __init__(self, wants: int = 1, **config: Any) -> None:
        self.now_s = 0.0
        self.step_id = 0
        fields = {"baseline": "static:1", "clear_steps": 5, **config}
        context = PolicyContext(ENGINE, np.random.default_rng(0), lambda: self.now_s)
        self.rule = Wants(choice(wants))
        self.guard = Guard(GuardConfig(**fields), "engine-1", context)
        self.newest: Verdict = self.decide()

    def decide(self) -> Verdict:
        self.newest = self.guard.decide(self.rule, BatchView(4, step_id=self.step_id))
        return self.newest

    @property
    def tier(self) -> int:
        return self.newest.choice.num_steps_for(4)

    def step(self, accepted: int | None = None, step_ms: float | None = None, **changes: Any) -> Verdict:
        """A step at the newest decision's tier, with so many drafts a request, and the next decision."""
        self.step_id += 1
        self.now_s += 0.01
        tier = self.tier
        seen = StepObservation(
            self.step_id,
            4,
            tier,
            np.array(ACCEPTED[tier] if accepted is None else [accepted] * 4, np.uint8),
            np.zeros(0, np.uint16),
            np.zeros(0, np.uint8),
            400,
            100,
            step_ms=MS[(0, 1, 3).index(tier)] if step_ms is None else step_ms,
        )
        followed = changes.get("followed", True)
        if self.guard.admit(seen, followed=followed, reports_dropped=changes.get("reports_dropped", 0)):
            self.rule.observe(seen)
        return self.decide()

    def steps(self, count: int, **changes: Any) -> list[GuardCause]:
        """The causes of so many decisions."""
        return [self.step(**changes).cause for _ in range(count)]


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


# Latency.


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


# Configuration.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('baseline = "greedy"', "guard.baseline: the baseline must depend on the batch size alone"),
        ('baseline = "static:x"', "guard.baseline: policy 'static:x'"),
        ("loss_share = 1.5", "guard.loss_share"),
        ("allowance = 1", "guard.allowance: unknown key: there are tpot_mean_ms,"),
        ("tpot_mean_ms = nan", "guard.tpot_mean_ms"),
        ("first_backoff_steps = 9\nlargest_backoff_steps = 8", "first_backoff_steps 9 is above"),
        ("[guard.engines.a]\ntpot = 1", "guard.engines.a.tpot: unknown key: there are tpot_mean_ms,"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Any, text: str, says: str) -> None:
    path = tmp_path / "specgov.toml"
    path.write_text(f"[guard]\n{text}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert says in str(error.value)
    assert str(error.value).startswith(f"{path}")


def test_a_baseline_that_the_engine_cannot_do_says_whose_it_is() -> None:
    context = PolicyContext(ENGINE, np.random.default_rng(0), lambda: 0.0)
    with pytest.raises(PolicyError, match=r"guard\.baseline: .* no tier 5"):
        Guard(GuardConfig(baseline="static:5"), "e", context)


@pytest.mark.parametrize(
    ("tiers", "baseline"),
    [((0, 1, 3, 5), "threshold:32:3"), ((0, 2, 7), "threshold:32:2"), ((1, 5), "schedule:1=1:32=1")],
)
def test_the_default_baseline_fits_every_engine(tiers: tuple[int, ...], baseline: str) -> None:
    context = PolicyContext(EngineSpec(tiers), np.random.default_rng(0), lambda: 0.0)
    guard = Guard(GuardConfig(), "e", context)
    assert guard.baseline_text == baseline
    assert guard.baseline.num_steps_for(1) <= 3


def test_the_page_lists_every_setting_and_cause() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guard.md").read_text()
    for name, setting in GuardConfig.model_fields.items():
        key = "engines.ENGINE_ID" if name == "engines" else name
        assert f"| `{key}` | {default_of(setting.default)} | {setting.description} |" in page
    for cause in GuardCause:
        assert not cause or f"| `{cause.word}` |" in page


def default_of(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    return "`true`" if value is True else f"`{value:g}`"
