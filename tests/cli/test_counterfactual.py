"""Rules on given step costs, against hand calculations."""

from __future__ import annotations

import numpy as np
import pytest

from specgov.controller.cli.counterfactual import Stage, Visits, make_stage, outcome, play, play_oracle
from specgov.policies.types import EngineSpec, PolicyError

TIERS = (0, 1, 3)


class MadeUpStepTime:
    """4 ms, and for each draft step 1 ms below batch size 10 and 4 ms from there on."""

    def step_ms(self, batch_size, num_steps, sum_seq_len_tokens):
        slope = np.where(np.asarray(batch_size) < 10, 1.0, 4.0)
        return 4.0 + slope * num_steps + 0.0 * np.asarray(sum_seq_len_tokens)


def stage(acceptance=(0.5, 0.5, 0.5), lag: int = 1, seed: int = 0, steps: int = 40) -> Stage:
    """Half of the steps at batch size 2, half at 20."""
    visits = Visits(np.array([2, 20]), np.array([200, 2000]), np.array([0, 1])).scaled(steps)
    return make_stage(
        visits, EngineSpec(TIERS, (), 20, lag), MadeUpStepTime(), np.array(acceptance), 0.1, seed
    )


def test_static_rates_are_tokens_over_time() -> None:
    # At acceptance 1/2 the accept length at num_steps 3 is 1 + 1/2 + 1/4 + 1/8 = 1.875.
    # Batch 2: 3.75 tokens in 7 ms; batch 20: 37.5 in 16 ms. Without speculation: 2 and 20 tokens in 4 ms.
    three, zero = play(stage(), "static:3"), play(stage(), "static:0")
    assert three.run_tokens_per_s == pytest.approx([3750 / 7, 37500 / 16])
    assert zero.run_tokens_per_s == pytest.approx([500, 5000])
    # The two runs are equally long.
    assert three.output_tokens_per_s == pytest.approx((3750 / 7 + 37500 / 16) / 2)
    # Below break-even, T(3)/T(0) = 4 at batch 20, speculation is slower by accept length over break-even.
    assert three.run_tokens_per_s[1] / zero.run_tokens_per_s[1] == pytest.approx(1.875 / 4)


def test_the_oracle_takes_the_tier_with_the_largest_rate_at_each_batch_size() -> None:
    # Batch 2 by tier: 2/4, 3/5, 3.75/7 tokens/ms: tier 1. Batch 20: 20/4, 30/8, 37.5/16: tier 0.
    oracle = play_oracle(stage())
    assert [TIERS[i] for i in oracle.tier_index] == [1] * 20 + [0] * 20
    assert oracle.run_tokens_per_s == pytest.approx([600, 5000])
    assert oracle.switches == 1
    assert oracle.tier_shares(3).tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("text", ["static:1", "threshold:10:3", "schedule", "ema"])
def test_no_rule_beats_the_oracle(text: str) -> None:
    played = play(stage(), text)
    oracle = play_oracle(stage())
    assert (played.run_tokens_per_s <= oracle.run_tokens_per_s + 1e-9).all()


def test_a_threshold_knows_the_batch_that_it_is_applied_to() -> None:
    # Decided steps before, its ranges still cover the batch that forms.
    played = play(stage(lag=3), "threshold:10:3")
    assert [TIERS[i] for i in played.tier_index] == [3] * 20 + [0] * 20


class Noting:
    """A rule that notes what it sees, and asks for the tier that its script gives after each step."""

    def __init__(self, tiers: list[int]) -> None:
        self.tiers, self.seen = iter(tiers), []

    def observe(self, step) -> None:
        self.seen.append(step)

    def choose(self, batch):
        from specgov.policies.types import Choice, TierRange

        return Choice((TierRange(1, 20, next(self.tiers)),))


@pytest.mark.parametrize(("lag", "applied"), [(1, [0, 1, 3, 1]), (2, [0, 0, 1, 3])])
def test_a_choice_applies_after_the_lag(monkeypatch, lag: int, applied: list[int]) -> None:
    # With lag 1 the choice made with step t's result applies to step t + 1, with lag 2 to t + 2.
    rule = Noting([0, 1, 3, 1, 0])
    monkeypatch.setattr("specgov.controller.cli.counterfactual.make_policy", lambda *_: rule)
    played = play(stage(lag=lag, steps=4), "noting")
    assert [TIERS[i] for i in played.tier_index] == applied
    assert [step.num_steps for step in rule.seen] == applied
    assert all(step.accepted.max() <= step.num_steps for step in rule.seen)
    assert [step.batch_size for step in rule.seen] == [2, 2, 20, 20]


def test_all_rules_meet_the_same_draws_and_the_seed_decides_them() -> None:
    first, again, other = stage(), stage(), stage(seed=1)
    assert all((a == b).all() for a, b in zip(first.depths, again.depths, strict=True))
    assert (first.noise == again.noise).all()
    assert any((a != b).any() for a, b in zip(first.depths, other.depths, strict=True))


def test_drafts_are_accepted_as_often_as_stated() -> None:
    # 20 steps of 2 and 20 requests, 8000 in all; P(depth >= 1) = 0.9, P(depth = 3) = 0.9 * 0.5 * 0 = 0.
    depths = np.concatenate(stage((0.9, 0.5, 0.0), steps=800).depths)
    assert len(depths) == 400 * 2 + 400 * 20
    assert (depths >= 1).mean() == pytest.approx(0.9, abs=0.013)  # 4 standard errors of sqrt(0.09 / 8800)
    assert (depths >= 2).mean() == pytest.approx(0.45, abs=0.022)
    assert depths.max() == 2


def test_a_pattern_is_stretched_evenly() -> None:
    visits = Visits(np.array([1, 2, 4]), np.array([10, 20, 40]), np.array([0, 1, 2]))
    assert visits.scaled(6).batch_sizes.tolist() == [1, 1, 2, 2, 4, 4]
    assert visits.scaled(2).batch_sizes.tolist() == [1, 2]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(PolicyError, match="unknown policy"):
        play(stage(), "nonsense")


def test_mixing_tiers_in_a_run_is_tokens_over_time_not_a_mean_of_rates() -> None:
    # Batch 2, tiers 0 and 3 alternating: (2 + 3.75) tokens in (4 + 7) ms.
    alternating = np.array([0, 2] * 20)
    assert outcome(stage(), "x", alternating).run_tokens_per_s[0] == pytest.approx(5750 / 11)
