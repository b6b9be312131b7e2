"""Rewards of steps whose values are worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specgov.env.rewards import LatencyReward, RateReward, SloReward
from specgov.env.simulation import ServingSimulation


def step(tokens, step_ms, prefill_ms=0.0):
    return SimpleNamespace(
        output_tokens=np.array([tokens]), step_ms=np.array([step_ms]), prefill_ms=np.array([prefill_ms])
    )


NOTHING = np.zeros(1)


def test_rate_is_tokens_less_what_the_time_could_have_brought():
    """With a time constant so long that nothing fades: λ is all tokens over all busy time so far."""
    reward = RateReward(1, time_constant_s=1e9)
    assert reward.reward(step(8, 4.0), NOTHING)[0] == 0.0
    assert reward.reward(step(12, 5.0), NOTHING)[0] == pytest.approx(12 - 2000 * 0.005)
    # λ = 20 tokens / 9 ms; prefill counts as time.
    assert reward.reward(step(5, 6.0, prefill_ms=3.0), NOTHING)[0] == pytest.approx(5 - 20)
    reward.reset(np.array([True]))
    assert reward.reward(step(8, 4.0), NOTHING)[0] == 0.0


def test_rate_fades_with_busy_time():
    """After ln 2 time constants an old step weighs half: λ = (100/2 + 10) / (0.1/2 + 0.1) s."""
    reward = RateReward(1, time_constant_s=0.1 / np.log(2))
    reward.reward(step(100, 100.0), NOTHING)
    reward.reward(step(10, 100.0), NOTHING)
    assert reward.reward(step(0, 10.0), NOTHING)[0] == pytest.approx(-60 / 0.15 * 0.01)


def test_rate_of_equal_steps_is_nothing():
    reward = RateReward(1)
    assert [reward.reward(step(7, 3.5), NOTHING)[0] for _ in range(4)] == pytest.approx([0, 0, 0, 0])


def test_slo_counts_tokens_of_requests_that_met_both_targets():
    """Targets 1000 ms and 10 ms a token: in time; first token late; tokens slow; just in time, elsewhere."""
    finished = SimpleNamespace(
        env=np.array([0, 0, 0, 2]),
        arrival_ns=np.array([0, 0, 0, 0]),
        first_token_ns=np.array([5e8, 1.001e9, 0, 1e9]),
        finish_ns=np.array([6e8, 1.1e9, 1.01e9, 2e9]),
        output_tokens=np.array([20, 50, 100, 100]),
    )
    reward = SloReward(3, ttft_ms=1000.0, tpot_ms=10.0)
    assert reward.reward(SimpleNamespace(finished=finished), NOTHING).tolist() == [20, 0, 100]


def test_latency_sums_up_to_the_time_that_requests_spent():
    assert LatencyReward(2).reward(None, np.array([0.5, 0.0])).tolist() == [-0.5, 0.0]
    simulation = ServingSimulation("flash_crowd", n=2, reward="latency")
    total = sum(simulation.step(np.ones(2, int)).reward for _ in range(300))
    np.testing.assert_allclose(total, -simulation.server.request_ns * 1e-9)
