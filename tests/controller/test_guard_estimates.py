"""The guard's own yardstick: when it learns, how long its estimates stay, and what it does not know."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from specgov.controller.guard.estimates import Estimator
from specgov.policies.rate_model import RateModel
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, EngineSpec, PolicyContext, PolicyError, StepObservation

ENGINE = EngineSpec(tiers=(0, 1, 3), max_running_requests=64, decision_lag_steps=1)


def estimator() -> Estimator:
    return Estimator(PolicyContext(ENGINE, np.random.default_rng(0), lambda: 0.0))


def step(step_id: int, num_steps: int = 3, batch_size: int = 4, accepted: int = 1) -> StepObservation:
    return StepObservation(
        step_id,
        batch_size,
        num_steps,
        np.full(batch_size, min(accepted, num_steps), np.uint8),
        np.zeros(0, np.uint16),
        np.zeros(0, np.uint8),
        100 * batch_size,
        100,
        step_ms=8.0 + num_steps,
    )


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ids of the steps that the model took in."""
    ids: list[int] = []
    observe = RateModel.observe

    def watched(model: RateModel, seen: StepObservation) -> bool:
        ids.append(seen.step_id)
        return observe(model, seen)

    monkeypatch.setattr(RateModel, "observe", watched)
    return ids


def test_nothing_is_learnt_before_it_is_asked(learnt: list[int]) -> None:
    yardstick = estimator()
    yardstick.observe(step(1), 0)
    yardstick.own(BatchView(4))
    yardstick.observe(step(2), 0)
    assert learnt == [2]


def test_it_learns_from_the_first_steps_and_then_from_few(learnt: list[int]) -> None:
    """64 at a tier and octave, then one in 128."""
    yardstick = estimator()
    yardstick.own(BatchView(4))
    for step_id in range(1, 64 + 2 * 128 + 1):
        yardstick.observe(step(step_id), 0)
    assert learnt == [*range(1, 65), 192, 320]


def test_another_tier_or_octave_is_learnt_anew(learnt: list[int]) -> None:
    yardstick = estimator()
    yardstick.own(BatchView(4))
    for step_id in range(1, 101):
        yardstick.observe(step(step_id), 0)
    learnt.clear()
    yardstick.observe(step(101, num_steps=0), 0)
    yardstick.observe(step(102, batch_size=7), 0)  # of 4 to 7 requests, as before
    yardstick.observe(step(103, batch_size=8), 0)
    assert learnt == [101, 103]


@pytest.mark.parametrize(
    ("baseline", "learns"),
    [(3, True), (1, True), (0, False)],  # at 0 the step itself shows what the baseline brings
)
def test_other_tokens_than_expected_are_looked_into(learnt: list[int], baseline: int, learns: bool) -> None:
    """At tier 1 none of 4 requests had a draft accepted, and from step 101 on all have: 8 tokens, not 4.

    The mean of that surprise, 1, moves by a sixteenth a step from near 0: it passes 0.4 / sqrt(4) at the
    fourth, where 1 - (15/16)^4 = 0.23.
    """
    yardstick = estimator()
    yardstick.own(BatchView(4))
    for step_id in range(1, 101):
        yardstick.observe(step(step_id, num_steps=1, accepted=0), baseline)
    learnt.clear()
    for step_id in range(101, 121):
        yardstick.observe(step(step_id, num_steps=1, accepted=1), baseline)
    assert learnt[:8] == ([*range(104, 112)] if learns else [])


def test_a_tier_that_was_away_is_looked_at_again(learnt: list[int]) -> None:
    """Eight steps after more than 64 elsewhere."""
    yardstick = estimator()
    yardstick.own(BatchView(4))
    for step_id in range(1, 101):
        yardstick.observe(step(step_id), 0)
    for step_id in range(101, 171):
        yardstick.observe(step(step_id, num_steps=0), 0)
    learnt.clear()
    for step_id in range(171, 191):
        yardstick.observe(step(step_id), 0)
    assert learnt == [*range(171, 179)]


def test_a_new_boot_counts_steps_from_one_again(learnt: list[int]) -> None:
    yardstick = estimator()
    yardstick.own(BatchView(4))
    for step_id in range(5_000, 5_100):
        yardstick.observe(step(step_id), 0)
    learnt.clear()
    for step_id in range(1, 21):
        yardstick.observe(step(step_id), 0)
    assert learnt == [*range(1, 9)]


def test_another_draft_is_learnt_from_the_start(learnt: list[int]) -> None:
    yardstick = estimator()
    before = yardstick.own(BatchView(4))
    for step_id in range(1, 101):
        yardstick.observe(step(step_id, accepted=3), 0)
    assert yardstick.own(BatchView(4)).tokens[2] > 1.2 * before.tokens[2]
    yardstick.forget()
    learnt.clear()
    assert yardstick.own(BatchView(4)).tokens == pytest.approx(before.tokens)
    yardstick.observe(step(101), 0)
    assert learnt == [101]


def test_estimates_stay_until_more_is_learnt() -> None:
    """The same object, also for a batch a sixteenth larger, and when a batch size comes back."""
    yardstick = estimator()
    first = yardstick.own(BatchView(32))
    assert yardstick.own(BatchView(34)) is first
    other = yardstick.own(BatchView(40))
    assert other.batch_size == 40
    assert yardstick.own(BatchView(32)) is first
    yardstick.observe(step(1), 0)
    assert yardstick.own(BatchView(32)) is not first


def test_a_policys_own_estimates_are_not_doubted() -> None:
    yardstick = estimator()
    tokens, ms = np.array([4.0, 6.0, 8.0]), np.array([8.0, 8.0, 10.0])
    ranges = tier_ranges(ENGINE, [(1, 3)])
    choice = Choice(ranges, expected_tokens=tokens, expected_ms=ms)
    estimates = yardstick.of(choice, BatchView(4))
    assert (estimates.tokens, estimates.ms) == ([4.0, 6.0, 8.0], [8.0, 8.0, 10.0])
    assert yardstick.of(choice, BatchView(4)) is estimates
    assert yardstick.doubt(estimates, 0, 2) == 0.0


def test_of_a_smaller_tier_only_the_time_is_in_doubt() -> None:
    """As the cost model has it: var a + var b - 2 cov. Of a larger one its tokens are, too."""
    yardstick = estimator()
    estimates = yardstick.own(BatchView(4))
    model = RateModel(PolicyContext(ENGINE, np.random.default_rng(0), lambda: 0.0), cold_draft_margin=0.0)
    rates = model.rates(BatchView(4))
    of_time = model.cost.log_covariance(rates.grid)
    time_sd = math.sqrt(of_time[2, 2] + of_time[0, 0] - 2 * of_time[2, 0])
    assert yardstick.doubt(estimates, 2, 0) == pytest.approx(time_sd)
    assert yardstick.doubt(estimates, 0, 2) == pytest.approx(model.log_ratio_sd(rates)[0, 2])
    assert yardstick.doubt(estimates, 0, 2) > 1.1 * time_sd
    assert yardstick.doubt(estimates, 1, 1) == 0.0


def test_doubt_falls_once_both_tiers_ran() -> None:
    yardstick = estimator()
    before = yardstick.doubt(yardstick.own(BatchView(4)), 0, 2)
    for step_id in range(1, 41):
        yardstick.observe(step(step_id, num_steps=3 * (step_id % 2)), 0)
    assert yardstick.doubt(yardstick.own(BatchView(4)), 0, 2) < before / 3


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("of", ["tokens", "ms"])
def test_expectations_that_cannot_be_are_named(of: str, bad: float) -> None:
    """What is divided by in every account: a policy that expects it is set aside, and told why."""
    expected = {"tokens": np.array([4.0, 6.0, 8.0]), "ms": np.array([8.0, 8.0, 10.0])}
    expected[of][1] = bad
    ranges = tier_ranges(ENGINE, [(1, 3)])
    choice = Choice(ranges, expected_tokens=expected["tokens"], expected_ms=expected["ms"])
    with pytest.raises(PolicyError, match="which cannot be"):
        estimator().of(choice, BatchView(4))
