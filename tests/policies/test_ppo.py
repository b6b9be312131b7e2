"""The rule ``ppo``: what the network says, for the engine's tiers and for every batch size."""

from __future__ import annotations

import numpy as np
import pytest

from specgov.policies.bundle import Bundle, Card, bundle_names, load_bundle, save_bundle
from specgov.policies.features import Features, summarise
from specgov.policies.model import expected_accept_length
from specgov.policies.network import NUM_TIERS, following_the_model
from specgov.policies.ppo import batch_grid
from specgov.policies.profile import load_profile
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, EngineSpec, PolicyContext, StepObservation

PROFILE = load_profile("h200-llama-3.1-8b")
ENGINE = EngineSpec((0, 1, 3, 7), (1, 2, 4, 8, 16, 32, 64), max_running_requests=100)


def step(step_id, accepted, num_steps, step_ms=9.0):
    return StepObservation(
        step_id,
        len(accepted),
        num_steps,
        np.array(accepted, np.uint8),
        np.zeros(0, np.uint16),
        np.zeros(0, np.uint8),
        600 * len(accepted),
        900,
        step_ms=step_ms,
    )


@pytest.fixture
def follower(tmp_path):
    """A bundle that is not trained: it follows the model."""
    save_bundle(Bundle(Card("follow", (4,), 5.0), following_the_model((4,))), tmp_path / "follow")
    return tmp_path / "follow"


def rule(bundle, engine=ENGINE, step_time=PROFILE.step_time):
    return make_policy(
        f"ppo:{bundle}", PolicyContext(engine, np.random.default_rng(0), lambda: 0.0, step_time)
    )


def test_an_untrained_network_takes_the_tier_with_the_largest_expected_rate(follower):
    """At every batch size: accept length by the estimates over the profile's step time, corrected."""
    policy = rule(follower)
    features = Features(ENGINE, PROFILE.step_time)
    rng = np.random.default_rng(1)
    for step_id in range(1, 40):
        seen = step(step_id, rng.integers(0, 4, 20), 3)
        policy.observe(seen)
        features.update(summarise(seen))
    choice = policy.choose(BatchView.of(seen))
    tiers = list(ENGINE.tiers)
    accept_length = expected_accept_length(features.acceptance()[0])[tiers]
    correction = np.exp(features.time_correction()[0])[tiers]
    for size in (1, 4, 16, 20, 32, 64, 100):
        ms = PROFILE.step_time.step_ms(size, np.array(tiers), 600 * size) * correction
        assert choice.num_steps_for(size) == tiers[int(np.argmax(accept_length / ms))], size
    np.testing.assert_allclose(choice.expected_tokens, 20 * accept_length)
    np.testing.assert_allclose(
        choice.expected_ms, PROFILE.step_time.step_ms(20, np.array(tiers), 12_000) * correction
    )


def test_only_tiers_of_the_engine_are_chosen(follower):
    engine = EngineSpec((1, 5), max_running_requests=40)
    policy = rule(follower, engine)
    assert {r.num_steps for r in policy.choose(BatchView(1)).ranges} <= {1, 5}
    policy.observe(step(1, [5, 0, 2], 5))
    choice = policy.choose(BatchView(3, 1800, 900))
    assert {r.num_steps for r in choice.ranges} <= {1, 5}
    assert (choice.ranges[0].batch_size_min, choice.ranges[-1].batch_size_max) == (1, 40)


def test_without_a_profile_it_decides_all_the_same(follower):
    policy = rule(follower, step_time=None)
    policy.observe(step(1, [3] * 8, 3))
    assert policy.choose(BatchView(8, 4800, 900)).num_steps_for(8) in ENGINE.tiers


def test_forgetting_returns_acceptance_to_the_prior(follower):
    policy = rule(follower)
    policy.observe(step(1, [3] * 8, 3))
    assert policy.estimates()["acceptance_1"] > 0.6
    policy.forget()
    assert policy.estimates()["acceptance_1"] == pytest.approx(0.6)


def test_the_present_batch_size_gives_the_observation_itself():
    """What is asked of the network for the batch at hand is bit by bit what training showed it."""
    features = Features(ENGINE, PROFILE.step_time)
    features.update(summarise(step(1, [3, 1, 0, 2, 3], 3)))
    features.update(summarise(step(2, [1, 1, 0], 1)))
    looked = features.at_batch_sizes(np.array([3, 12])).observation()
    np.testing.assert_array_equal(looked[0], features.observation()[0])
    bigger = Features(ENGINE, PROFILE.step_time)
    bigger.update(summarise(step(1, [3, 1, 0, 2, 3], 3)))
    bigger.update(summarise(step(2, [1, 1, 0] * 4, 1)))
    same = np.isclose(looked[1], bigger.observation()[0])
    # Four times the batch has the same mean context and live share, but four times the evidence.
    assert same[:14].all()
    with pytest.raises(ValueError, match="one engine"):
        Features(ENGINE, PROFILE.step_time, 2).at_batch_sizes(np.array([1]))


def test_the_grid_of_batch_sizes():
    assert batch_grid(EngineSpec((0, 1), (1, 4, 8), max_running_requests=8)).tolist() == [1, 4, 8]
    assert batch_grid(EngineSpec((0, 1), (1, 4, 8, 512), max_running_requests=20)).tolist() == [1, 4, 8, 20]
    beyond = batch_grid(EngineSpec((0, 1), (1, 4, 8), max_running_requests=20)).tolist()
    assert beyond == [1, 4, 8, 9, 11, 13, 16, 19, 20]  # 8 x 2^(1/4) = 9.5, then 11.3, 13.5, 16, 19.0
    assert batch_grid(EngineSpec((0, 1), max_running_requests=1)).tolist() == [1]
    assert batch_grid(EngineSpec((0, 1)))[-1] == 1024


@pytest.mark.parametrize("name", bundle_names())
def test_bundles_that_are_shipped(name):
    bundle = load_bundle(name)
    assert bundle.card.name == name
    assert bundle.card.training["command"].startswith("specgov train --policy ppo")
    assert bundle.card.profiles == {"h200-llama-3.1-8b": PROFILE.hash}
    assert sum(tensor.nbytes for tensor in bundle.network.tensors().values()) < 200_000
    assert bundle.network.head_weight.shape[0] == NUM_TIERS


def test_there_is_a_default_bundle():
    assert "default" in bundle_names()
