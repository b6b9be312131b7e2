"""Canaries: who decides, with which probability, and what ends them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fixed_rule import Fixed

from specgov.controller.canary import Canary
from specgov.controller.decision import DecisionBuilder
from specgov.policies.types import BatchView, EngineSpec, StepObservation

ENGINE = EngineSpec((0, 1, 3, 5), max_running_requests=64)


class Draws:
    """A generator that draws the given numbers, the last one for ever."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]


def make_canary(
    policy: Fixed, candidate: Fixed, share: float = 0.25, block_steps: int = 2, draws: Any = None
) -> Canary:
    builder = DecisionBuilder(ENGINE, candidate, 50, 1000)
    return Canary("candidate", candidate, policy, builder, share, block_steps, draws or Draws(0.9))


def step(tokens: int = 4, ms: float | None = 10.0) -> StepObservation:
    accepted = np.zeros(tokens, np.uint8)
    return StepObservation(1, tokens, 0, accepted, accepted[:0], accepted[:0], 100, 100, step_ms=ms)


NOT_THEIRS, THEIRS = 0.9, 0.1


def test_blocks_are_drawn_and_last() -> None:
    canary = make_canary(Fixed(0), Fixed(3), draws=Draws(NOT_THEIRS, THEIRS, NOT_THEIRS))
    seen = []
    for _ in range(6):
        seen.append(canary.choose(BatchView(4)).num_steps_for(4))
        canary.measure(step(), 0)
    assert seen == [0, 0, 3, 3, 0, 0]


def test_the_share_is_that_of_the_blocks() -> None:
    # Binomial(4000, 0.25): standard deviation 27; the generator is seeded.
    canary = make_canary(Fixed(0), Fixed(3), block_steps=1, draws=np.random.default_rng(1))
    theirs = 0
    for _ in range(4000):
        theirs += canary.by_candidate
        canary.measure(step(), 0)
    assert abs(theirs - 1000) < 3 * 27


@pytest.mark.parametrize(
    ("policy", "candidate", "whose", "expected"),
    [
        (Fixed(0), Fixed(3), NOT_THEIRS, 0.75),
        (Fixed(0), Fixed(3), THEIRS, 0.25),
        (Fixed(3), Fixed(3), NOT_THEIRS, 1.0),
        (Fixed(3), Fixed(3), THEIRS, 1.0),
        (Fixed(3, 0.4), Fixed(3), NOT_THEIRS, 0.75 * 0.4 + 0.25),
        (Fixed(3, 0.4), Fixed(3), THEIRS, 0.75 * 0.4 + 0.25),
        (Fixed(3, 0.4), Fixed(5), NOT_THEIRS, 0.75 * 0.4),
        # The policy might have drawn 5 too, with a probability that it does not tell.
        (Fixed(3, 0.4), Fixed(5), THEIRS, None),
        (Fixed(3, None), Fixed(5), NOT_THEIRS, None),
        (Fixed(3, None), Fixed(3), THEIRS, None),
        (Fixed(3), Fixed(3, None), NOT_THEIRS, None),
    ],
)
def test_propensity(policy: Fixed, candidate: Fixed, whose: float, expected: float | None) -> None:
    found = make_canary(policy, candidate, draws=Draws(whose)).choose(BatchView(4)).propensity
    assert found == (expected if expected is None else pytest.approx(expected))


def test_propensities_are_frequencies() -> None:
    """Over many canaries the chosen tier comes up as often as its propensity says."""
    rng = np.random.default_rng(3)
    chosen = [make_canary(Fixed(0), Fixed(3), share=0.3, draws=rng).choose(BatchView(4)) for _ in range(4000)]
    for tier, expected in ((0, 0.7), (3, 0.3)):
        of_tier = [choice.propensity for choice in chosen if choice.num_steps_for(4) == tier]
        assert of_tier == pytest.approx([expected] * len(of_tier))
        assert abs(len(of_tier) / 4000 - expected) < 3 * math.sqrt(0.21 / 4000)


def test_both_see_every_step_and_forget() -> None:
    policy, candidate = Fixed(0), Fixed(3)
    canary = make_canary(policy, candidate)
    canary.observe(step())
    canary.forget()
    assert (policy.observed, candidate.observed, policy.forgot, candidate.forgot) == (1, 1, 1, 1)
    assert canary.estimates() == {"k": 0.0}


@pytest.mark.parametrize("where", ["observe", "choose", "forget"])
def test_a_candidate_that_fails_ends_the_canary_and_nothing_else(where: str) -> None:
    policy, candidate = Fixed(0), Fixed(3, fails={where})
    canary = make_canary(policy, candidate, draws=Draws(THEIRS))
    canary.observe(step())
    choice = canary.choose(BatchView(4))
    canary.forget()
    assert canary.ended.startswith("the candidate failed: ArithmeticError: ")
    assert (policy.observed, policy.forgot) == (1, 1)
    if where == "choose":
        assert choice.num_steps_for(4) == 0


def test_a_candidate_that_chooses_what_the_engine_lacks_ends_the_canary() -> None:
    canary = make_canary(Fixed(0), Fixed(4), draws=Draws(NOT_THEIRS))
    assert canary.choose(BatchView(4)).num_steps_for(4) == 0
    assert "chose [4]" in canary.ended


def test_a_step_counts_for_the_block_whose_decision_it_followed() -> None:
    canary = make_canary(Fixed(0), Fixed(3), draws=Draws(THEIRS, NOT_THEIRS))
    canary.decided(1)
    canary.measure(step(), 0)  # the engine's own rule
    canary.measure(step(), 1)  # 4 tokens in 10 ms; the next block begins
    canary.decided(2)
    canary.measure(step(tokens=6), 1)  # still follows the first block's decision
    canary.measure(step(tokens=2), 2)
    canary.measure(step(ms=None), 2)  # not timed
    canary.measure(step(), 99)  # not remembered
    state = canary.state()
    assert (state.candidate_blocks, state.active_blocks) == (1, 1)
    assert state.candidate_tokens_per_s == pytest.approx(10 / 0.020)
    assert state.active_tokens_per_s == pytest.approx(2 / 0.010)
    assert not state.HasField("difference")
