"""The network: what it starts from, masks, and one forward pass worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specgov.policies.features import OBSERVATION_SIZE
from specgov.policies.network import (
    DRAFT_STAYS_WARM,
    NUM_TIERS,
    SCORES,
    Network,
    expected_shapes,
    following_the_model,
)

ALL = np.ones(NUM_TIERS, np.bool_)


def observation(relative_rates, stays_warm=True):
    seen = np.zeros((1, OBSERVATION_SIZE), np.float32)
    seen[0, DRAFT_STAYS_WARM] = stays_warm
    seen[0, SCORES] = relative_rates
    return seen


def test_before_training_the_network_follows_the_model():
    network = following_the_model((8, 8), scale=40.0)
    rates = [0.5, 0.9, 1.0, 0.95, 0.0, 0.8, 0.0, 0.7]
    logits = network.logits(observation(rates))
    np.testing.assert_allclose(logits[0], 40.0 * (np.array(rates) - 1.0), rtol=1e-5)
    assert network.best(observation(rates), ALL).tolist() == [2]


def test_tier_0_is_charged_where_the_draft_goes_cold():
    """0.03 is charged: tier 0 at 1 loses to tier 1 at 0.98, and wins against 0.96."""
    network = following_the_model((4,))
    near, far = ([1.0, other, *[0.0] * 6] for other in (0.98, 0.96))
    assert network.best(observation(near), ALL).tolist() == [0]
    assert network.best(observation(near, stays_warm=False), ALL).tolist() == [1]
    assert network.best(observation(far, stays_warm=False), ALL).tolist() == [0]


def test_a_tier_that_the_engine_lacks_is_never_chosen():
    network = following_the_model((4,))
    seen = observation([0.5, 0.9, 1.0, 0.95, 0.0, 0.8, 0.0, 0.7])
    mask = np.isin(np.arange(NUM_TIERS), (0, 5, 7))
    assert network.best(seen, mask).tolist() == [5]
    probabilities = network.probabilities(seen, mask)[0]
    assert probabilities[~mask].tolist() == [0.0] * 5
    assert probabilities.sum() == pytest.approx(1.0)


def test_a_forward_pass_by_hand():
    """One hidden unit that sees entry 0: z = (3 - 1) / 0.5 = 4, clipped to 2; h = tanh(0.5 x 2 - 1) = 0.

    With entry 0 at 1: z = 0, h = tanh(-1). The logit of tier 3 is 2 h + 0.25, those of the others are 0.
    """
    arrays = {name: np.zeros(shape, np.float32) for name, shape in expected_shapes((1,)).items()}
    arrays["sd"] += 1
    arrays["mean"][0], arrays["sd"][0] = 1.0, 0.5
    arrays["layer0.weight"][0, 0], arrays["layer0.bias"][0] = 0.5, -1.0
    arrays["head.weight"][3, 0], arrays["head.bias"][3] = 2.0, 0.25
    network = Network.from_tensors(arrays, 1, clip=2.0)
    seen = np.zeros((2, OBSERVATION_SIZE), np.float32)
    seen[:, 0] = 3.0, 1.0
    expected = np.zeros((2, NUM_TIERS))
    expected[:, 3] = 0.25, 2 * np.tanh(-1.0) + 0.25
    np.testing.assert_allclose(network.logits(seen), expected, atol=1e-6)
