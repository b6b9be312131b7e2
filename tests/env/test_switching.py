"""What a change of tier costs, by hand: 4 ms, 1 ms for each draft step and 0.01 ms for the request."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specgov.env.server import Server, SimulationError


def test_a_step_at_a_new_tier_costs_more(small: SimpleNamespace) -> None:
    config = small.config(classes=(small.never,), switch_ms=5.0)
    server = Server(config, small.listed([(0.0, 10, 9)]))
    tiers = (3, 3, 1, 0, 0)
    took = [float(server.step(np.array([tier])).step_ms[0]) for tier in tiers]
    # The first step switches from nothing; of the others two have another tier than the one before.
    assert took == pytest.approx([7.01, 7.01, 5.01 + 5, 4.01 + 5, 4.01])
    # What the truth says of a tier is its own cost.
    assert server.truth().expected_ms[0].tolist() == pytest.approx([4.01, 5.01, 7.01])
    server.reset()
    assert server.step(np.array([1])).step_ms[0] == pytest.approx(5.01)


def test_switches_are_counted_by_environment(small: SimpleNamespace) -> None:
    config = small.config(classes=(small.never,), switch_ms=5.0)
    server = Server(config, small.listed([(0.0, 10, 9)]), n_envs=2)
    server.step(np.array([1, 3]))
    assert server.step(np.array([1, 1])).step_ms.tolist() == pytest.approx([5.01, 10.01])


def test_a_switch_cannot_gain_time(small: SimpleNamespace) -> None:
    with pytest.raises(SimulationError, match="switch_ms"):
        small.config(switch_ms=-1.0)
