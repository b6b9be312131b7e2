import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.policies.acceptance import AcceptanceConfig, AcceptanceEstimator
from specgov.policies.change import ChangeConfig
from specgov.policies.types import StepObservation

FOR_EVER = 1e12
NO_CHANGE = ChangeConfig(false_alarm_steps=1e12)
STATIONARY = AcceptanceConfig(
    request_memory_steps=FOR_EVER,
    anonymous_memory_steps=FOR_EVER,
    server_memory_steps=FOR_EVER,
    change=NO_CHANGE,
)


def step(
    step_id: int,
    num_steps: int,
    accepted: Sequence[int],
    slots: Sequence[int] | None = None,
    generations: Sequence[int] | None = None,
) -> StepObservation:
    slots = range(len(accepted)) if slots is None else slots
    return StepObservation(
        step_id,
        max(len(accepted), 1),
        num_steps,
        np.array(accepted, np.uint8),
        np.array(slots, np.uint16),
        np.array(generations if generations is not None else [0] * len(slots), np.uint8),
        100,
        100,
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def draw_accepted(rng: np.random.Generator, acceptance: np.ndarray, num_steps: int) -> np.ndarray:
    """Accepted drafts of each row of ``acceptance``."""
    hits = rng.random(acceptance.shape) < acceptance
    return np.cumprod(hits, axis=1)[:, :num_steps].sum(1).astype(np.uint8)


def true_tokens(acceptance: np.ndarray) -> np.ndarray:
    survival = np.cumprod(acceptance, axis=1).sum(0)
    return len(acceptance) + np.concatenate([[0.0], np.cumsum(survival)])


def test_the_prior_gives_a_typical_request_s_tokens() -> None:
    # One newcomer at the server's mean 0.5 with no spread between requests: 1, 1.5, 1.75.
    estimator = AcceptanceEstimator(2, AcceptanceConfig(prior_acceptance=0.5, request_sd=1e-9))
    assert estimator.tokens(1) == pytest.approx([1.0, 1.5, 1.75])
    assert estimator.tokens(10) == pytest.approx([10.0, 15.0, 17.5])


def test_one_accepted_draft_by_hand() -> None:
    # One position, server logit N(0, 1), tilt N(0, 1). The draft's residual is 1 - 0.5 and its variance 0.25;
    # the tilt adds 0.25^2 * 1 to it, so the residual counts 1 / (1 + 0.25) = 0.8. Information 0.25 * 0.8 =
    # 0.2: variance 1 / 1.2, logit (1 / 1.2) * 0.5 * 0.8 = 1/3, and p = sigmoid(1/3). With a concentration of
    # 2 one trial tells of the tilt as 2 / (2 + 1) would: a Newton step of (2/3) (1 - p) / (1 + (2/3) p (1 -
    # p)). The Beta given the tilt has mean (1 + 2 m) / 3, with m = sigmoid(1/3 + tilt) averaged over what is
    # left of the tilt's variance.
    config = AcceptanceConfig(prior_acceptance=0.5, level_sd=1, position_sd=0, request_sd=1, concentration=2)
    estimator = AcceptanceEstimator(1, config)
    estimator.observe(step(1, 1, [1]))
    assert estimator.server_acceptance == pytest.approx([sigmoid(1 / 3)])
    p = sigmoid(1 / 3)
    tilt = (2 / 3) * (1 - p) / (1 + (2 / 3) * p * (1 - p))
    tilted = sigmoid(1 / 3 + tilt)
    variance = 1 / (1 + (2 / 3) * tilted * (1 - tilted))
    averaged = sigmoid((1 / 3 + tilt) / math.sqrt(1 + math.pi / 8 * variance))
    mean, _ = estimator.request_acceptance()
    assert mean[0, 0] == pytest.approx((1 + 2 * averaged) / 3)
    assert estimator.tokens(1) == pytest.approx([1.0, 1.0 + mean[0, 0]])


def test_a_position_s_own_counts_by_hand() -> None:
    # With the server's mean fixed at 0.5 and no tilt, 3 accepted of 4 at a concentration of 4: Beta(3 + 2, 1
    # + 2).
    config = AcceptanceConfig(
        prior_acceptance=0.5,
        level_sd=0,
        position_sd=0,
        request_sd=1e-9,
        concentration=4,
        request_memory_steps=FOR_EVER,
    )
    estimator = AcceptanceEstimator(1, config)
    for step_id, accepted in enumerate([1, 0, 1, 1], 1):
        estimator.observe(step(step_id, 1, [accepted]))
    mean, deviation = estimator.request_acceptance()
    assert mean[0, 0] == pytest.approx(5 / 8)
    # The variance of Beta(5, 3) is 5 * 3 / (8^2 * 9).
    assert deviation[0, 0] == pytest.approx(math.sqrt(15 / 576))


def test_evidence_is_discounted_by_step_also_where_nothing_is_seen() -> None:
    # Memory 10: after 10 steps at num_steps 0 the one success counts exp(-1), at a concentration of 1.
    config = AcceptanceConfig(
        prior_acceptance=0.5,
        level_sd=0,
        position_sd=0,
        request_sd=1e-9,
        concentration=1,
        request_memory_steps=10,
    )
    estimator = AcceptanceEstimator(1, config)
    estimator.observe(step(1, 1, [1]))
    estimator.observe(step(11, 0, [0]))
    kept = math.exp(-1)
    mean, _ = estimator.request_acceptance()
    assert mean[0, 0] == pytest.approx((kept + 0.5) / (kept + 1), rel=1e-4)


def test_uncertainty_grows_while_a_tier_is_not_used() -> None:
    estimator = AcceptanceEstimator(3)
    rng = np.random.default_rng(1)
    acceptance = np.full((8, 3), 0.7)
    for step_id in range(1, 101):
        estimator.observe(step(step_id, 3, draw_accepted(rng, acceptance, 3)))
    before = estimator.covariance(8)[3, 3]
    for step_id in range(101, 301):
        estimator.observe(step(step_id, 0, [0] * 8))
    assert estimator.covariance(8)[3, 3] > 2 * before


def test_a_rejection_says_nothing_of_later_positions() -> None:
    # Three of four drafts accepted at position 1, all rejected at position 2: position 3 was never seen.
    fixed = AcceptanceConfig(level_sd=0, position_sd=0, request_sd=1e-9, change=NO_CHANGE)
    estimator = AcceptanceEstimator(3, fixed)
    for step_id in range(1, 5):
        estimator.observe(step(step_id, 3, [1]))
    mean, deviation = estimator.request_acceptance()
    assert mean[0, 0] > 0.7 > mean[0, 1]
    assert mean[0, 2] == pytest.approx(0.7, abs=1e-3)
    assert deviation[0, 2] > max(deviation[0, :2])


def test_censoring_biases_the_naive_average_but_not_ours() -> None:
    # Every conditional acceptance is 0.8. Accepted-at-j over steps, the naive average, tends to 0.8^j: 0.512
    # at position 3.
    rng = np.random.default_rng(2)
    acceptance = np.full((16, 3), 0.8)
    estimator = AcceptanceEstimator(3, STATIONARY)
    hits = np.zeros(3)
    for step_id in range(1, 301):
        accepted = draw_accepted(rng, acceptance, 3)
        hits += (accepted[:, None] > np.arange(3)).mean(0)
        estimator.observe(step(step_id, 3, accepted))
    naive = hits / 300
    assert naive[2] == pytest.approx(0.512, abs=0.02)
    assert estimator.request_acceptance()[0].mean(0) == pytest.approx([0.8, 0.8, 0.8], abs=0.015)
    assert estimator.server_acceptance == pytest.approx([0.8, 0.8, 0.8], abs=0.04)


def test_requests_are_told_apart_and_followed_when_the_batch_changes() -> None:
    rng = np.random.default_rng(3)
    acceptance = np.repeat([[0.9] * 3, [0.3] * 3], 8, axis=0)
    estimator = AcceptanceEstimator(3)
    for step_id in range(1, 121):
        estimator.observe(step(step_id, 3, draw_accepted(rng, acceptance, 3)))
    # The eight with 0.9 leave: what stays is told at once, before any of its steps in the new batch.
    estimator.observe(step(121, 0, [0] * 8, slots=range(8, 16)))
    assert estimator.tokens(8) / 8 == pytest.approx(true_tokens(acceptance[8:]) / 8, rel=0.06)


def test_requests_that_joined_are_newcomers_and_those_that_left_are_gone() -> None:
    rng = np.random.default_rng(4)
    acceptance = np.full((4, 2), 0.9)
    estimator = AcceptanceEstimator(2, AcceptanceConfig(prior_acceptance=0.5))
    newcomer = estimator.tokens(1)
    for step_id in range(1, 61):
        estimator.observe(step(step_id, 2, draw_accepted(rng, acceptance, 2)))
    known, more, fewer = estimator.tokens(4), estimator.tokens(6), estimator.tokens(2)
    # Two more than were reported: the four and two at the server's mean, which has moved from 0.5 towards
    # 0.9.
    assert np.all((more - known)[1:] / 2 > newcomer[1:])
    assert np.all((more - known)[1:] / 2 < known[1:] / 4)
    # Two fewer: which two is not known, so the mean.
    assert fewer == pytest.approx(known / 2)


def test_a_slot_s_reuse_begins_anew() -> None:
    estimator = AcceptanceEstimator(2, AcceptanceConfig(prior_acceptance=0.5, level_sd=0, position_sd=0))
    for step_id in range(1, 51):
        estimator.observe(step(step_id, 2, [0, 2], slots=[3, 900]))
    old = estimator.request_acceptance()[0]
    estimator.observe(step(51, 0, [0, 0], slots=[3, 900], generations=[0, 1]))
    mean = estimator.request_acceptance()[0]
    assert mean[0, 0] == pytest.approx(old[0, 0], abs=0.01)
    assert mean[1] == pytest.approx([0.5, 0.5])
    assert old[1, 0] > 0.8


def test_a_request_that_vanished_is_freed_in_time() -> None:
    config = AcceptanceConfig(
        prior_acceptance=0.5, level_sd=0, position_sd=0, free_after_steps=100, change=NO_CHANGE
    )
    estimator = AcceptanceEstimator(1, config)
    for step_id in range(1, 51):
        estimator.observe(step(step_id, 1, [1]))
    estimator.observe(step(150, 0, [0]))
    assert estimator.request_acceptance()[0][0, 0] > 0.6
    estimator.observe(step(251, 0, [0]))
    assert estimator.request_acceptance()[0][0, 0] == pytest.approx(0.5)


def test_without_slots_the_batch_is_estimated_as_one() -> None:
    rng = np.random.default_rng(5)
    acceptance = np.repeat([[0.9] * 3, [0.3] * 3], 16, axis=0)
    estimator = AcceptanceEstimator(3)
    for step_id in range(1, 101):
        estimator.observe(step(step_id, 3, draw_accepted(rng, acceptance, 3), slots=[]))
    assert estimator.tokens(32) == pytest.approx(true_tokens(acceptance), rel=0.03)


def test_a_jump_of_all_requests_is_found_and_followed() -> None:
    rng = np.random.default_rng(6)
    estimator = AcceptanceEstimator(3)
    for step_id in range(1, 201):
        estimator.observe(step(step_id, 3, draw_accepted(rng, np.full((16, 3), 0.85), 3)))
    assert estimator.changes == 0
    after = np.full((16, 3), 0.3)
    for step_id in range(201, 226):
        estimator.observe(step(step_id, 3, draw_accepted(rng, after, 3)))
    assert estimator.changes >= 1
    assert estimator.tokens(16) == pytest.approx(true_tokens(after), rel=0.12)


def test_forget_returns_to_the_prior() -> None:
    estimator = AcceptanceEstimator(2)
    prior = estimator.tokens(4), estimator.covariance(4)
    for step_id in range(1, 20):
        estimator.observe(step(step_id, 2, [0, 1, 2, 0]))
    estimator.forget()
    assert estimator.tokens(4) == pytest.approx(prior[0])
    assert estimator.covariance(4) == pytest.approx(prior[1])


@pytest.mark.parametrize(("requests", "worlds"), [(16, 150), (64, 100)])
def test_intervals_cover_what_they_say(requests: int, worlds: int) -> None:
    # Worlds drawn from the model itself: server logits from their prior, a tilt for each request, a Beta
    # around both for each position. Tier 3 of 5 positions is used; 90 % intervals of the batch's tokens at
    # every tier, the two never seen included. The steps are a multiple of what is taken in at once.
    rng = np.random.default_rng(7)
    config = STATIONARY
    inside_tokens, inside_requests = [], []
    for _ in range(worlds):
        estimator = AcceptanceEstimator(5, config)
        position = np.arange(1, 6)
        covariance = config.level_sd**2 + np.minimum(position[:, None], position) * config.position_sd**2
        logits = np.log(0.7 / 0.3) + rng.multivariate_normal(np.zeros(5), covariance)
        mean = 1 / (1 + np.exp(-(logits + config.request_sd * rng.standard_normal((requests, 1)))))
        mean = np.clip(mean, 0.01, 0.99)
        acceptance = rng.beta(config.concentration * mean, config.concentration * (1 - mean))
        for step_id in range(1, 26):
            estimator.observe(step(step_id, 3, draw_accepted(rng, acceptance, 3)))
        error = np.abs(true_tokens(acceptance) - estimator.tokens(requests))[1:]
        inside_tokens.append(error <= 1.645 * np.sqrt(np.diag(estimator.covariance(requests)))[1:])
        estimate, deviation = estimator.request_acceptance()
        inside_requests.append(np.abs(acceptance - estimate) <= 1.645 * deviation)
    assert 0.85 <= np.mean(inside_tokens) <= 0.95
    assert 0.85 <= np.mean(inside_requests) <= 0.95


def test_requests_are_told_apart_by_one_position_alone() -> None:
    # At num_steps 1 only the first position is ever seen. Half of the requests accept 0.9, half 0.1: after 60
    # steps the estimates are nearer to each request's own than to the mean of 0.5.
    rng = np.random.default_rng(8)
    acceptance = np.repeat([[0.9], [0.1]], 8, axis=0)
    estimator = AcceptanceEstimator(3)
    for step_id in range(1, 61):
        estimator.observe(step(step_id, 1, draw_accepted(rng, acceptance, 1)))
    mean = estimator.request_acceptance()[0]
    assert mean[:8, 0].mean() == pytest.approx(0.9, abs=0.1)
    assert mean[8:, 0].mean() == pytest.approx(0.1, abs=0.1)
    # What is one request's nature shows in the positions that were not seen.
    assert mean[:8, 1].mean() > 0.6 > 0.4 > mean[8:, 1].mean()


def test_counts_wait_to_be_taken_in_but_none_is_lost() -> None:
    # With a fixed server and no tilt a position's estimate depends on its counts alone, so that inferring
    # every 4 steps or every step comes to the same after a multiple of 4.
    fixed = {"level_sd": 0.0, "position_sd": 0.0, "request_sd": 1e-9, "change": NO_CHANGE}
    memory = {"request_memory_steps": FOR_EVER}
    each = AcceptanceEstimator(2, AcceptanceConfig(**fixed, **memory, infer_every_steps=1))  # type: ignore[arg-type]
    every = AcceptanceEstimator(2, AcceptanceConfig(**fixed, **memory, infer_every_steps=4))  # type: ignore[arg-type]
    rng = np.random.default_rng(9)
    for step_id in range(1, 121):
        seen = step(
            step_id,
            2,
            draw_accepted(rng, np.full((3, 2), 0.6), 2),
            slots=[5, 2, 9] if step_id < 50 else [2, 9, 7],
        )
        each.observe(seen)
        every.observe(seen)
    for step_id in range(121, 125):
        every.observe(step(step_id, 0, [0, 0, 0], slots=[2, 9, 7]))
    assert every.tokens(3) == pytest.approx(each.tokens(3), rel=1e-4)


def test_a_request_that_was_away_is_known_when_it_returns() -> None:
    # Memory 10, away for 10 steps: of 8 successes, discounted when it was last seen, exp(-1) are left.
    config = AcceptanceConfig(
        prior_acceptance=0.5,
        level_sd=0,
        position_sd=0,
        request_sd=1e-9,
        concentration=1,
        request_memory_steps=10,
        infer_every_steps=1,
    )
    estimator = AcceptanceEstimator(1, config)
    for step_id in range(1, 9):
        estimator.observe(step(step_id, 1, [1, 0], slots=[3, 4]))
    for step_id in range(9, 18):
        estimator.observe(step(step_id, 1, [0], slots=[4]))
    estimator.observe(step(18, 0, [0, 0], slots=[4, 3]))
    left = sum(math.exp(-(8 - seen) / 10) for seen in range(1, 9)) * math.exp(-1)
    mean, _ = estimator.request_acceptance()
    assert mean[1, 0] == pytest.approx((left + 0.5) / (left + 1), rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_comes_in_estimates_stay_sound(data: st.DataObject) -> None:
    positions = data.draw(st.integers(1, 7))
    estimator = AcceptanceEstimator(positions)
    step_id = 0
    for _ in range(data.draw(st.integers(1, 12))):
        step_id += data.draw(st.integers(-50, 5_000))
        num_steps = data.draw(st.integers(0, 9))
        accepted = data.draw(st.lists(st.integers(0, num_steps), max_size=6))
        first = data.draw(st.integers(0, 2_000))
        slots = range(first, first + len(accepted)) if data.draw(st.booleans()) else []
        generation = data.draw(st.integers(0, 255))
        estimator.observe(step(max(step_id, 0), num_steps, accepted, slots, [generation] * len(slots)))
        mean, deviation = estimator.request_acceptance()
        assert np.all((mean >= 0) & (mean <= 1))
        assert np.all(np.isfinite(deviation))
        for batch_size in (1, 5, 300):
            tokens = estimator.tokens(batch_size)
            assert tokens[0] == pytest.approx(batch_size)
            assert np.all(np.diff(tokens) >= 0)
            assert np.all(tokens <= batch_size * (np.arange(positions + 1) + 1) + 1e-9)
            assert np.linalg.eigvalsh(estimator.covariance(batch_size)).min() >= -1e-6 * batch_size**2
            drawn = estimator.sample_tokens(batch_size, np.random.default_rng(0))
            assert np.all(np.diff(drawn) >= 0)
