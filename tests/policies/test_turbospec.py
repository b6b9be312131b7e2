"""TurboSpec on a trace worked out by hand."""

from collections.abc import Callable

import pytest

from specgov.policies.types import BatchView, Choice, Policy, PolicyError, Reason, StepObservation

COSTS = {0: 8.0, 1: 10.0, 3: 14.0}


def test_a_trace(make_rule: Callable[..., Policy], make_step: Callable[..., StepObservation]) -> None:
    rule = make_rule("turbospec:0.1:1:probe_every_steps=2", (0, 1, 3), COSTS)
    choices: list[Choice] = [rule.choose(BatchView(4, 400))]

    def step(num_steps: int, accepted: list[int]) -> None:
        rule.observe(make_step(len(choices), num_steps, accepted))
        choices.append(rule.choose(BatchView(4, 400)))

    # alpha 0.7: 1, 1.7, 2.533 tokens a request over 8, 10, 14 ms: 0.125, 0.17, 0.181: tier 3.
    # alpha = 4 accepted of 7 decided = 0.571: 0.125, 0.157, 2.084 / 14 = 0.149: 5 % better is not 10 %.
    step(3, [3, 1, 0, 0])
    # alpha = 2 / 6: 0.125, 0.1333, 1.4815 / 14 = 0.106: tier 1.
    step(3, [1, 1, 0, 0])
    # alpha = 0: 0.125, 0.1: tier 0. Every second step there probes.
    step(1, [0, 0, 0, 0])
    step(0, [0, 0, 0, 0])
    step(0, [0, 0, 0, 0])
    step(0, [0, 0, 0, 0])
    step(0, [0, 0, 0, 0])
    assert [choice.num_steps_for(4) for choice in choices] == [3, 3, 1, 0, 0, 1, 0, 1]
    assert [choice.reason for choice in choices][3:6] == [Reason.POLICY, Reason.POLICY, Reason.EXPLORATION]
    # A probe that accepts everything brings the deepest tier back.
    step(1, [1, 1, 1, 1])
    assert choices[-1].num_steps_for(4) == 3
    assert choices[-1].expected_tokens == pytest.approx([4.0, 8.0, 16.0])
    assert choices[-1].expected_ms == pytest.approx([8.0, 10.0, 14.0])


def test_options(make_rule: Callable[..., Policy]) -> None:
    with pytest.raises(PolicyError, match="margin must be 0 or more"):
        make_rule("turbospec:-1", (0, 1))
    with pytest.raises(PolicyError, match="newest_weight must lie above 0"):
        make_rule("turbospec:newest_weight=0", (0, 1))
