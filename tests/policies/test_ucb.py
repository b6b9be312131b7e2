"""The three UCB rules on traces worked out by hand.

Two requests at tiers 0 and 1: rewards are 1 / 4 = 0.25 at tier 0 (4 ms) and 2 / 5 = 0.4 at tier 1 (5 ms, all
accepted), so that 0.25 / 0.4 = 0.625 of the best mean.
"""

from collections.abc import Callable

import pytest

from specgov.policies.bandit import Octaves
from specgov.policies.types import BatchView, EngineSpec, Policy, StepObservation

TIER_0, TIER_1 = (0, [0, 0], 4.0), (1, [1, 1], 5.0)


@pytest.fixture
def trace(
    make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation]
) -> Callable[..., list[int]]:
    """The tiers that a rule chooses for two requests after each of the given steps."""

    def play(text: str, *steps: tuple[int, list[int], float | None]) -> list[int]:
        rule = make_rule(text, (0, 1))
        chosen = [rule.choose(BatchView(2)).num_steps_for(2)]
        for step_id, (num_steps, accepted, step_ms) in enumerate(steps, 1):
            rule.observe(make_step(step_id, num_steps, accepted, step_ms))
            chosen.append(rule.choose(BatchView(2)).num_steps_for(2))
        return chosen

    return play


def test_ucb(trace: Callable[..., list[int]]) -> None:
    # Tier 0 first, then tier 1, then by index with B = 1:
    # N = (1, 1): 0.625 and 1 with the same bonus: tier 1.
    # N = (1, 2), ln 3 = 1.099: 0.625 + 1.482 = 2.107 against 1 + 1.048: tier 0.
    # N = (2, 2), ln 4: the same bonus again: tier 1.
    assert trace("ucb:1", TIER_0, TIER_1, TIER_1, TIER_0) == [0, 1, 1, 0, 1]


def test_discounted_ucb(trace: Callable[..., list[int]]) -> None:
    # Discount 0.5: N = (0.5, 1), xi ln 1.5 = 0.6 * 0.405 = 0.2433.
    # 0.625 + 2 sqrt(0.4866) = 2.020 against 1 + 2 sqrt(0.2433) = 1.987: tier 0.
    # Then N = (1.25, 0.5), xi ln 1.75 = 0.3358: 0.625 + 1.037 against 1 + 1.639: tier 1.
    assert trace("discounted_ucb:1:0.5", TIER_0, TIER_1, TIER_0) == [0, 1, 0, 1]


def test_sliding_ucb(trace: Callable[..., list[int]]) -> None:
    # With a window of 2, two rewards of tier 1 push tier 0 out, and what has no reward comes first.
    assert trace("sliding_ucb:1:2", TIER_0, TIER_1, TIER_1) == [0, 1, 1, 0]


def test_a_step_without_a_valid_time_teaches_nothing(trace: Callable[..., list[int]]) -> None:
    assert trace("ucb:1", (0, [0, 0], None), (0, [], 4.0)) == [0, 0, 0]


def test_octaves_learn_apart(
    make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation]
) -> None:
    rule = make_rule("ucb", (0, 1))
    rule.observe(make_step(1, 0, [0, 0], 4.0))
    choice = rule.choose(BatchView(2))
    assert [choice.num_steps_for(size) for size in (1, 2, 3)] == [0, 1, 0]
    assert rule.estimates() == {"rate_from_batch_2_k0": 0.25}


def test_octaves_end_with_powers_of_two() -> None:
    octaves = Octaves(EngineSpec((0,), max_running_requests=10))
    assert octaves.firsts == (1, 2, 3, 5, 9)
    assert [octaves.index(size) for size in (0, 1, 2, 3, 4, 5, 8, 9, 10, 99)] == [
        0,
        0,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        4,
    ]
