"""Counterfactual estimates: by hand on four steps, and against the truth in a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specgov.controller.report.estimators import (
    Outcomes,
    Predictions,
    Terms,
    doubly_robust,
    dr_terms,
    effective_sample_size,
    estimate,
    ips,
    ips_terms,
    mean_weight,
    snips,
    strata_of,
    weighted_doubly_robust,
    weights,
)

# Four steps; the rule in question would have used tier 3 everywhere. It ran at steps 1 and 4, with
# probabilities 1/2 and 1/4: the weights are 2, 0, 0, 4.
FOUR = Outcomes(
    num_steps=np.array([3, 0, 1, 3]),
    propensity=np.array([0.5, 0.5, 0.25, 0.25]),
    tokens=np.array([10.0, 4.0, 6.0, 8.0]),
    ms=np.array([5.0, 4.0, 4.0, 6.0]),
)
TARGET = np.array([3, 3, 3, 3])
W = np.array([2.0, 0.0, 0.0, 4.0])
RNG = np.random.default_rng(0)


def test_weights_are_one_over_the_propensity_where_the_tier_ran() -> None:
    assert weights(FOUR, TARGET).tolist() == W.tolist()
    assert weights(FOUR, np.array([0, 0, 0, 0])).tolist() == [0.0, 2.0, 0.0, 0.0]


def test_effective_sample_size_by_hand() -> None:
    assert effective_sample_size(W) == pytest.approx(36 / 20)  # (2 + 4)^2 / (4 + 16)
    assert effective_sample_size(np.ones(7)) == pytest.approx(7)
    assert effective_sample_size(np.zeros(3)) == 0


def test_means_by_hand() -> None:
    assert ips(W, FOUR.tokens) == pytest.approx((2 * 10 + 4 * 8) / 4)  # 13
    assert snips(W, FOUR.tokens) == pytest.approx(52 / 6)
    assert math.isnan(snips(np.zeros(4), FOUR.tokens))
    # The model says 9 at tier 3 and 5 else, and it ran 9, 5, 5, 9: 9 + (2 (10 - 9) + 4 (8 - 9)) / 4 = 8.5.
    predicted = np.array([9.0, 5.0, 5.0, 9.0])
    assert doubly_robust(W, FOUR.tokens, predicted, np.full(4, 9.0)) == pytest.approx(8.5)
    # Weighted, the correction is divided by the weights' sum: 9 + (2 - 4) / 6.
    assert weighted_doubly_robust(W, FOUR.tokens, predicted, np.full(4, 9.0)) == pytest.approx(9 - 1 / 3)
    # A perfect model leaves nothing to correct, whatever the weights.
    assert doubly_robust(W, FOUR.tokens, FOUR.tokens, np.full(4, 9.0)) == pytest.approx(9)


ONE_STRATUM = np.zeros(4, dtype=np.int64)


def test_rates_by_hand_and_too_few_steps_for_an_interval() -> None:
    found = estimate(ips_terms(FOUR, W), FOUR, ONE_STRATUM, RNG)
    assert found.rate.value == pytest.approx(1000 * 52 / (2 * 5 + 4 * 6))
    assert found.gain.value == pytest.approx((52 / 34) / (28 / 19) - 1)  # what ran made 28 tokens in 19 ms
    assert math.isnan(found.rate.low)
    assert math.isnan(found.gain.high)
    # Tokens 9 - 1/3 as above; the model says 5 ms at tier 3, 4 else: 5 + (2 (5 - 5) + 4 (6 - 5)) / 6 ms.
    predictions = Predictions(
        np.array([9.0, 5.0, 5.0, 9.0]), np.array([5.0, 4.0, 4.0, 5.0]), np.full(4, 9.0), np.full(4, 5.0)
    )
    found = estimate(dr_terms(FOUR, W, predictions), FOUR, ONE_STRATUM, RNG)
    assert found.rate.value == pytest.approx(1000 * (9 - 1 / 3) / (5 + 2 / 3))


def test_strata_count_by_the_time_that_was_spent_in_them() -> None:
    """Stratum 0 holds steps 1 and 2 (9 ms), stratum 1 steps 3 and 4 (10 ms). The rule makes 10 tokens in 5 ms
    in the one and 8 in 6 in the other, so (9 * 2000 + 10 * 1333.3) / 19 a second.
    """
    found = estimate(ips_terms(FOUR, W), FOUR, np.array([0, 0, 1, 1]), RNG)
    assert found.rate.value == pytest.approx((9 * 2000 + 10 * 8000 / 6) / 19)


def test_a_stratum_in_which_the_rule_never_ran_leaves_no_number() -> None:
    assert math.isnan(estimate(ips_terms(FOUR, W), FOUR, np.array([0, 1, 1, 0]), RNG).rate.value)


def test_strata_are_octaves_joined_downwards_until_they_weigh_enough() -> None:
    sizes = np.array([1, 2, 3, 4, 7, 8, 16])
    assert strata_of(sizes, np.ones(7), least_blocks=1).tolist() == [4, 3, 3, 2, 2, 1, 0]
    # Each step is a block here. Two each: 16 joins 8, 4 and 7 stand, 2 and 3 too, and 1 joins these.
    assert strata_of(sizes, np.ones(7), least_blocks=2).tolist() == [2, 2, 2, 1, 1, 0, 0]
    assert strata_of(sizes, np.zeros(7)).tolist() == [0] * 7


def test_an_interval_of_equal_blocks_is_a_point_and_of_unlike_ones_is_between_them() -> None:
    n = 400
    zeros = np.zeros(n, dtype=np.int64)
    outcomes = Outcomes(zeros, np.ones(n), np.full(n, 3.0), np.full(n, 2.0))
    same = estimate(ips_terms(outcomes, np.ones(n)), outcomes, zeros, RNG)
    assert (same.rate.low, same.rate.value, same.rate.high) == pytest.approx((1500, 1500, 1500))
    assert (same.gain.low, same.gain.high) == pytest.approx((0, 0), abs=1e-12)
    halves = Terms(np.zeros(n), np.zeros(n), np.repeat([2.0, 4.0], n // 2), outcomes.ms, np.ones(n))
    mixed = estimate(halves, outcomes, zeros, RNG)
    assert mixed.rate.value == pytest.approx(1500)
    assert 1000 < mixed.rate.low < 1500 < mixed.rate.high < 2000


TIERS = np.array([0, 1, 3])


def play(
    seed: int, steps: int = 6000, block: int = 64
) -> tuple[Outcomes, np.ndarray, np.ndarray, np.ndarray]:
    """A canary's log: for blocks of 64 steps, tier 0, 1 or 3 drawn with 0.6, 0.3, 0.1.

    Tokens and times have means that depend on tier and batch, and scatter that is shared within a block.
    Returned are the log, its batch sizes, and the means by step and tier, shape (steps, 3).
    """
    rng = np.random.default_rng(seed)
    blocks = -(-steps // block)
    drawn = np.repeat(rng.choice(3, blocks, p=[0.6, 0.3, 0.1]), block)[:steps]
    batch = np.repeat(rng.integers(1, 33, blocks), block)[:steps]
    tokens = batch[:, None] * np.array([1.0, 1.7, 2.4])
    ms = np.array([5.0, 5.5, 6.5]) + batch[:, None] * np.array([0.02, 0.05, 0.11])
    shared = np.repeat(rng.normal(0, 0.05, blocks), block)[:steps]
    at = np.arange(steps)
    outcomes = Outcomes(
        TIERS[drawn],
        np.array([0.6, 0.3, 0.1])[drawn],
        tokens[at, drawn] * np.exp(shared + rng.normal(0, 0.1, steps)),
        ms[at, drawn] * np.exp(rng.normal(0, 0.05, steps)),
    )
    return outcomes, batch, tokens, ms


def true_rate(outcomes: Outcomes, stratum: np.ndarray, tokens: np.ndarray, ms: np.ndarray) -> float:
    """As the module defines it, from the means; exp(normal) has mean exp(variance / 2)."""
    scatter = math.exp((0.05**2 + 0.1**2 - 0.05**2) / 2)
    time_ms = np.bincount(stratum, outcomes.ms)
    rates = 1000 * scatter * np.bincount(stratum, tokens) / np.bincount(stratum, ms)
    return float(rates @ time_ms / time_ms.sum())


@pytest.mark.parametrize("column", [0, 1, 2])
def test_the_intervals_cover_the_truth_about_as_often_as_they_say(column: int) -> None:
    """95 % intervals of 40 independent logs: fewer than 32 of 40 would have probability below 0.0005.

    The model is wrong by 30 % in tokens and has no idea of the batch's cost, and doubly robust holds still.
    """
    covered = {"ips": 0, "dr": 0}
    target = np.full(6000, TIERS[column])
    for seed in range(40):
        outcomes, batch, tokens, ms = play(seed)
        weight = weights(outcomes, target)
        stratum = strata_of(batch, weight)
        truth = true_rate(outcomes, stratum, tokens[:, column], ms[:, column])
        ran, at = np.searchsorted(TIERS, outcomes.num_steps), np.arange(6000)
        wrong_tokens, wrong_ms = 1.3 * tokens, np.broadcast_to(ms.mean(axis=0), ms.shape)
        predictions = Predictions(
            wrong_tokens[at, ran], wrong_ms[at, ran], wrong_tokens[:, column], wrong_ms[:, column]
        )
        rng = np.random.default_rng(1000 + seed)
        covered["ips"] += estimate(ips_terms(outcomes, weight), outcomes, stratum, rng).rate.holds(truth)
        robust = dr_terms(outcomes, weight, predictions)
        covered["dr"] += estimate(robust, outcomes, stratum, rng).rate.holds(truth)
    assert min(covered.values()) >= 32, covered


def test_a_tier_that_chance_never_drew_shows_in_the_weights() -> None:
    outcomes, *_ = play(0)
    assert mean_weight(weights(outcomes, np.full(6000, 7)), RNG).high == 0
    # And one that could be drawn in half of the steps only, although in those with a known probability.
    half = np.where(np.arange(6000) < 3000, 0, 7)
    assert not mean_weight(weights(outcomes, half), RNG).holds(1.0)
    assert mean_weight(weights(outcomes, np.zeros(6000)), RNG).holds(1.0)
