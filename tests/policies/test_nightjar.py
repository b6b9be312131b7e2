"""Nightjar's blocks, bins and switching cost on traces worked out by hand.

Two requests at tiers 0 and 1 of an engine of at most two: octave 0 is batch size 1, octave 1 is 2. Goodput
is 2 / 4 = 0.5 tokens a ms at tier 0 and 4 / 5 = 0.8 at tier 1, so the latencies are 2 and 1.25 ms.
"""

from collections.abc import Callable
from typing import Any

import pytest

from specgov.policies.types import BatchView, Choice, Policy, PolicyError, Reason, StepObservation

TIER_0, TIER_1 = (0, [0, 0], 4.0), (1, [1, 1], 5.0)


def play(
    rule: Policy, make_step: Callable[..., StepObservation], *steps: tuple[int, list[int], float]
) -> list[Choice]:
    choices = [rule.choose(BatchView(2))]
    for step_id, (num_steps, accepted, step_ms) in enumerate(steps, 1):
        rule.observe(make_step(step_id, num_steps, accepted, step_ms))
        choices.append(rule.choose(BatchView(2)))
    return choices


def tiers(choices: list[Choice]) -> list[int]:
    return [choice.num_steps_for(2) for choice in choices]


def test_blocks_of_1_2_4_bins_explore_with_probability_1_over_the_bin(
    make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation], draws: Callable[..., Any]
) -> None:
    # Block 1, bin 1 of both octaves explores: two integers. Then octave 1 alone goes on:
    # block 2 bin 1 explores (random 0.9 < 1): tier 1. Block 2 bin 2 (1/2): 0.6 exploits: tier 1.
    # Block 3 bin 1 explores: tier 0. Block 3 bin 2 (1/2): 0.4 explores: tier 0. Bin 3 (1/3): 0.4 exploits: 1.
    rng = draws(integers=[0, 0, 1, 0, 0], random=[0.9, 0.6, 0.9, 0.4, 0.4])
    rule = make_rule("nightjar:1", (0, 1), largest=2, rng=rng)
    choices = play(rule, make_step, TIER_0, TIER_1, TIER_1, TIER_0, TIER_0)
    assert tiers(choices) == [0, 1, 1, 0, 0, 1]
    explores = [choice.reason == Reason.EXPLORATION for choice in choices]
    assert explores == [True, True, False, True, True, False]
    # Exploring: 1/2 each. Bin 2: tier 1 with 1/2 + 1/2 1/2, tier 0 with 1/4. Bin 3: 2/3 + 1/3 1/2.
    assert [choice.propensity for choice in choices] == pytest.approx([0.5, 0.5, 0.75, 0.5, 0.25, 5 / 6])
    assert rule.estimates() == {"goodput_from_batch_2_k0": 0.5, "goodput_from_batch_2_k1": 0.8}


@pytest.mark.parametrize(
    ("warm", "option", "chosen"),
    [
        (True, "", 1),  # 1.25 against 2
        (False, "", 0),  # 1.25 + 17.87 against 2
        (True, ":switch_ms=0.7", 1),  # 1.95
        (True, ":switch_ms=0.8", 0),  # 2.05
    ],
)
def test_switching_on_costs(
    make_rule: Callable[..., Policy],
    make_step: Callable[..., StepObservation],
    draws: Callable[..., Any],
    warm: bool,
    option: str,
    chosen: int,
) -> None:
    rng = draws(integers=[0, 1, 0], random=[0.9, 0.6])
    rule = make_rule(f"nightjar:1{option}", (0, 1), largest=2, rng=rng, draft_kv_stays_warm=warm)
    assert tiers(play(rule, make_step, TIER_1, TIER_0)) == [1, 0, chosen]


def test_a_bin_keeps_its_tier(
    make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation], draws: Callable[..., Any]
) -> None:
    rule = make_rule("nightjar:3", (0, 1), largest=2, rng=draws(integers=[0, 0, 1], random=[0.9]))
    assert tiers(play(rule, make_step, TIER_0, TIER_0, TIER_0)) == [0, 0, 0, 1]


def test_options(make_rule: Callable[..., Policy]) -> None:
    with pytest.raises(PolicyError, match="bin_steps must be 1 or more, not 0"):
        make_rule("nightjar:0", (0, 1))
    with pytest.raises(PolicyError, match="switch_ms must be 0 or more"):
        make_rule("nightjar:switch_ms=-1", (0, 1))
