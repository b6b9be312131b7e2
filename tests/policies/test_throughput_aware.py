"""The throughput-aware rule on a trace worked out by hand."""

from collections.abc import Callable

import pytest

from specgov.policies.throughput_aware import PositionWindows
from specgov.policies.types import BatchView, Policy, PolicyError, StepObservation

RULE = "throughput_aware:window_steps=2:update_interval=2"
COSTS = {0: 8.0, 1: 10.0, 3: 14.0}


def test_a_trace(make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation]) -> None:
    rule = make_rule(RULE, (0, 1, 3), COSTS)
    chosen = []

    def step(num_steps: int, accepted: list[int]) -> None:
        rule.observe(make_step(len(chosen) + 1, num_steps, accepted))
        chosen.append(rule.choose(BatchView(4, 400)).num_steps_for(4))

    assert rule.choose(BatchView(4, 400)).num_steps_for(4) == 3  # the middle of (1, 3)
    # More than 0, 1, 2 accepted: 1/2, 1/4, 1/4. Scores 1.5 / 10 = 0.15 and 2 / 14 = 0.143: 5 % is not enough.
    step(3, [3, 1, 0, 0])
    step(3, [3, 1, 0, 0])
    # The window is now (1/2, 1/4, 1/4), (1/2, 0, 0). Due after two results: 0.15 against 1.75 / 14 = 0.125.
    step(3, [1, 1, 0, 0])
    step(3, [1, 1, 0, 0])
    # Tier 1 accepts all: p = 1, and 1, 1 by extrapolation. 4 / 14 = 0.286 against 2 / 10.
    step(1, [1, 1, 1, 1])
    step(1, [1, 1, 1, 1])
    assert chosen == [3, 3, 3, 1, 1, 3]
    # Positions 1 and 2 were emptied by the switch down and have no data of their own since.
    assert rule.estimates() == {"survival_1": 1.0, "survival_2": 1.0, "survival_3": 1.0}


def test_no_review_before_the_windows_of_the_present_tier_are_full(
    make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation]
) -> None:
    rule = make_rule("throughput_aware:window_steps=9:update_interval=2", (0, 1, 3), COSTS)
    chosen = []
    for step_id in range(1, 11):
        rule.observe(make_step(step_id, 3, [0, 0]))
        chosen.append(rule.choose(BatchView(2, 200)).num_steps_for(2))
    assert chosen == [3] * 9 + [1]  # full after 9, the next review comes after 10


def test_extrapolation_is_geometric() -> None:
    windows = PositionWindows(4, 2)
    assert windows.rates() == []
    windows.update(_counts(2, 2, 2, 2, 1, 0, 0, 0, 0, 0), 2)  # more than 0: 5 of 10, more than 1: 4 of 10
    # alpha = (0.4 / 0.5)^(1/1) = 0.8, then (0.32 / 0.5)^(1/2) = 0.8
    assert windows.rates() == pytest.approx([0.5, 0.4, 0.32, 0.256])
    windows.clear_from(1)
    assert windows.rates()[:2] == [0.5, 0.5]


def test_nothing_accepted_leaves_deeper_tiers_without_a_score() -> None:
    windows = PositionWindows(3, 2)
    windows.update(_counts(0, 0), 1)
    assert windows.rates() == [0.0, 0.0]


def test_tier_0_is_used_only_where_there_is_no_other(make_rule: Callable[..., Policy]) -> None:
    assert make_rule(RULE, (0,)).choose(BatchView(4)).num_steps_for(4) == 0
    with pytest.raises(PolicyError, match="initial_num_steps must be one of the positive tiers"):
        make_rule("throughput_aware:0", (0, 1, 3))


def _counts(*accepted: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.array(accepted, np.uint8)
