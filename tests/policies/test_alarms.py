"""Hiccups of the host are not taken for changes of the server, and changes are found as before.

One batch of 64 requests whose drafts are accepted with 0.75: by the profile tier 3 is the best, and tiers 1
and 7 bring 16 and 25 % less. What counts is what the rule's tiers really bring, hiccups left out, over what
the best one would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specgov.policies.alarm_trial import FIRST_STEPS, AlarmTrial, Belief
from specgov.policies.cost import CostEstimator
from specgov.policies.greedy import Greedy
from specgov.policies.learnt import capture, restore
from specgov.policies.profile import load_profile
from specgov.policies.thompson import Thompson
from specgov.policies.types import BatchView, EngineSpec, PolicyContext, StepObservation

BATCH, CONTEXT, ACCEPTANCE, LAG = 64, 512, 0.75, 3
TIERS = (0, 1, 3, 7)
ENGINE = EngineSpec(TIERS, (1, 2, 4, 8, 16, 32, 64, 128, 256), 256)
PROFILE = load_profile("h200-llama-3.1-8b").step_time
MS = dict(zip(TIERS, PROFILE.step_ms(BATCH, np.array(TIERS), float(BATCH * CONTEXT)).tolist(), strict=True))
TOKENS = {tier: float(np.sum(ACCEPTANCE ** np.arange(tier + 1))) for tier in TIERS}
CALM_STEPS = 100

Rule = Greedy | Thompson
RULES: dict[str, Callable[[PolicyContext], Rule]] = {
    "greedy": lambda context: Greedy(context, Greedy.Config()),
    "thompson": lambda context: Thompson(context, Thompson.Config()),
}


def make(name: str, seed: int, *, profile: bool = True) -> Rule:
    return RULES[name](
        PolicyContext(ENGINE, np.random.default_rng(seed), lambda: 0.0, PROFILE if profile else None)
    )


def step(step_id: int, tier: int, ms: float | None, accepted: np.ndarray | None = None) -> StepObservation:
    return StepObservation(
        step_id,
        BATCH,
        tier,
        np.zeros(0, np.uint8) if accepted is None else accepted,
        np.arange(0 if accepted is None else BATCH, dtype=np.uint16),
        np.zeros(0 if accepted is None else BATCH, np.uint8),
        BATCH * CONTEXT,
        CONTEXT,
        step_ms=ms,
    )


def play(
    rule: Rule, took_ms: Callable[[int, int], float | None], steps: int, seed: int, first: int = 0
) -> Iterator[int]:
    """The tiers of ``steps`` steps, decided ``LAG`` steps before; ``took_ms(number, tier)`` without noise."""
    rng = np.random.default_rng(seed)
    due = [rule.choose(BatchView(BATCH, BATCH * CONTEXT, CONTEXT))] * LAG
    for number in range(first, first + steps):
        tier = due.pop(0).num_steps_for(BATCH)
        hits = np.cumprod(rng.random((BATCH, 7)) < ACCEPTANCE, axis=1)
        noise, ms = float(np.exp(0.02 * rng.standard_normal())), took_ms(number, tier)
        seen = step(
            number + 1, tier, None if ms is None else ms * noise, hits[:, :tier].sum(1).astype(np.uint8)
        )
        rule.observe(seen)
        due.append(rule.choose(BatchView.of(seen)))
        yield tier


def share_of_best(tiers: list[int], ms: dict[int, float] = MS) -> float:
    """Time that the best tier would need for the same output, over the time that ``tiers`` need."""
    best = max(TOKENS[tier] / ms[tier] for tier in TIERS)
    return sum(TOKENS[tier] / best for tier in tiers) / sum(ms[tier] for tier in tiers)


def test_the_world_is_as_described() -> None:
    assert [round(share_of_best([tier]), 2) for tier in TIERS] == [0.5, 0.84, 1.0, 0.75]


hiccups = st.tuples(
    st.integers(1, 10),
    st.floats(1.2, 4.0),
    st.integers(0, 2),
    st.integers(0, 20),
    st.integers(0, 2**20),
)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=12, deadline=None)
@example(hiccup=(10, 3.7, 1, 7, 7), profile=True)
@example(hiccup=(9, 1.9, 0, 3, 3), profile=True)
@given(hiccup=hiccups, profile=st.booleans())
def test_after_a_hiccup_the_best_tier_is_back(
    name: str, hiccup: tuple[int, float, int, int, int], profile: bool
) -> None:
    # It begins at any time once the rule has settled; steps after it catch up in half of their time, or not.
    length, factor, catching_up, wait, seed = hiccup
    begin = CALM_STEPS + wait

    def took_ms(number: int, tier: int) -> float:
        if begin <= number < begin + length:
            return factor * MS[tier]
        return (0.5 if begin + length <= number < begin + length + catching_up else 1.0) * MS[tier]

    rule = make(name, seed, profile=profile)
    tiers = list(play(rule, took_ms, begin + 200, seed))
    # The last hearing is 96 steps after the alarm; 30 more for its steps and the lag. Probes cost 1 to 2 %.
    assert share_of_best(tiers[begin + 140 :]) >= 0.97
    # Meanwhile at most some 60 steps at the worst of the other positive tiers.
    assert share_of_best(tiers[begin : begin + 140]) >= 0.90


@pytest.mark.parametrize("name", RULES)
def test_long_steps_strewn_among_normal_ones_do_no_harm(name: str) -> None:
    rng = np.random.default_rng(8)
    odd = np.where(rng.random(600) < 0.1, rng.uniform(2.0, 4.0, 600), 1.0)
    tiers = list(play(make(name, 8), lambda number, tier: odd[number] * MS[tier], 600, seed=8))
    assert share_of_best(tiers[CALM_STEPS:]) >= 0.98


@settings(max_examples=10, deadline=None)
@given(factor=st.floats(1.4, 3.0), seed=st.integers(0, 2**20))
def test_a_tier_that_becomes_slow_is_left_for_good(factor: float, seed: int) -> None:
    slow = {**MS, 3: factor * MS[3]}
    rule = make("greedy", seed)
    tiers = list(
        play(rule, lambda number, tier: (slow if number >= CALM_STEPS else MS)[tier], CALM_STEPS + 200, seed)
    )
    # Found after some 7 steps; the lag is 3, and some of tier 3's neighbours are tried. Then there are two
    # hearings of 4 steps each.
    after = tiers[CALM_STEPS:]
    assert after[:24].count(3) <= 18
    assert after[24:130].count(3) <= 9
    assert after[130:].count(3) <= 2


changes = st.tuples(
    st.tuples(st.just("all"), st.floats(1.3, 3.0) | st.floats(0.4, 0.75))
    # Below the time of tier 7, since times are held to rise with the tier.
    | st.tuples(st.just("one"), st.floats(1.3, 1.7)),
    st.integers(0, 2**20),
)


@settings(max_examples=20, deadline=None)
@given(change=changes)
def test_a_lasting_change_is_found_within_ten_steps_and_kept(change: tuple[tuple[str, float], int]) -> None:
    # By hand: an innovation counts 2 at most, less the drift of 0.5; 7 of them pass the threshold of 9.7.
    (what, factor), seed = change
    rng, estimator = np.random.default_rng(seed), CostEstimator(ENGINE, PROFILE)

    def observe(number: int, tier: int, ms: float) -> bool:
        return estimator.observe(step(number, tier, ms * float(np.exp(0.02 * rng.standard_normal()))))

    for number in range(CALM_STEPS):
        observe(number, TIERS[number // 4 % 4], MS[TIERS[number // 4 % 4]])
    assert estimator.changes == 0
    found = [observe(CALM_STEPS + number, 3, factor * MS[3]) for number in range(10)]
    assert any(found)
    others = factor if what == "all" else 1.0
    for number in range(CALM_STEPS + 10, CALM_STEPS + 200):
        tier = TIERS[number // 4 % 4]
        observe(number, tier, (factor if tier == 3 else others) * MS[tier])
    expected = [(factor if tier == 3 else others) * MS[tier] for tier in TIERS]
    learnt = estimator.predict(CONTEXT)[estimator.grid_index(BATCH)]
    assert learnt == pytest.approx(expected, rel=0.04)


def test_up_to_six_long_steps_raise_no_alarm_and_move_nothing() -> None:
    # 6 innovations of 2 less 0.5 are 9, below the threshold of 9.7.
    estimator = CostEstimator(ENGINE, PROFILE)
    for number in range(CALM_STEPS):
        estimator.observe(step(number, 3, MS[3]))
    for number in range(6):
        assert not estimator.observe(step(CALM_STEPS + number, 3, 3 * MS[3]))
    learnt = estimator.predict(CONTEXT)[estimator.grid_index(BATCH)]
    assert learnt == pytest.approx(list(MS.values()), rel=0.03)


def test_what_is_believed_is_restored_where_there_was_no_change() -> None:
    estimator = CostEstimator(ENGINE, PROFILE)
    for number in range(CALM_STEPS):
        estimator.observe(step(number, 3, MS[3]))
    found = [estimator.observe(step(CALM_STEPS + number, 3, 2 * MS[3])) for number in range(10)]
    assert found.index(True) == 6
    assert estimator.predict(CONTEXT)[estimator.grid_index(BATCH), 2] > 1.5 * MS[3]
    # Another tier is in force; what it takes says nothing of tier 3. From 24 steps after the alarm, of which
    # three are passed, tier 3 is wanted for four steps; the third of them ends the trial.
    for number in range(FIRST_STEPS[0] - 3):
        assert estimator.recheck() is None
        estimator.observe(step(200 + number, 1, 2 * MS[1]))
    assert estimator.recheck() == 2
    assert [estimator.observe(step(300 + number, 3, MS[3])) for number in range(3)] == [False, False, True]
    assert estimator.recheck() is None
    learnt = estimator.predict(CONTEXT)[estimator.grid_index(BATCH)]
    assert learnt == pytest.approx(list(MS.values()), rel=0.03)
    assert estimator.noise_sd < 0.05


def test_a_hearing_is_asked_for_twice_and_for_four_steps_each() -> None:
    belief = Belief(np.zeros(1), np.zeros((1, 1)), 0.0, 1.0, 1.0)
    trial, asked = AlarmTrial(1, belief), []
    while trial.pass_step():
        if trial.asks():
            asked.append(trial.steps)
    assert asked == [24, 25, 26, 27, 96, 97, 98, 99]
    assert trial.steps == 96 + 4 + 16


def test_steps_before_the_first_hearing_and_at_other_tiers_are_no_evidence() -> None:
    trial = AlarmTrial(1, Belief(np.zeros(1), np.zeros((1, 1)), 0.0, 1.0, 1.0))
    trial.pass_step()
    assert not trial.hears(1)
    while trial.steps < FIRST_STEPS[0]:
        trial.pass_step()
    assert trial.hears(1)
    assert not trial.hears(2)
    assert not any(trial.hear(speaks_for_before=vote) for vote in (True, False, True, False))
    assert not trial.hears(1)
    # The second hearing begins anew.
    while trial.steps < FIRST_STEPS[1]:
        trial.pass_step()
    assert [trial.hear(speaks_for_before=True) for _ in range(3)] == [False, False, True]


def test_hearings_end_where_no_step_has_a_time() -> None:
    # As when every step comes before a prefill: a rule must not be held at a tier for ever.
    estimator = CostEstimator(ENGINE, PROFILE)
    for number in range(CALM_STEPS):
        estimator.observe(step(number, 3, (1.0 if number < CALM_STEPS - 10 else 2.0) * MS[3]))
    asked = 0
    for number in range(200):
        estimator.observe(step(CALM_STEPS + number, 1, None))
        asked += estimator.recheck() is not None
    assert estimator.changes == 1
    assert asked == 8


@pytest.mark.parametrize("rule", ["greedy", "thompson"])
def test_a_frozen_rule_is_not_held_at_a_tier_by_a_hearing(rule: str) -> None:
    """Frozen in the midst of one: it decides on, and no step is shown to it that could end the hearing."""
    policy = make(rule, 0)
    policy.model.cost._trial = AlarmTrial(0, policy.model.cost._belief(), steps=FIRST_STEPS[0])
    batch = BatchView(BATCH, BATCH * 100, 100)
    usual = [policy.choose(batch).num_steps_for(BATCH) for _ in range(100)]
    assert usual[:4] == [TIERS[0]] * 4
    assert usual.count(TIERS[0]) <= 8
    assert len(set(usual[8:])) == 1


def test_a_trial_is_taken_out_and_put_back() -> None:
    uninterrupted = CostEstimator(ENGINE, PROFILE)
    for number in range(CALM_STEPS):
        uninterrupted.observe(step(number, 3, (1.0 if number < CALM_STEPS - 10 else 2.0) * MS[3]))
    restored = CostEstimator(ENGINE, PROFILE)
    restore(restored, capture(uninterrupted))
    for number in range(30):
        for estimator in (uninterrupted, restored):
            estimator.observe(step(CALM_STEPS + number, 3, MS[3]))
    assert restored.predict(CONTEXT).tolist() == uninterrupted.predict(CONTEXT).tolist()
    assert restored.predict(CONTEXT)[restored.grid_index(BATCH), 2] == pytest.approx(MS[3], rel=0.02)
