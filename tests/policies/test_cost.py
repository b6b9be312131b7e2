import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.policies.change import ChangeConfig
from specgov.policies.cost import CostConfig, CostEstimator
from specgov.policies.cost_prior import GenericStepTime
from specgov.policies.profile import load_profile
from specgov.policies.types import EngineSpec, StepObservation

GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ENGINE = EngineSpec((0, 1, 3, 7), GRAPHS, 256)


class Constant:
    """10 ms whatever the step is; implements ``StepTime``."""

    def step_ms(self, batch_size, num_steps, sum_seq_len_tokens):  # type: ignore[no-untyped-def]
        shape = np.broadcast_shapes(*map(np.shape, (batch_size, num_steps, sum_seq_len_tokens)))
        return np.full(shape, 10.0)


def step(batch_size: int, num_steps: int, step_ms: float | None, context: int = 512) -> StepObservation:
    none = np.zeros(0, np.uint8)
    return StepObservation(
        1,
        batch_size,
        num_steps,
        none,
        none.astype(np.uint16),
        none,
        context * batch_size,
        context,
        step_ms=step_ms,
    )


def at(estimator: CostEstimator, batch_size: int, context: float = 512) -> np.ndarray:
    """Predicted ms by tier."""
    return estimator.predict(context)[estimator.grid_index(batch_size)]


def test_before_any_step_the_profile_is_believed() -> None:
    profile = load_profile("h200-llama-3.1-8b").step_time
    estimator = CostEstimator(ENGINE, profile)
    for batch_size in GRAPHS:
        expected = profile.step_ms(batch_size, np.array(ENGINE.tiers), 512.0 * batch_size)
        assert at(estimator, batch_size) == pytest.approx(expected)


def test_one_timed_step_by_hand() -> None:
    # A profile of 10 ms without context, log error N(0, 1) common to all cells and nothing else, noise 1: a
    # step of 10 e ms has the innovation 1. Variance 1 + 1 = 2; Student-t with 4 degrees trusts it by min(1, 5
    # / (4 + 1/2)) = 1. The gain is 1 / 2, so that every cell is now at 10 exp(1/2) ms with a variance of 1 /
    # 2.
    config = CostConfig(
        scale_sd=1, batch_sd=0, depth_sd=0, cell_sd=0, profile_variance=1, noise_sd=1, memory_steps=1e12
    )
    estimator = CostEstimator(ENGINE, Constant(), config)
    estimator.observe(step(1, 0, 10 * math.e))
    assert estimator.predict(512) == pytest.approx(np.full((len(GRAPHS), 4), 10 * math.exp(0.5)))
    assert estimator.log_covariance(3) == pytest.approx(np.full((4, 4), 0.5))


def test_a_second_step_by_hand() -> None:
    # As above, then another step of 10 e ms: innovation 1/2, variance 1/2 + 1, gain 1/3: 1/2 + 1/6 = 2/3. The
    # noise is not learnt (it stays at least 1), nor is the profile judged (the cell's variance is below the
    # noise's).
    config = CostConfig(
        scale_sd=1,
        batch_sd=0,
        depth_sd=0,
        cell_sd=0,
        profile_variance=1,
        noise_sd=1,
        least_noise_sd=1,
        memory_steps=1e12,
        pooled_steps=1,
    )
    estimator = CostEstimator(ENGINE, Constant(), config)
    for _ in range(2):
        estimator.observe(step(1, 0, 10 * math.e))
    assert at(estimator, 1) == pytest.approx(np.full(4, 10 * math.exp(2 / 3)))


def test_pooled_steps_count_as_much_as_single_ones() -> None:
    # As above, with innovations too small for the Student-t to weigh down: n steps of log time x at once or
    # one by one leave a Gaussian the same mean.
    config = {"batch_sd": 0.0, "depth_sd": 0.0, "cell_sd": 0.0, "noise_sd": 1.0, "least_noise_sd": 1.0}
    for pooled_steps in (1, 4):
        limits = CostConfig(
            **config, scale_sd=0.4, profile_variance=1, memory_steps=1e12, pooled_steps=pooled_steps
        )  # type: ignore[arg-type]
        estimator = CostEstimator(ENGINE, Constant(), limits)
        for _ in range(4):
            estimator.observe(step(1, 0, 10 * math.exp(0.1)))
        # Prior variance 0.16, noise 1: 4 steps weigh 0.64 against 1.
        assert at(estimator, 1) == pytest.approx(np.full(4, 10 * math.exp(0.1 * 0.64 / 1.64)))


def test_neighbouring_cells_share_what_is_learnt_and_far_ones_less() -> None:
    estimator = CostEstimator(ENGINE, Constant())
    for _ in range(20):
        estimator.observe(step(16, 0, 10.0))
        estimator.observe(step(16, 3, 15.0))
    learnt = at(estimator, 16)
    assert learnt[[0, 2]] == pytest.approx([10.0, 15.0], rel=0.02)
    assert 11.0 < learnt[1] < 14.5
    ratio = {size: at(estimator, size)[2] / at(estimator, size)[0] for size in (16, 32, 256)}
    assert 1.5 * 1.02 > ratio[16] > ratio[32] > ratio[256] > 1.1
    spread = [estimator.log_covariance(estimator.grid_index(size))[2, 2] for size in (16, 32, 256)]
    assert spread == sorted(spread)


def test_context_is_learnt_where_the_profile_has_it_wrong() -> None:
    truth = GenericStepTime(context_ms_per_token=9e-5)
    estimator = CostEstimator(ENGINE, GenericStepTime())
    rng = np.random.default_rng(1)
    for _ in range(150):
        context, tier = int(rng.integers(200, 9_000)), int(rng.choice(ENGINE.tiers))
        estimator.observe(step(32, tier, float(truth.step_ms(32, tier, 32.0 * context)), context))
    for context in (500, 8_000):
        expected = truth.step_ms(32, np.array(ENGINE.tiers), 32.0 * context)
        assert at(estimator, 32, context) == pytest.approx(expected, rel=0.06)


def test_a_stall_moves_nothing() -> None:
    estimator = CostEstimator(ENGINE, Constant())
    rng = np.random.default_rng(2)
    for _ in range(100):
        estimator.observe(step(8, 1, float(10 * np.exp(0.02 * rng.standard_normal()))))
    before = at(estimator, 8)[1]
    estimator.observe(step(8, 1, 60.0))
    assert at(estimator, 8)[1] == pytest.approx(before, rel=0.01)
    assert estimator.changes == 0


def test_a_lasting_change_is_found_and_followed() -> None:
    estimator = CostEstimator(ENGINE, Constant())
    rng = np.random.default_rng(3)
    for _ in range(200):
        estimator.observe(step(8, 1, float(10 * np.exp(0.02 * rng.standard_normal()))))
    for _ in range(15):
        estimator.observe(step(8, 1, float(13 * np.exp(0.02 * rng.standard_normal()))))
    assert estimator.changes >= 1
    assert at(estimator, 8)[1] == pytest.approx(13.0, rel=0.02)


def test_a_profile_that_proves_right_is_trusted_where_it_was_not_tried() -> None:
    profile = load_profile("h200-llama-3.1-8b").step_time
    right, wrong = CostEstimator(ENGINE, profile), CostEstimator(ENGINE, profile)
    for batch_size in (1, 4, 16, 64):
        for tier in ENGINE.tiers:
            true_ms = float(profile.step_ms(batch_size, tier, 512.0 * batch_size))
            right.observe(step(batch_size, tier, true_ms))
            wrong.observe(step(batch_size, tier, true_ms * (1 + 0.3 * tier * (1 + (batch_size == 4)))))
    unseen = right.grid_index(256)
    assert np.all(np.diag(right.log_covariance(unseen)) < 0.5 * np.diag(wrong.log_covariance(unseen)))


def test_a_profile_is_trusted_more_than_none() -> None:
    # A quarter of the variance in every cell, by the default.
    trusted, doubted = (CostEstimator(ENGINE, Constant(), CostConfig(profile_variance=v)) for v in (0.25, 1))
    assert CostConfig().profile_variance == 0.25
    assert trusted.log_covariance(3) == pytest.approx(doubted.log_covariance(3) / 4)
    generic = GenericStepTime()
    given = CostEstimator(ENGINE, generic).log_covariance(3)
    assert given == pytest.approx(CostEstimator(ENGINE).log_covariance(3) / 4)


def test_steps_without_a_valid_time_or_outside_the_graphs_are_left_out() -> None:
    estimator = CostEstimator(ENGINE, Constant())
    before = estimator.predict(512).copy()
    eager = step(8, 1, 30.0)
    for odd in (step(8, 1, None), step(8, 1, math.nan), step(8, 1, -1.0), step(8, 5, 20.0)):
        estimator.observe(odd)
    estimator.observe(
        StepObservation(
            1,
            8,
            1,
            eager.accepted,
            eager.slots,
            eager.generations,
            4_096,
            512,
            cuda_graph_ran=False,
            step_ms=30.0,
        )
    )
    assert estimator.predict(512) == pytest.approx(before)


def test_with_no_profile_the_tiers_are_ranked_after_a_few_steps() -> None:
    truth = load_profile("h200-qwen3-30b-a3b").step_time
    estimator = CostEstimator(ENGINE)
    for tier in ENGINE.tiers:
        for _ in range(3):
            estimator.observe(step(32, tier, float(truth.step_ms(32, tier, 512.0 * 32))))
    assert at(estimator, 32) == pytest.approx(truth.step_ms(32, np.array(ENGINE.tiers), 512.0 * 32), rel=0.03)


def test_intervals_cover_what_they_say() -> None:
    # Worlds drawn from the prior itself: a common scale, smooth curves, cells' own. Thirty steps at random
    # cells, then 90 % intervals of the log step time of every cell, tried or not. (No attention: the profile
    # has no context.)
    config = CostConfig(
        change=ChangeConfig(false_alarm_steps=1e12),
        memory_steps=1e12,
        profile_variance=1,
        prior_evidence=1e12,
    )
    rng = np.random.default_rng(4)
    inside = []
    for _ in range(60):
        estimator = CostEstimator(ENGINE, Constant(), config)
        world = CostEstimator(ENGINE, Constant(), config)
        world._mean = rng.multivariate_normal(np.zeros(len(world._mean)), world._prior_covariance)
        truth = np.log(world._ms(world._mean))
        for _ in range(30):
            grid, tier = int(rng.integers(len(GRAPHS))), int(rng.integers(4))
            noisy = float(np.exp(truth[grid, tier] + config.noise_sd * rng.standard_normal()))
            estimator.observe(step(GRAPHS[grid], ENGINE.tiers[tier], noisy))
        estimate = np.log(estimator._ms(estimator._mean))
        deviation = [np.sqrt(np.diag(estimator.log_covariance(grid))) for grid in range(len(GRAPHS))]
        inside.append(np.abs(truth - estimate) <= 1.645 * np.array(deviation))
    assert 0.85 <= np.mean(inside) <= 0.95


def test_the_grid_covers_every_batch_size() -> None:
    no_graphs = CostEstimator(EngineSpec((0, 1), (), 100)).batch_sizes
    assert no_graphs[0] == 1
    assert no_graphs[-1] == 100
    assert np.all(np.diff(no_graphs) > 0)
    assert np.all(no_graphs[1:] <= np.maximum(no_graphs[:-1] + 1, 1.1 * no_graphs[:-1] + 1))
    beyond = CostEstimator(EngineSpec((0, 1), (8, 16), 40)).batch_sizes
    assert beyond[:2].tolist() == [8, 16]
    assert beyond[-1] == 40
    assert CostEstimator(EngineSpec((0, 1), (8, 16), 12)).batch_sizes.tolist() == [8, 16]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 1_000),
            st.sampled_from([0, 1, 3, 7, 9]),
            st.floats(1e-3, 1e6) | st.sampled_from([math.nan, math.inf, 0.0, -1.0]),
            st.integers(0, 1_000_000),
        ),
        max_size=40,
    )
)
def test_whatever_comes_in_times_are_positive_finite_and_monotone(
    steps: list[tuple[int, int, float, int]],
) -> None:
    estimator = CostEstimator(ENGINE)
    for batch_size, tier, ms, context in steps:
        estimator.observe(step(batch_size, tier, ms, context))
    predicted = estimator.predict(1_000)
    assert np.all(np.isfinite(predicted))
    assert np.all(predicted > 0)
    assert np.all(np.diff(predicted, axis=1) >= 0)
    drawn = estimator.sample(1_000, np.random.default_rng(0))
    assert np.all(np.isfinite(drawn))
    assert np.all(np.diff(drawn, axis=1) >= 0)
    for grid in range(len(GRAPHS)):
        assert np.linalg.eigvalsh(estimator.log_covariance(grid)).min() > -1e-6
