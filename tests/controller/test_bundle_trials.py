"""Bundles on trial: swapped in between two steps, and rolled back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_bench import Bench, write_bundle

from specgov.controller import seat as seat_module
from specgov.controller.bundles import push
from specgov.policies.ppo import Ppo
from specgov.policies.types import Choice, PolicyError

Make = Callable[..., Any]


@pytest.fixture
def bench(make_info: Make, make_report: Make) -> Callable[..., Bench]:
    return lambda **config: Bench(make_info, make_report, **config)


def test_a_bundle_is_tried_with_what_the_one_before_has_learnt(bench: Make, tmp_path: Path) -> None:
    store = tmp_path / "store"
    push(write_bundle(tmp_path / "a", 3), store)
    push(write_bundle(tmp_path / "a", 5), store)
    one = bench(policy="ppo:mine@1", bundles={"dir": str(store), "trial_steps": 4})
    assert one.step().num_steps == 3
    before = one.engine.estimates()
    state = one.engine.try_policy("ppo:mine@2")
    assert (state.policy_text, state.previous_policy_text, state.trial_steps_left) == (
        "ppo:mine@2",
        "ppo:mine@1",
        4,
    )
    assert one.engine.estimates() == before
    assert [one.step().num_steps for _ in range(5)] == [5] * 5
    state = one.engine.state()
    assert (state.trial_steps_left, state.previous_policy_text) == (0, "ppo:mine@1")  # passed
    assert one.engine.roll_back().policy_text == "ppo:mine@1"
    assert one.step().num_steps == 3
    with pytest.raises(PolicyError, match="there is no policy to go back to"):
        one.engine.roll_back()


def test_a_rule_that_was_replaced_comes_back_with_what_it_learnt(bench: Make) -> None:
    one = bench(policy="greedy")
    for _ in range(20):
        one.step()
    before = one.engine.estimates()
    one.engine.set_policy("static:3")
    one.step()
    assert one.engine.roll_back().policy_text == "greedy"
    assert one.engine.estimates() == before


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("where", ["observe", "choose"])
def test_a_bundle_that_fails_on_trial_is_rolled_back(
    bench: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = tmp_path / "store"
    for favourite in (3, 5):
        push(write_bundle(tmp_path / "a", favourite), store)
    one = bench(policy="ppo:mine@1", bundles={"dir": str(store)})
    one.engine.try_policy("ppo:mine@2")
    assert one.step().num_steps == 5
    new = one.engine.policy
    original = getattr(Ppo, where)

    def fail(rule: Ppo, argument: Any) -> Any:
        if rule is new:
            raise BrokenError("of the network")
        return original(rule, argument)

    monkeypatch.setattr(Ppo, where, fail)
    assert one.step().num_steps == 3
    state = one.engine.state()
    assert (state.policy_text, state.policy_failure) == ("ppo:mine@1", "")
    assert state.rolled_back == "ppo:mine@2: BrokenError: of the network"
    assert (state.previous_policy_text, state.trial_steps_left) == ("", 0)
    assert one.engines.rolled_back == 1
    one.engine.set_policy("greedy")
    assert one.engines.rolled_back == 0


def test_after_its_trial_a_bundle_that_fails_is_set_aside_like_any_rule(
    bench: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    for favourite in (3, 5):
        push(write_bundle(tmp_path / "a", favourite), store)
    one = bench(policy="ppo:mine@1", bundles={"dir": str(store), "trial_steps": 1})
    one.engine.try_policy("ppo:mine@2")
    one.step()

    def fail(*_: Any) -> Choice:
        raise BrokenError("late")

    monkeypatch.setattr(Ppo, "choose", fail)
    assert one.step().num_steps == 0
    assert one.engine.state().policy_failure == "BrokenError: late"
    monkeypatch.undo()
    assert one.engine.roll_back().policy_text == "ppo:mine@1"  # an operator still can
    assert (one.step().num_steps, one.engine.policy_failure) == (3, "")


@pytest.mark.parametrize("how", ["it fails", "the guard trips"])
def test_a_trial_with_nothing_to_go_back_to_ends_in_the_fallback(
    bench: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    push(write_bundle(tmp_path / "a", 3), tmp_path / "store")
    one = bench(policy="greedy", bundles={"dir": str(tmp_path / "store")})
    one.engine.seat.fail(BrokenError("the first one"))
    one.engine.try_policy("ppo:mine@1")
    assert one.step().num_steps == 3
    if how == "it fails":

        def fail(*_: Any) -> Choice:
            raise BrokenError("and this one")

        monkeypatch.setattr(Ppo, "choose", fail)
        assert one.step().num_steps == 0
        assert one.engine.state().policy_failure == "BrokenError: and this one"
    else:
        one.engine.guard._output_rate.backoff.failures += 1
        assert one.step().num_steps == 3
        assert one.engine.state().trial_steps_left == 0


def test_the_guards_trip_in_the_trial_rolls_back(bench: Make, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for favourite in (3, 5):
        push(write_bundle(tmp_path / "a", favourite), store)
    one = bench(policy="ppo:mine@1", bundles={"dir": str(store)})
    one.engine.try_policy("ppo:mine@2")
    one.step()
    one.engine.guard._output_rate.backoff.failures += 1  # as where a window's output rate falls short
    assert one.step().num_steps == 3
    assert one.engine.state().rolled_back == "ppo:mine@2: its output rate fell short of the baseline's"


@pytest.mark.parametrize("changes", [{"tiers": (0, 1, 3)}, {"max_running_requests": 32}, {"model": "other"}])
def test_an_engine_that_is_another_has_nothing_to_go_back_to(bench: Make, changes: dict[str, Any]) -> None:
    one = bench(policy="greedy")
    one.engine.set_policy("static:3")
    assert one.engine.seat.previous is not None
    one.connect(**changes)
    assert (one.engine.policy_text, one.engine.seat.previous) == ("static:3", None)


def test_a_smoke_decision_comes_before_the_swap(
    bench: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    for favourite in (3, 5):
        push(write_bundle(tmp_path / "a", favourite), store)
    one = bench(policy="ppo:mine@1", bundles={"dir": str(store)})
    one.step()
    monkeypatch.setattr(Ppo, "choose", lambda rule, batch: Choice(()))
    with pytest.raises(PolicyError, match="chose nothing"):
        one.engine.try_policy("ppo:mine@2")
    monkeypatch.setattr(Ppo, "choose", lambda rule, batch: 1 / 0)
    with pytest.raises(PolicyError, match="cannot decide: ZeroDivisionError"):
        one.engine.try_policy("ppo:mine@2")
    assert one.engine.policy_text == "ppo:mine@1"


def test_no_file_is_read_while_an_engine_is_locked(
    bench: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    push(write_bundle(tmp_path / "a", 5), store)
    one = bench(policy="greedy", bundles={"dir": str(store)})
    locked: list[bool] = []
    make = seat_module.make_policy

    def watched(*args: Any, **options: Any) -> Any:
        locked.append(one.engine.lock.locked())
        return make(*args, **options)

    monkeypatch.setattr(seat_module, "make_policy", watched)
    one.engine.try_policy("ppo:mine@1")
    one.engine.change_policy("greedy")
    one.engine.start_canary("ppo:mine@1", 0.5, 8)
    assert locked == [False, False, False]
