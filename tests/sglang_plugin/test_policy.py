"""The policy behind the members that SGLang calls: which of order, fallback and SGLang's rule decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specgov.policies.types import Policy
from specgov.sglang_plugin.fallback import default_fallback, fallback_rule
from specgov.sglang_plugin.guarded import Guard
from specgov.sglang_plugin.orders import ENGINES_RULE, OWN_RULE, Kind, Order
from specgov.sglang_plugin.policy import GovernedPolicy, Launch

TABLE = Order(Kind.TABLE, ((1, 3, 3), (4, 8, 1), (9, 9, 5)))


class Orders:
    """The newest order, as a test sets it."""

    def __init__(self) -> None:
        self.order, self.decision_id = OWN_RULE, 0
        self.broken = False

    def __call__(self) -> tuple[Order, int]:
        if self.broken:
            raise RuntimeError("broken")
        return self.order, self.decision_id


@pytest.fixture
def orders() -> Orders:
    return Orders()


@pytest.fixture
def rule(fakes: Any) -> Any:
    return fakes.EnginesRule(steps=5)


@pytest.fixture
def make(orders: Orders, rule: Any) -> Callable[..., GovernedPolicy]:
    def policy(
        fallback: str = "threshold:4:3",
        tiers: Sequence[int] = (0, 1, 3),
        graphs: list[int] | None = None,
        **rest: Any,
    ) -> GovernedPolicy:
        def make_fallback(graph_batch_sizes: Sequence[int]) -> Policy:
            return fallback_rule(fallback, tiers, graph_batch_sizes)

        made = GovernedPolicy(rule, tiers, make_fallback, orders, Guard(3), initial_steps=3, **rest)
        made.set_cuda_graph_bs(graphs)
        return made

    return policy


def test_the_order_decides_for_the_batch_that_forms(make: Any, orders: Orders) -> None:
    policy = make()
    orders.order, orders.decision_id = TABLE, 7
    assert [policy.get_steps_for_batch(b) for b in (1, 3, 4, 8)] == [3, 3, 1, 1]
    policy.on_verify_complete([1], 1)
    assert policy.finished == Launch(3, 7, Kind.TABLE)


def test_where_the_order_is_silent_or_names_a_foreign_tier_the_fallback_decides(
    make: Any, orders: Orders
) -> None:
    policy = make()
    orders.order, orders.decision_id = TABLE, 7
    assert policy.get_steps_for_batch(9) == 0  # tier 5 is not among ours
    assert policy.get_steps_for_batch(20) == 0
    policy.on_verify_complete([0], 9)
    assert policy.finished == Launch(0, 0, Kind.OWN_RULE)
    orders.order = OWN_RULE
    assert [policy.get_steps_for_batch(b) for b in (3, 4)] == [3, 0]


def test_sglangs_rule_is_asked_and_told_while_the_order_says_so(make: Any, orders: Orders, rule: Any) -> None:
    policy = make()
    policy.get_steps_for_batch(2)
    assert policy.on_verify_complete([1, 1], 2) is None
    assert rule.results == []
    orders.order = ENGINES_RULE
    assert policy.get_steps_for_batch(2) == 5
    rule.switch_to = 1
    assert policy.on_verify_complete([2, 0], 2) == 1  # its answer counts, as without us
    assert rule.results == [([2, 0], 2)]
    assert policy.finished == Launch(5, 0, Kind.ENGINES_RULE)


def test_a_policy_that_does_not_govern_is_sglangs_rule(make: Any, orders: Orders, rule: Any) -> None:
    policy = make(governs=False, graphs=[8, 1])
    orders.order = TABLE  # cannot come, and would not count
    assert policy.candidate_steps == rule.candidate_steps
    assert policy.cuda_graph_bs_for_step(3) == [3]  # the stand-in's answer
    assert policy.get_steps_for_batch(1) == 5
    rule.switch_to = 3
    assert policy.on_verify_complete([1], 1) == 3


def test_our_tiers_have_every_graph_and_others_those_that_sglangs_rule_wants(make: Any, rule: Any) -> None:
    policy = make(graphs=[8, 1, 4])
    assert policy.graph_batch_sizes == (1, 4, 8)
    assert policy.cuda_graph_bs_for_step(3) == [1, 4, 8]
    assert policy.cuda_graph_bs_for_step(5) == [5]  # the stand-in's answer
    assert policy.candidate_steps == [0, 1, 3, 5]
    assert rule.graphs == [8, 1, 4]
    assert make().cuda_graph_bs_for_step(3) is None


def test_a_tier_is_kept_for_the_steps_that_were_asked_for(make: Any, orders: Orders) -> None:
    policy = make(min_steps_between_switches=3)
    orders.decision_id = 1
    chosen = []
    for num_steps in (1, 3, 0, 0, 3, 3, 3, 1):
        orders.order = Order(Kind.TABLE, ((1, 8, num_steps),))
        chosen.append(policy.get_steps_for_batch(2))
    # The first switch is free (the start is long ago); each tier then stays for three steps.
    assert chosen == [1, 1, 1, 0, 0, 0, 3, 3]
    followed = []
    for _ in chosen:
        policy.on_verify_complete([0, 0], 2)
        followed.append(policy.finished.decision_id)
    assert followed == [1, 0, 0, 1, 0, 0, 1, 0]  # a step that was held did not follow the decision


def test_switches_are_told(make: Any, orders: Orders, rule: Any) -> None:
    switches: list[int] = []
    policy = make(after_switch=lambda: switches.append(1))
    for batch_size in (1, 1, 4, 4, 1):
        policy.get_steps_for_batch(batch_size)
    assert len(switches) == 2  # 3 at the start, then 0, then 3
    orders.order = ENGINES_RULE
    policy.get_steps_for_batch(1)
    rule.switch_to = 1
    policy.on_verify_complete([1], 1)
    assert len(switches) == 4


def test_an_exception_leaves_the_step_to_sglangs_rule(make: Any, orders: Orders) -> None:
    policy = make()
    orders.broken = True
    assert [policy.get_steps_for_batch(1) for _ in range(4)] == [5] * 4
    assert policy.on_verify_complete([0], 1) is None
    assert policy.finished == Launch(5, 0, Kind.ENGINES_RULE)


def test_a_fallback_that_cannot_be_made_leaves_the_tiers_to_sglangs_rule(orders: Orders, rule: Any) -> None:
    guard = Guard(3)

    def make_fallback(graph_batch_sizes: Sequence[int]) -> Policy:
        raise RuntimeError("made to fail")

    policy = GovernedPolicy(rule, (0, 1, 3), make_fallback, orders, guard, initial_steps=3)
    policy.set_cuda_graph_bs([1, 2])
    assert rule.graphs == [1, 2]
    assert policy.get_steps_for_batch(1) == 5
    assert guard.errors == {"fallback": 1}


def test_results_answer_to_launches_in_order(make: Any, orders: Orders) -> None:
    policy = make()
    for number, steps in enumerate((1, 3, 0), start=1):
        orders.order, orders.decision_id = Order(Kind.TABLE, ((1, 8, steps),)), number
        policy.get_steps_for_batch(2)
        if number > 1:  # as in the overlap loop: a result comes after the next launch
            policy.on_verify_complete([0, 0], 2)
            assert policy.finished.decision_id == number - 1
    policy.forget_launches()
    policy.on_verify_complete([0, 0], 2)
    assert policy.finished is None


def test_the_ema_fallback_learns_from_its_own_tiers_only(make: Any, orders: Orders) -> None:
    config = "ema:warmup_batches=0:update_interval=1:ema_alpha=1.0:initial_num_steps=3:down_hysteresis=0"
    policy = make(config, tiers=(1, 3))
    orders.order = Order(Kind.TABLE, ((1, 8, 1),))
    for _ in range(5):  # at tier 1 at most one draft is accepted, which says nothing against tier 3
        policy.get_steps_for_batch(1)
        policy.on_verify_complete([0], 1)
    orders.order = OWN_RULE
    assert policy.get_steps_for_batch(1) == 3
    policy.on_verify_complete([0], 1)  # average 0 <= 1 - 0.5: down
    assert policy.get_steps_for_batch(1) == 1


def test_the_default_fallback_suits_the_tiers() -> None:
    assert default_fallback((0, 1, 3, 5, 7)) == "threshold:32:3"
    assert default_fallback((0, 1, 2)) == "threshold:32:2"
    assert default_fallback((1, 3, 5)) == "schedule:1=3:32=1"
    rule = fallback_rule("", (1, 3, 5))
    assert [rule.choose(None).num_steps_for(b) for b in (31, 32)] == [3, 1]
