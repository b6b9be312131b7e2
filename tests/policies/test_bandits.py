"""BanditSpec, Exp3 and LinUCB on traces worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from specgov.policies.types import BatchView, Policy, PolicyError, StepObservation


def test_banditspec(make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation]) -> None:
    # Throughput 2 / 4 = 0.5 at tier 0, 4 / 5 = 0.8 at tier 1: 0.625 and 1 of the best. Two rounds in turn,
    # then w = 6 and B = 1. N = (2, 2): tier 1. N = (2, 3), ln 5 = 1.609: 0.625 + sqrt(6 * 1.609 / 2) = 2.822
    # against 1 + sqrt(6 * 1.609 / 3) = 2.794: tier 0.
    rule = make_rule("banditspec:6:1", (0, 1))
    chosen = [rule.choose(BatchView(2)).num_steps_for(2)]
    for step_id, tier in enumerate([0, 1, 0, 1, 1], 1):
        rule.observe(make_step(step_id, tier, [tier, tier], 4.0 + tier))
        chosen.append(rule.choose(BatchView(2)).num_steps_for(2))
    assert chosen == [0, 1, 0, 1, 1, 0]
    assert rule.estimates() == pytest.approx({"throughput_k0": 0.5, "throughput_k1": 0.8})


def test_exp3(
    make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation], draws: Callable[..., Any]
) -> None:
    # gamma 0.5, two tiers: p = 1/2 each; 0.2 draws tier 0. Its reward is the largest so far: r = 1, so
    # ln w_0 = 0.5 * 1 / (1/2) / 2 = 0.5. Then p_0 = 0.5 / (1 + exp(-0.5)) + 0.25 = 0.5612; 0.57 draws tier 1.
    # 0.2 / 0.25 = 0.8 of the largest: ln w_1 = 0.5 * 0.8 / 0.4388 / 2 = 0.4558, so
    # p_0 = 0.5 / (1 + exp(0.4558 - 0.5)) + 0.25 = 0.5055, and 0.5 draws tier 0.
    rule = make_rule("exp3:0.5:1", (0, 1), largest=1, rng=draws(random=[0.2, 0.57, 0.5]))
    choices = [rule.choose(BatchView(1))]
    for step_id, (tier, accepted, ms) in enumerate([(0, 0, 4.0), (1, 0, 5.0)], 1):
        rule.observe(make_step(step_id, tier, [accepted], ms))
        choices.append(rule.choose(BatchView(1)))
    assert [choice.num_steps_for(1) for choice in choices] == [0, 1, 0]
    assert [choice.propensity for choice in choices] == pytest.approx([0.5, 0.4388, 0.5055], abs=1e-4)


def test_exp3_draws_anew_where_the_engine_does_not_follow(
    make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation], draws: Callable[..., Any]
) -> None:
    rule = make_rule("exp3:0.5:2", (0, 1), largest=1, rng=draws(random=[0.2, 0.7]))
    for step_id in range(1, 9):
        assert rule.choose(BatchView(1)).num_steps_for(1) == 0
        rule.observe(make_step(step_id, 1, [1], 5.0))
    assert rule.choose(BatchView(1)).num_steps_for(1) == 1
    assert rule.estimates() == {}  # the weights are equal still


def test_linucb(make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation]) -> None:
    # One request: x = (1, 0, 0, 0.5, c), c = log2(101) / 16 = 0.416. Rewards: 0.25 / 0.25 = 1 at tier 0;
    # 0.4 / 0.325 = 1.231 at tier 1. After one step each A^-1 x = x / (1 + x.x), so both predictions are
    # x'.x / (1 + x.x) times the reward: tier 1 is better. Then tier 1 has two plays, and with alpha 100 the
    # bound counts alone: tier 0.
    for alpha, third in (("0", 1), ("100", 0)):
        rule = make_rule(f"linucb:{alpha}", (0, 1))
        chosen = [rule.choose(BatchView(1, 100)).num_steps_for(1)]
        for step_id, (tier, ms) in enumerate([(0, 4.0), (1, 5.0), (1, 5.0)], 1):
            rule.observe(make_step(step_id, tier, [tier], ms))
            chosen.append(rule.choose(BatchView(1, 100)).num_steps_for(1))
        assert (chosen[0], chosen[1], chosen[3]) == (0, 1, third)
    # Share accepted: 0.5, then 0.55 and 0.595; mean rate of 0.25, 0.4 and 0.4.
    assert rule.estimates() == pytest.approx({"accepted_share": 0.595, "request_tokens_per_ms": 0.35})


@pytest.mark.parametrize("text", ["banditspec:-1", "exp3:0", "exp3:0.1:0", "linucb:-1", "ucb:-1"])
def test_options(make_rule: Callable[..., Policy], text: str) -> None:
    with pytest.raises(PolicyError, match=text.split(":")[0]):
        make_rule(text, (0, 1))
