"""The rule that measures: each tier in turn."""

from __future__ import annotations

import numpy as np
import pytest

from specgov.policies.cycle import Cycle
from specgov.policies.types import BatchView, EngineSpec, PolicyContext, PolicyError, Reason


def cycle(steps: int) -> Cycle:
    engine = EngineSpec((0, 1, 3), max_running_requests=8)
    return Cycle(PolicyContext(engine, np.random.default_rng(0), lambda: 0.0), Cycle.Config(steps))


def test_each_tier_has_its_turn_by_the_step() -> None:
    rule = cycle(2)
    chosen = [rule.choose(BatchView(5, step_id=step)).num_steps_for(5) for step in range(8)]
    assert chosen == [0, 0, 1, 1, 3, 3, 0, 0]
    assert rule.choose(BatchView(5)).reason is Reason.EXPLORATION
    rule.forget()
    assert rule.estimates() == {}


def test_turns_have_a_length() -> None:
    with pytest.raises(PolicyError, match="1 or more"):
        Cycle.Config(0)
