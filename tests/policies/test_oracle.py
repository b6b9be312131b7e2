"""The oracle's choice, by hand."""

import numpy as np

from specgov.policies.oracle import Oracle, best_tiers
from specgov.policies.types import BatchView, EngineSpec, PolicyContext, TierRange

TIERS = np.array([0, 1, 3])


def test_the_tier_with_the_largest_rate() -> None:
    # 4 / 5 = 0.8, 7 / 7 = 1, 9 / 10 = 0.9 tokens a ms: num_steps 1; below 4 / 4 = 1, 6 / 6 = 1: the smaller.
    tokens = np.array([[4.0, 7.0, 9.0], [4.0, 6.0, 3.0]])
    ms = np.array([[5.0, 7.0, 10.0], [4.0, 6.0, 4.0]])
    assert best_tiers(TIERS, tokens, ms).tolist() == [1, 0]


def test_an_empty_batch_takes_the_smallest_tier() -> None:
    assert best_tiers(TIERS, np.zeros((1, 3)), np.zeros((1, 3))).tolist() == [0]


def test_the_rule_asks_at_every_choice() -> None:
    answers = iter(
        [
            (np.array([4.0, 7.0, 9.0]), np.array([5.0, 7.0, 10.0])),
            (np.array([4.0, 7.0, 9.0]), np.array([5.0, 7.0, 8.0])),
        ]
    )
    context = PolicyContext(
        EngineSpec(TIERS.tolist(), max_running_requests=64), np.random.default_rng(0), float
    )
    oracle = Oracle(context, lambda: next(answers))
    assert oracle.choose(BatchView(4)).ranges == (TierRange(1, 64, 1),)
    choice = oracle.choose(BatchView(4))
    assert choice.ranges == (TierRange(1, 64, 3),)  # 9 / 8
    assert choice.expected_tokens is not None
    assert choice.expected_tokens.tolist() == [4.0, 7.0, 9.0]
