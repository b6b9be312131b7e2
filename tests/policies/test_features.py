"""The observation: counts and estimates worked out by hand, many engines against each alone, bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.policies.features import (
    ENTRIES,
    MAX_NUM_STEPS,
    OBSERVATION_SIZE,
    FeatureConfig,
    Features,
    StepSummaries,
    summarise,
)
from specgov.policies.types import EngineSpec, PolicyError, StepObservation

ENGINE = EngineSpec(tiers=(0, 1, 3), graph_batch_sizes=(1, 2, 4, 8), max_running_requests=16)
NO_FADING = FeatureConfig(
    acceptance_half_life_steps=1e12,
    prior_acceptance=0.6,
    prior_trials=10.0,
    time_half_life_steps=1e12,
    prior_times=4.0,
)


class TenAndTwo:
    """10 ms, and 2 ms for each draft step."""

    def step_ms(self, batch_size, num_steps, sum_seq_len_tokens):
        return (
            10.0
            + 2.0 * np.asarray(num_steps)
            + 0.0 * np.asarray(batch_size)
            + 0.0 * np.asarray(sum_seq_len_tokens)
        )


def step(accepted, num_steps, **changes):
    fields = {
        "step_id": 1,
        "batch_size": len(accepted),
        "num_steps": num_steps,
        "accepted": np.array(accepted, np.uint8),
        "slots": np.zeros(0, np.uint16),
        "generations": np.zeros(0, np.uint8),
        "sum_seq_len_tokens": 100 * len(accepted),
        "max_seq_len_tokens": 255,
    }
    return StepObservation(**{**fields, **changes})


def features(engine=ENGINE, n=1):
    return Features(engine, TenAndTwo(), n, NO_FADING)


def named(observation):
    return dict(zip((entry.name for entry in ENTRIES), observation.tolist(), strict=True))


def observed(*steps):
    made = features()
    for one in steps:
        made.update(summarise(one))
    return named(made.observation()[0])


def test_a_summary_counts_requests_by_accepted_drafts():
    summary = summarise(step([0, 2, 3], 3, step_ms=7.5, kv_use_ratio=0.25))
    assert summary.at_least.tolist() == [[3, 2, 2, 1, 0, 0, 0, 0]]
    assert summary.step_ms.tolist() == [7.5]
    assert summary.kv_use_ratio.tolist() == [0.25]
    unknown = summarise(step([0], 3))
    assert math.isnan(unknown.step_ms[0])
    assert math.isnan(unknown.kv_use_ratio[0])


def test_acceptance_from_censored_counts():
    """At tier 3 accepted 0, 2 and 3 drafts: trials 3, 2, 2 and hits 2, 2, 1 at positions 1 to 3.

    Pooled: (5 + 10 x 0.6) / (7 + 10) = 11/17; position 1: (2 + 110/17) / 13, and so on; nothing is known of
    position 4, which has the pooled value.
    """
    made = features()
    made.update(summarise(step([0, 2, 3], 3)))
    pooled = 11 / 17
    expected = [(2 + 10 * pooled) / 13, (2 + 10 * pooled) / 12, (1 + 10 * pooled) / 12, *[pooled] * 4]
    np.testing.assert_allclose(made.acceptance()[0], expected)
    seen = named(made.observation()[0])
    assert [seen[f"confidence_{i}"] for i in range(1, 5)] == pytest.approx([3 / 13, 2 / 12, 2 / 12, 0])
    assert seen["accept_length_2"] == pytest.approx((1 + expected[0] + expected[0] * expected[1]) / 8)


def test_positions_beyond_the_tier_are_not_tried():
    """At tier 1 a request that accepted its one draft says nothing of the second."""
    seen = observed(step([1, 1, 0, 1], 1))
    assert seen["confidence_1"] == pytest.approx(4 / 14)
    assert seen["confidence_2"] == 0
    assert observed(step([0, 0], 0))["confidence_1"] == 0


def test_evidence_fades():
    """After a half-life of steps without speculation, 4 trials count 2."""
    config = FeatureConfig(acceptance_half_life_steps=8.0, prior_trials=10.0)
    made = Features(ENGINE, TenAndTwo(), 1, config)
    made.update(summarise(step([1, 1, 0, 1], 1)))
    for _ in range(8):
        made.update(summarise(step([0, 0, 0, 0], 0)))
    seen = named(made.observation()[0])
    assert seen["confidence_1"] == pytest.approx(2 / 12)
    assert seen["steps_since_speculation"] == pytest.approx(math.log2(9) / 8)


def test_step_time_is_the_profiles_corrected_by_what_was_measured():
    """4 steps at tier 1 took e^0.5 times 12 ms: all tiers 2 / (4 + 4) = 0.25, tier 1 (2 + 4 x 0.25) / 8."""
    made = features()
    for _ in range(4):
        made.update(summarise(step([0], 1, step_ms=12.0 * math.exp(0.5))))
    made.update(summarise(step([0], 1, step_ms=None)))  # says nothing of time
    correction = made.time_correction()[0]
    assert correction[1] == pytest.approx(0.375)
    assert correction[[0, 3]] == pytest.approx(0.25)
    seen = named(made.observation()[0])
    assert seen["step_time_valid"] == 0
    assert seen["step_ms_0"] == pytest.approx(math.log2(1 + 10 * math.exp(0.25)) / 8)
    assert seen["step_time_ratio_1"] == pytest.approx(1.2 * math.exp(0.125) - 1, rel=1e-5)
    assert seen["step_time_ratio_3"] == pytest.approx(0.6, rel=1e-5)


def test_one_stall_counts_at_most_a_factor_of_e():
    made = features()
    made.update(summarise(step([0], 0, step_ms=10_000.0)))
    assert made.time_correction()[0, 0] == pytest.approx((1 + 4 * 0.2) / 5)


def test_relative_rate_is_that_of_tiers_which_the_engine_has():
    """Nothing known: p = 0.6 everywhere, so accept lengths 1, 1.6 and 2.176 in 10, 12 and 16 ms."""
    seen = observed(step([0], 0))
    rates = [1 / 10, 1.6 / 12, 2.176 / 16]
    assert [seen[f"relative_rate_{k}"] for k in (0, 1, 3)] == pytest.approx(
        [r / rates[2] for r in rates], rel=1e-5
    )
    assert [seen[f"relative_rate_{k}"] for k in (2, 4, 5, 6, 7)] == [0] * 5
    assert [seen[f"has_tier_{k}"] for k in range(8)] == [1, 1, 0, 1, 0, 0, 0, 0]


def test_the_rest_of_the_observation():
    seen = observed(
        step(
            [1, 0, 1],
            1,
            batch_size=5,
            waiting_requests=7,
            kv_use_ratio=0.5,
            after_prefill=True,
            sum_seq_len_tokens=5 * 1023,
        )
    )
    assert seen["reported"] == 1
    assert seen["batch_size"] == pytest.approx(math.log2(6) / 8)
    assert seen["padded_batch_size"] == pytest.approx(math.log2(9) / 8)  # to 8
    assert seen["cuda_graph"] == 1
    assert seen["live_share"] == pytest.approx(0.6)
    assert seen["mean_context"] == pytest.approx(10 / 16)
    assert seen["max_context"] == pytest.approx(8 / 16)
    assert seen["waiting"] == pytest.approx(3 / 8)
    assert (seen["kv_use"], seen["kv_known"]) == (0.5, 1)
    assert (seen["after_prefill"], seen["after_idle"]) == (1, 0)
    assert [seen[f"num_steps_{k}"] for k in range(8)] == [0, 1, 0, 0, 0, 0, 0, 0]


def test_batches_above_the_largest_graph_run_unpadded_without_one():
    seen = observed(step([0] * 9, 0))
    assert seen["padded_batch_size"] == pytest.approx(math.log2(10) / 8)
    assert seen["cuda_graph"] == 0
    assert seen["kv_known"] == 0
    reported = observed(step([0] * 3, 0, padded_batch_size=16))
    assert reported["padded_batch_size"] == pytest.approx(math.log2(17) / 8)


def test_before_the_first_step():
    seen = observed()
    assert seen["reported"] == 0
    assert [seen[f"num_steps_{k}"] for k in range(8)] == [0] * 8
    assert seen["acceptance_1"] == pytest.approx(0.6)
    assert seen["relative_rate_3"] == 1


def test_forgetting_acceptance_keeps_step_times():
    made = features()
    made.update(summarise(step([1, 1], 1, step_ms=24.0)))
    before = made.time_correction().copy()
    made.forget_acceptance()
    assert named(made.observation()[0])["confidence_1"] == 0
    np.testing.assert_array_equal(made.time_correction(), before)


def test_tiers_that_an_observation_cannot_describe():
    with pytest.raises(
        PolicyError, match="this engine has tier 8, and an observation describes tiers up to 7"
    ):
        features(EngineSpec(tiers=(0, 8)))


steps = st.integers(0, 2**32 - 1).map(lambda seed: _random_step(np.random.default_rng(seed)))


def _random_step(rng):
    num_steps = int(rng.choice(ENGINE.tiers))
    return step(
        rng.integers(0, num_steps + 1, rng.integers(1, 17)),
        num_steps,
        sum_seq_len_tokens=int(rng.integers(0, 2**40)),
        max_seq_len_tokens=int(rng.integers(0, 2**40)),
        waiting_requests=int(rng.integers(0, 2**30)),
        kv_use_ratio=None if rng.random() < 0.5 else float(rng.random()),
        step_ms=None if rng.random() < 0.5 else float(10 ** rng.uniform(-3, 5)),
        after_idle=bool(rng.random() < 0.5),
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(steps, min_size=1, max_size=12))
def test_every_entry_stays_within_its_bounds(seen):
    made = features()
    low, high = (np.array([getattr(entry, end) for entry in ENTRIES], np.float32) for end in ("low", "high"))
    for one in seen:
        made.update(summarise(one))
        observation = made.observation()
        assert observation.shape == (1, OBSERVATION_SIZE)
        assert observation.dtype == np.float32
        assert ((low <= observation) & (observation <= high)).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), steps), min_size=1, max_size=20))
def test_many_engines_at_once_are_as_each_alone(seen):
    """An engine without a new step in a round, and a reset of others, change nothing for an engine."""
    together, alone = features(n=3), [features() for _ in range(3)]
    for engine, one in seen:
        summary = summarise(one)
        padded = StepSummaries.none(3)
        rows = [np.array(getattr(padded, name)) for name in StepSummaries.__slots__]
        for row, name in zip(rows, StepSummaries.__slots__, strict=True):
            row[engine] = getattr(summary, name)[0]
        together.update(StepSummaries(*rows))
        alone[engine].update(summary)
        np.testing.assert_array_equal(together.observation()[engine], alone[engine].observation()[0])
    together.reset(np.array([False, True, False]))
    alone[1] = features()
    np.testing.assert_array_equal(together.observation(), [made.observation()[0] for made in alone])


def test_entries_are_named_once():
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names) == OBSERVATION_SIZE
    assert names.count(f"acceptance_{MAX_NUM_STEPS}") == 1
