"""The guard's books: whose steps count, what they are charged, and that promises pay for nothing."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.controller.guard.accounts import Accounts
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.latency import Latency
from specgov.controller.guard.losses import DOUBTS
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, EngineSpec, PolicyContext, StepObservation

TIERS = (0, 1, 3)
TOKENS, MS = (4.0, 6.0, 8.0), (8.0, 8.0, 16.0)
"""A batch of 4. Beside tier 1 as the baseline a step at tier 3 loses 4 of 12 tokens."""
ACCEPTED = {0: (0, 0, 0, 0), 1: (1, 1, 0, 0), 3: (2, 2, 0, 0)}


def accounts(lag_steps: int = 1, baseline: int = 1, **config: Any) -> Accounts:
    engine = EngineSpec(TIERS, max_running_requests=64, decision_lag_steps=lag_steps)
    context = PolicyContext(engine, np.random.default_rng(0), lambda: 0.0)
    settings = GuardConfig(**config)
    return Accounts(settings, context, tier(baseline), Latency(settings.targets("e")))


def tier(num_steps: int, tokens: Any = None, ms: Any = None) -> Choice:
    ranges = tier_ranges(EngineSpec(TIERS, max_running_requests=64), [(1, num_steps)])
    return Choice(ranges, propensity=1.0, expected_tokens=tokens, expected_ms=ms)


def made(num_steps: int, step_id: int = 1, **fields: Any) -> StepObservation:
    return StepObservation(
        step_id,
        fields.pop("batch_size", 4),
        num_steps,
        np.array(fields.pop("accepted", ACCEPTED[num_steps]), np.uint8),
        np.zeros(0, np.uint16),
        np.zeros(0, np.uint8),
        400,
        100,
        step_ms=fields.pop("step_ms", MS[TIERS.index(num_steps)]),
        **fields,
    )


def test_the_baselines_tier_needs_no_model_and_loses_nothing() -> None:
    books = accounts(loss_share=0.0)
    books.open(tier(1), 1, BatchView(4))
    assert books.estimates is None
    assert books.affords(1, 4)
    books.decided(1, 4)
    books.made(made(1), None)
    assert (books.budget.tokens, books.budget.gain_tokens, books.budget.baseline_tokens) == (5000.0, 0.0, 6.0)


def test_steps_of_nobody_do_not_count() -> None:
    books = accounts()
    books.close()
    books.made(made(3), None)
    assert books.budget.baseline_tokens == 0.0


def test_a_batch_that_changed_on_the_way_counts_all_the_same() -> None:
    """Tier 1 was decided for the batch of 4, as the baseline has it, but a batch of 8 came, which gets 3."""
    books = accounts()
    books.open(tier(1), 1, BatchView(4))
    books.decided(1, 4)
    books.made(made(3, batch_size=8, accepted=(2, 2, 0, 0, 2, 2, 0, 0)), None)
    assert books.estimates is None
    assert books.budget.baseline_tokens > 0
    assert books.budget.gain_tokens == pytest.approx(16.0 - books.budget.baseline_tokens)


def test_a_target_binds_the_baselines_own_tier_too() -> None:
    books = accounts(tpot_mean_ms=1.0)
    books.open(tier(1), 1, BatchView(4))
    assert books.estimates is not None


def test_what_a_target_leaves_of_a_tier_follows_the_measured_times() -> None:
    """Also where the policy's estimates stay: 16 ms are within 20 ms until steps take 1.5 times that.

    Then tier 1, the baseline's own, stands in for tier 3, and nothing is lost.
    """
    books = accounts(tpot_p99_ms=20.0)
    policys = tier(3, np.array(TOKENS), np.array(MS))
    for step_id in range(1, 100):
        books.open(policys, 3, BatchView(4))
        assert step_id > 1 or books.outlook(3, 4).tokens == 8.0
        books.made(made(3, step_id, step_ms=24.0), None)
    books.open(policys, 3, BatchView(4))
    assert books.outlook(3, 4).tokens == books.outlook(3, 4).baseline_tokens


def test_what_is_not_known_of_the_baseline_is_charged_beside_the_loss() -> None:
    """The first step ever, at tier 0 where the baseline is tier 3, of which nothing is known yet.

    Charged is what tier 3 brings at ``DOUBTS`` standard deviations above its estimate.
    """
    books = accounts(baseline=3, loss_share=0.0)
    books.open(tier(0), 0, BatchView(4))
    estimates = books.estimates
    assert estimates is not None
    doubt = books._estimator.doubt(estimates, 0, 2)
    books.made(made(0, step_ms=estimates.ms[0]), None)
    would = estimates.tokens[2] / estimates.tokens[0] * 4 * estimates.ms[0] / estimates.ms[2]
    assert books.budget.gain_tokens == pytest.approx(4.0 - would)
    assert books.budget.tokens == pytest.approx(5000.0 - (would * math.exp(DOUBTS * doubt) - 4.0))


def test_doubt_that_costs_much_is_ended_by_a_look_at_the_baseline() -> None:
    """Tier 3 is good: 14 tokens in 11 ms, beside 8 in 9 at tier 1. Until that ran, nobody knows.

    Once a tenth of the allowance was charged for that, the baseline runs for eight steps, and never again.
    """
    books = accounts(loss_share=0.0, allowance_tokens=300.0)
    ran = []
    for step_id in range(1, 200):
        books.open(tier(3), 3, BatchView(4, 400, 100))
        num_steps = 3 if books.affords(3, 4) else 1
        books.decided(num_steps, 4)
        ran.append(num_steps)
        step = made(
            num_steps, step_id, accepted=(num_steps, num_steps, num_steps, 1), step_ms=8.0 + num_steps
        )
        books.made(step, None)
        books.learn(step)
        assert books.budget.tokens > 0
    first = ran.index(1)
    assert 0 < first < 30
    assert ran == [3] * first + [1] * 8 + [3] * (199 - first - 8)
    assert books.budget.tokens == 300.0


def test_a_policys_own_estimates_are_charged_as_they_are() -> None:
    books = accounts(loss_share=0.0)
    books.open(tier(3, np.array(TOKENS), np.array(MS)), 3, BatchView(4))
    books.made(made(3), None)
    assert books.budget.tokens == 5000.0 - 4.0


def test_steps_without_live_requests_are_taken_as_expected() -> None:
    books = accounts(loss_share=0.0)
    books.open(tier(3, np.array(TOKENS), np.array(MS)), 3, BatchView(4))
    books.made(made(3, accepted=()), None)
    assert (books.budget.gain_tokens, books.budget.baseline_tokens) == (-4.0, 12.0)


@given(
    claimed=st.lists(st.floats(8.0, 16.0), min_size=1, max_size=60),
    lag=st.integers(1, 5),
    allowance=st.floats(20.0, 60.0),
)
def test_whatever_is_promised_the_budget_is_not_overdrawn(
    claimed: list[float], lag: int, allowance: float
) -> None:
    """Each step at tier 3 loses 4 tokens, up to five of them unknown yet, which the allowance can pay.

    What it claims of tier 3 is anything from the truth to a gain.
    """
    books = accounts(lag, loss_share=0.0, allowance_tokens=allowance)
    under_way: deque[int] = deque()
    least = allowance
    for step_id, tokens in enumerate(claimed, 1):
        books.open(tier(3, np.array([4.0, 6.0, tokens]), np.array(MS)), 3, BatchView(4))
        num_steps = 3 if books.affords(3, 4) else 1
        books.decided(num_steps, 4)
        under_way.append(num_steps)
        if len(under_way) >= lag:
            books.made(made(under_way.popleft(), step_id), None)
            least = min(least, books.budget.tokens)
    assert least >= 0.0
