"""Bundles of a running sidecar: pushed, watched, tried between two steps, rolled back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from specgov.controller import seat as seat_module
from specgov.controller.bundles import Bundles, BundleWatcher, push, stored_bundles, watched_folder
from specgov.controller.config import ServeConfig
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import check_info
from specgov.policies.bundle import Bundle, BundleError, Card, save_bundle
from specgov.policies.network import following_the_model
from specgov.policies.ppo import Ppo
from specgov.policies.types import BatchView, Choice, PolicyError
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


def write_bundle(folder: Path, favourite: int, name: str = "mine") -> Path:
    """A bundle whose network wants the tier ``favourite`` whatever it sees."""
    network = following_the_model((2,))
    network.head_bias[favourite] = 1000.0
    save_bundle(Bundle(Card(name, (2,), 5.0), network), folder)
    return folder


class Bench:
    """Engines without a server; ``engine`` is connected."""

    def __init__(self, make_info: Make, make_report: Make, **config: Any) -> None:
        self.make_info, self.make_report = make_info, make_report
        self.config = ServeConfig.model_validate({"guard": {"enabled": False}, **config})
        self.engines = Engines(self.config, clock=lambda: 0.0)
        self.watcher = BundleWatcher(self.config, self.engines.bundles, self.engines.all)
        self.engine = self.connect()
        self.step_id = 0

    def connect(self, **changes: Any) -> Engine:
        session = Session(self.engines, Telemetry(Metrics(), timer=lambda: 0.0))
        info = self.make_info(**changes)
        return self.engines.connect(session, info, check_info(info))[0]

    def step(self) -> pb.Decision:
        self.step_id += 1
        self.engine.observe(self.make_report(self.step_id))
        decision = self.engine.decide()
        assert decision is not None
        return decision


@pytest.fixture
def bench(make_info: Make, make_report: Make) -> Callable[..., Bench]:
    return lambda **config: Bench(make_info, make_report, **config)


# -- the store ------------------------------------------------------------------------------------


def test_a_push_makes_the_next_version_and_changes_none(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = push(write_bundle(tmp_path / "a", 3), store)
    second = push(write_bundle(tmp_path / "a", 5), store)
    other = push(tmp_path / "a", store, "other")
    assert [(s.name, s.version) for s in (first, second, other)] == [("mine", 1), ("mine", 2), ("other", 1)]
    assert stored_bundles(store) == [first, second, other]
    assert first.weights_sha256 != second.weights_sha256 == other.weights_sha256
    assert first.policy_text == "ppo:mine@1"
    assert {path.name for path in (store / "mine" / "1").iterdir()} == {
        "bundle.json",
        "policy.safetensors",
        "README.md",
    }
    assert [path.name for path in (store / "mine").iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_used_is_not_pushed(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "a", 3)
    card = json.loads((source / "bundle.json").read_text())
    (source / "bundle.json").write_text(json.dumps({**card, "schema_version": 0}))
    with pytest.raises(BundleError, match="export the bundle with this release"):
        push(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "x" * 65, "a@1", "a b", "-"])
def test_a_name_cannot_lead_out_of_the_store(tmp_path: Path, name: str) -> None:
    source = write_bundle(tmp_path / "a", 3)
    with pytest.raises(BundleError, match="is no name for a store"):
        push(source, tmp_path / "store", name)
    bundles = Bundles(ServeConfig.model_validate({"bundles": {"dir": str(tmp_path / "store")}}))
    assert not bundles.is_stored(f"ppo:{name}@1")
    with pytest.raises(BundleError):
        bundles.newest(name)


def test_a_push_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        push(write_bundle(tmp_path / "a", 3), tmp_path / "store")
    assert list((tmp_path / "store" / "mine").iterdir()) == []


def test_what_a_killed_push_left_is_cleared_later(tmp_path: Path) -> None:
    store = tmp_path / "store"
    push(write_bundle(tmp_path / "a", 3), store)
    old, under_way = store / "mine" / ".push-old", store / "mine" / ".push-now"
    for folder in (old, under_way):
        folder.mkdir()
    os.utime(old, (0, 0))
    push(tmp_path / "a", store)
    assert (old.exists(), under_way.exists()) == (False, True)
    assert [bundle.version for bundle in stored_bundles(store)] == [1, 2]


def test_a_damaged_bundle_is_listed_with_its_problem(tmp_path: Path) -> None:
    store = tmp_path / "store"
    push(write_bundle(tmp_path / "a", 3), store)
    (store / "mine" / "1" / "policy.safetensors").write_bytes(b"")
    (listed,) = stored_bundles(store)
    assert "the files do not belong together" in listed.problem


# -- trying and rolling back -----------------------------------------------------------------------


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


# -- the watched folder ----------------------------------------------------------------------------


def test_only_a_bundles_folder_is_watched(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a", 3)
    assert watched_folder(ServeConfig(policy=f"ppo:{tmp_path}/a")) == f"{tmp_path}/a"
    for policy in ("greedy", "ppo", "ppo:default", "ppo:mine@1"):
        assert watched_folder(ServeConfig(policy=policy)) is None


def test_a_changed_bundle_is_swapped_in(bench: Make, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "a", 3)
    one = bench(policy=f"ppo:{folder}", bundles={"trial_steps": 2})
    second = one.connect(engine_id="engine-2")
    other = one.connect(engine_id="engine-3")
    other.set_policy("static:1")
    one.watcher.look()  # as at the start
    assert one.step().num_steps == 3
    write_bundle(folder, 5)
    one.watcher.look()
    assert one.step().num_steps == 5
    assert (second.state().trial_steps_left, other.policy_text) == (2, "static:1")
    late = one.connect(engine_id="engine-4")
    assert isinstance(late.policy, Ppo)
    assert late.policy.choose(BatchView(4)).num_steps_for(4) == 5


@pytest.mark.parametrize("damage", ["half written", "newer schema", "not finite", "gone"])
def test_a_bundle_that_cannot_be_used_changes_nothing(
    bench: Make, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_bundle(tmp_path / "a", 3)
    one = bench(policy=f"ppo:{folder}")
    one.watcher.look()
    weights, card = folder / "policy.safetensors", folder / "bundle.json"
    if damage == "half written":
        good = weights.read_bytes()
        weights.write_bytes(good[:-1] + b"\x01")
    elif damage == "newer schema":
        card.write_text(json.dumps({**json.loads(card.read_text()), "schema_version": 2}))
    elif damage == "not finite":
        network = following_the_model((2,))
        network.head_bias[0] = np.nan
        save_bundle(Bundle(Card("mine", (2,), 5.0), network), folder)
    else:
        weights.unlink()
    for _ in range(3):
        one.watcher.look()
    assert one.step().num_steps == 3
    assert [record.levelname for record in caplog.records if "changed bundle" in record.getMessage()] == [
        "ERROR"
    ]
    assert one.connect(engine_id="engine-2").policy.name == "ppo"  # from memory
    write_bundle(folder, 5)
    one.watcher.look()
    assert one.step().num_steps == 5


def test_a_sidecar_does_not_start_on_a_bundle_that_cannot_be_used(start: Make, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="name a folder that holds"):
        start(policy=f"ppo:{tmp_path}/nowhere")


# -- over the wire ---------------------------------------------------------------------------------


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details()


def test_operators_list_use_and_roll_back(
    start: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store = tmp_path / "store"
    push(write_bundle(tmp_path / "a", 3), store)
    push(write_bundle(tmp_path / "a", 5), store)
    running = start(policy="greedy", bundles={"dir": str(store)})
    stream = running.stream()
    running.stream(engine_id="engine-2")
    used = running.admin.UseBundle(pb.UseBundleRequest(name="mine", engine_id="engine-1"), timeout=60)
    assert [(e.info.engine_id, e.policy_text) for e in used.engines] == [("engine-1", "ppo:mine@2")]
    assert stream.decision().num_steps == 5  # at once
    used = running.admin.UseBundle(pb.UseBundleRequest(name="mine", version=1), timeout=60)
    assert [e.policy_text for e in used.engines] == ["ppo:mine@1"] * 2
    assert (
        "'policy': 'ppo:mine@1', 'policy_before': 'ppo:mine@2', 'event': 'policy set, on trial'"
        in caplog.text
    )
    assert caplog.text.count("policy set, on trial") == 3
    listed = running.admin.ListBundles(pb.ListBundlesRequest(), timeout=60)
    assert listed.folder == str(store)
    assert [(b.name, b.version, list(b.engine_ids), b.problem) for b in listed.bundles] == [
        ("mine", 1, ["engine-1", "engine-2"], ""),
        ("mine", 2, [], ""),
    ]
    back = running.admin.RollBackPolicy(pb.RollBackPolicyRequest(engine_id="engine-1"), timeout=60)
    assert [e.policy_text for e in back.engines] == ["ppo:mine@2"]
    back = running.admin.RollBackPolicy(pb.RollBackPolicyRequest(), timeout=60)
    assert [(e.info.engine_id, e.policy_text) for e in back.engines] == [("engine-2", "greedy")]
    request = pb.RollBackPolicyRequest(engine_id="engine-1")
    code, details = refused(lambda: running.admin.RollBackPolicy(request, timeout=60))
    assert (code, details) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "engine-1: there is no policy to go back to",
    )
    question = pb.DecideRequest(
        batch_size=4,
        accept_length_at=pb.AcceptLengthAt(accept_length=2, num_steps=3),
        policy="ppo:mine@2",
    )
    assert running.controller.Decide(question, timeout=60).num_steps == 5
    chosen = running.admin.SetPolicy(
        pb.SetPolicyRequest(engine_id="engine-1", policy="ppo:mine@1"), timeout=60
    )
    assert chosen.engine.policy_text == "ppo:mine@1"


@pytest.mark.parametrize(
    "name", ["../secret", "/etc", "nothing", "mine/1", "mine@2", "", ".", "mine\x00", "mine" * 100]
)
def test_a_strangers_name_opens_nothing_outside_the_store(start: Make, tmp_path: Path, name: str) -> None:
    write_bundle(tmp_path / "secret" / "1", 5)
    push(write_bundle(tmp_path / "a", 3), tmp_path / "store")
    running = start(policy="greedy", bundles={"dir": str(tmp_path / "store")})
    running.stream()
    for version in (0, 1):
        request = pb.UseBundleRequest(name=name, version=version)
        assert refused(lambda r=request: running.admin.UseBundle(r, timeout=60))[0] == (
            grpc.StatusCode.INVALID_ARGUMENT
        )
    for text in (f"ppo:{name}@1", f"ppo:{tmp_path}/secret/1", f"ppo:bundle={name}"):
        request = pb.SetPolicyRequest(engine_id="engine-1", policy=text)
        assert refused(lambda r=request: running.admin.SetPolicy(r, timeout=60))[0] == (
            grpc.StatusCode.INVALID_ARGUMENT
        )
    assert running.state().policy_text == "greedy"


def test_without_a_store_there_is_nothing_to_use(start: Make) -> None:
    running = start(policy="greedy")
    running.stream()
    assert running.admin.ListBundles(pb.ListBundlesRequest(), timeout=60).folder == ""
    code, details = refused(lambda: running.admin.UseBundle(pb.UseBundleRequest(name="a"), timeout=60))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "--bundles-dir" in details


def test_a_pushed_bundle_is_still_there_after_a_restart(
    start: Make, make_report: Make, tmp_path: Path
) -> None:
    push(write_bundle(tmp_path / "a", 3), tmp_path / "store")
    config = {
        "policy": "greedy",
        "bundles": {"dir": str(tmp_path / "store")},
        "state": {"dir": str(tmp_path / "states")},
    }
    running = start(**config)
    stream = running.stream()
    running.admin.UseBundle(pb.UseBundleRequest(name="mine"), timeout=60)
    stream.send(make_report(1))
    stream.decision_that_knows(1)
    running.sidecar.stop()
    again = start(**config)
    again.stream()
    state = again.state()
    assert (state.policy_text, state.restored_reports) == ("ppo:mine@1", 1)
