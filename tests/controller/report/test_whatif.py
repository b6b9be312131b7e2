"""What other rules would have given: by hand, where chance can say it, and where it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from specgov.controller.report.model import Model, spent_ms
from specgov.controller.report.steps import Steps
from specgov.controller.report.summary import totals
from specgov.controller.report.whatif import BEST_EACH_STEP, WhatIf, WhatIfs, what_ifs

TIERS = (0, 3)


def make_steps(batch_size: np.ndarray, num_steps: np.ndarray, propensity: np.ndarray, seed: int = 0) -> Steps:
    """Steps that bring 1 token a request at tier 0 and 2 at tier 3, with 2 % of scatter in their times.

    Tier 0 takes 5 ms, tier 3 takes 6 up to batch size 8 and 15 above.
    """
    n = len(batch_size)
    ms = np.where(num_steps == 0, 5.0, np.where(batch_size <= 8, 6.0, 15.0))
    nothing = np.full((n, 2), np.nan)
    return Steps(
        engine={"engine_id": "e"},
        tiers=TIERS,
        policies=("greedy",),
        time_s=np.arange(n) / 100.0,
        batch_size=batch_size,
        num_steps=num_steps,
        sum_seq_len_tokens=512 * batch_size,
        waiting_requests=np.zeros(n, dtype=np.int64),
        tokens=batch_size * np.where(num_steps == 0, 1, 2),
        ms=ms * np.exp(np.random.default_rng(seed).normal(0, 0.02, n)),
        own_rule=np.zeros(n, dtype=np.bool_),
        propensity=propensity,
        decided=num_steps,
        survived=np.zeros((n, 4), dtype=np.uint16),
        expected_tokens=nothing,
        expected_ms=nothing,
        events=(),
        events_left_out=0,
        reports_dropped=0,
    )


def model_of(steps: Steps, error: float = 1.0) -> Model:
    """The truth, but for an error in the tokens."""
    size = steps.batch_size[:, None]
    ms = np.where(size <= 8, np.array([[5.0, 6.0]]), np.array([[5.0, 15.0]]))
    return Model(error * size * np.array([[1.0, 2.0]]), ms, "the truth")


def alternating(n: int = 8000) -> np.ndarray:
    """Batch sizes 4 and 32 in turns of 400 steps."""
    return np.where(np.arange(n) // 400 % 2 == 0, 4, 32)


def rule(found: WhatIfs, name: str) -> WhatIf:
    return next(rule for rule in found.rules if rule.name == name)


def test_the_model_by_hand() -> None:
    """Two steps at tier 0, 5 ms each but for the scatter, at batch sizes 4 and 32.

    Rates: 800 and 6400 tokens/s at tier 0, 1333.3 and 4266.7 at tier 3. Half of the time at each.
    """
    steps = make_steps(np.array([4, 32]), np.array([0, 0]), np.ones(2))
    steps.ms[:] = 5.0
    found = what_ifs(steps, model_of(steps), np.random.default_rng(0))
    assert found.modelled == pytest.approx(3600)
    assert rule(found, "static:0").modelled == pytest.approx(3600)
    assert rule(found, "static:3").modelled == pytest.approx((1333.333 + 4266.667) / 2)
    # Tier 3 below 8, tier 0 at and above it: 1333.3 and 6400. The threshold 8 is the first that says so.
    best = (1333.333 + 6400) / 2
    assert rule(found, "threshold:8:3").modelled == pytest.approx(best)
    assert rule(found, "best tier by batch size").modelled == pytest.approx(best)
    assert rule(found, BEST_EACH_STEP).modelled == pytest.approx(best)


def test_where_chance_decided_the_truth_is_in_the_interval_though_the_model_is_wrong() -> None:
    batch = alternating()
    drawn = np.repeat(np.random.default_rng(3).random(8000 // 50) < 0.3, 50)
    steps = make_steps(batch, np.where(drawn, 3, 0), np.where(drawn, 0.3, 0.7))
    found = what_ifs(steps, model_of(steps, error=1.5), np.random.default_rng(0))
    time_ms = {size: float(steps.ms[batch == size].sum()) for size in (4, 32)}
    for name, rates in (("static:0", (800, 6400)), ("static:3", (4 * 2 / 0.006, 32 * 2 / 0.015))):
        truth = (time_ms[4] * rates[0] + time_ms[32] * rates[1]) / sum(time_ms.values())
        evidence = rule(found, name).evidence
        assert evidence is not None
        for estimate in (evidence.ips, evidence.doubly_robust):
            assert estimate is not None
            # Scatter of 2 % in 800 to 5600 steps: the interval is narrow, and the truth within 1 %.
            assert estimate.rate.value == pytest.approx(truth, rel=0.01)
            assert estimate.rate.high - estimate.rate.low < 0.02 * truth
        assert evidence.share == 1.0
        measured = 1000 * steps.tokens.sum() / steps.ms.sum()
        assert evidence.best.gain.value == pytest.approx(truth / measured - 1, abs=0.01)
        # The model's own answer is half too large, and stays called an estimate by the model.
        assert rule(found, name).modelled == pytest.approx(1.5 * truth, rel=0.01)


def test_a_rule_that_was_certain_says_nothing_of_other_tiers() -> None:
    batch = alternating()
    steps = make_steps(batch, np.where(batch == 4, 3, 0), np.ones(8000))
    found = what_ifs(steps, model_of(steps), np.random.default_rng(0))
    assert {rule.evidence for rule in found.rules} == {None}
    assert "chance decided 0 % of the steps" in rule(found, "static:3").why_not


def test_unknown_probabilities_say_so_and_without_a_model_there_is_none() -> None:
    steps = make_steps(alternating(), np.full(8000, 3), np.full(8000, np.nan))
    found = what_ifs(steps, None, np.random.default_rng(0))
    assert [rule.name for rule in found.rules] == ["static:0", "static:3"]
    assert {(rule.modelled, rule.evidence) for rule in found.rules} == {(None, None)}
    assert "no probabilities" in found.rules[0].why_not


def test_chance_between_other_tiers_is_found_out_by_the_weights() -> None:
    """At batch size 32 chance decided too, but never for tier 3, although its probability should be 1/2."""
    batch = alternating()
    drawn = np.random.default_rng(3).random(8000) < 0.5
    steps = make_steps(batch, np.where((batch == 4) & drawn, 3, 0), np.full(8000, 0.5))
    found = what_ifs(steps, model_of(steps), np.random.default_rng(0))
    assert rule(found, "static:3").evidence is None
    assert "were not all possible" in rule(found, "static:3").why_not


def test_too_few_steps_say_so() -> None:
    drawn = np.random.default_rng(3).random(500) < 0.5
    steps = make_steps(np.full(500, 4), np.where(drawn, 3, 0), np.full(500, 0.5))
    found = what_ifs(steps, model_of(steps), np.random.default_rng(0))
    assert "only 500 steps" in rule(found, "static:3").why_not


def test_steps_without_a_valid_time_take_what_the_model_expects() -> None:
    """4 and 32 tokens in 5 ms each, and 64 tokens in a step that has no time: 15 ms by the model."""
    steps = make_steps(np.array([4, 32, 32]), np.array([0, 0, 3]), np.ones(3))
    steps.ms[:] = [5.0, 5.0, np.nan]
    assert spent_ms(steps, model_of(steps)).tolist() == [5.0, 5.0, 15.0]
    assert totals(steps, model_of(steps)).decode_rate == pytest.approx(100 / 0.025)
    assert totals(steps, None).decode_rate == pytest.approx(36 / 0.010)
    # By the model tier 0 makes 800 and 6400 tokens/s: (5 * 800 + 20 * 6400) / 25 in these times.
    found = what_ifs(steps, model_of(steps), np.random.default_rng(0))
    assert rule(found, "static:0").modelled == pytest.approx((5 * 800 + 20 * 6400) / 25)


def test_the_share_of_steps_of_which_the_model_speaks() -> None:
    """Of 4 steps it knows nothing in one, and another's tier it does not know: 2 of 4 count."""
    steps = make_steps(np.array([4, 4, 4, 4]), np.array([0, 0, 0, 3]), np.ones(4))
    model = model_of(steps)
    assert what_ifs(steps, model_of(steps), np.random.default_rng(0)).known_share == 1.0
    model.ms[0] = np.nan
    model.ms[3, 1] = np.nan
    assert what_ifs(steps, model, np.random.default_rng(0)).known_share == 0.5
