"""policy push, list and rollback, and engines canary, against a real sidecar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from specgov.controller.cli.policy_facts import canary_line, policy_facts
from specgov.controller.config import ServeConfig
from specgov.controller.server import Sidecar
from specgov.policies.bundle import load_bundle, save_bundle
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a sidecar with an engine ``e1`` (none if not ``engine``); gives its target."""
    ends: list[Callable[[], object]] = []

    def start_one(engine: bool = True, **config: Any) -> str:
        fields = {"listen": f"unix://{tmp_path}/s.sock", "policy": "greedy", **config}
        sidecar = Sidecar(ServeConfig.model_validate(fields))
        sidecar.start()
        ends.append(sidecar.stop)
        if engine:
            channel = grpc.insecure_channel(sidecar.target)
            info = pb.EngineInfo(engine_id="e1", boot_id="b", tiers=[0, 1, 3], max_running_requests=64)
            stub = pb_grpc.SpeculationControllerStub(channel)
            next(stub.Control(iter([pb.EngineMessage(info=info)]), timeout=60))
            ends.append(channel.close)
        return sidecar.target

    yield start_one
    for end in reversed(ends):
        end()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    save_bundle(load_bundle("default"), tmp_path / "bundle")
    return tmp_path / "bundle"


def test_push_list_roll_back(run, start: Start, bundle: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    target = start(bundles={"dir": str(store)})
    ran = run("policy", "list", "--target", target)
    assert (ran.code, ran.out) == (0, f"no bundles in {store} yet\n")
    ran = run("policy", "push", str(bundle), "--name", "mine", "--target", target)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"mine@1: in {store}/mine/1",
        "e1: policy ppo:mine@1, on trial for 2000 steps",
    ]
    ran = run("policy", "push", str(bundle), "--name", "mine", "--only-store", "--target", target)
    assert ran.out == f"mine@2: in {store}/mine/2\n"
    listed = json.loads(run("policy", "list", "--json", "--target", target).out)
    assert [(b["name"], b["version"], b["engine_ids"]) for b in listed["bundles"]] == [
        ("mine", 1, ["e1"]),
        ("mine", 2, []),
    ]
    ran = run("policy", "list", "--target", target)
    assert "mine@1" in ran.out
    shown = run("engines", "show", "e1", "--target", target).out
    assert "  as given         ppo:mine@1" in shown
    assert "  on trial         for 2000 more steps" in shown
    assert "  before it        greedy (specgov policy rollback)" in shown
    ran = run("policy", "rollback", "e1", "--target", target)
    assert (ran.code, ran.out) == (0, "e1: policy greedy\n")
    assert run("policy", "rollback", "--target", target).out == "no engine has a policy to go back to\n"
    ran = run("policy", "rollback", "e1", "--target", target)
    assert (ran.code, "there is no policy to go back to" in ran.err) == (1, True)


def test_push_says_what_is_wrong(run, start: Start, bundle: Path, tmp_path: Path) -> None:
    target = start(engine=False)
    ran = run("policy", "push", str(bundle), "--target", target)
    assert (ran.code, "start it with --bundles-dir" in ran.err) == (1, True)
    assert "gives it one" in run("policy", "list", "--target", target).out
    ran = run("policy", "push", str(tmp_path / "nowhere"), "--target", target)
    assert (ran.code, "is no folder" in ran.err) == (2, True)


def test_push_before_any_engine_says_how_to_use_it(run, start: Start, bundle: Path, tmp_path: Path) -> None:
    target = start(engine=False, bundles={"dir": str(tmp_path / "store")})
    ran = run("policy", "push", str(bundle), "--target", target)
    assert ran.code == 0
    assert "policy = 'ppo:default@1' in the configuration" in ran.out


def test_a_push_for_an_unknown_engine_stores_nothing(run, start: Start, bundle: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    target = start(bundles={"dir": str(store)})
    ran = run("policy", "push", str(bundle), "--engine", "e2", "--target", target)
    assert (ran.code, ran.out) == (1, "")
    assert "there is no engine 'e2': there is e1" in ran.err
    assert list(store.iterdir()) == []
    ran = run("policy", "push", str(bundle), "--engine", "e1", "--target", target)
    assert (ran.code, "e1: policy ppo:default@1, on trial" in ran.out) == (0, True)


def test_a_damaged_bundle_is_not_pushed(run, start: Start, bundle: Path, tmp_path: Path) -> None:
    (bundle / "policy.safetensors").write_bytes(b"")
    ran = run("policy", "push", str(bundle), "--target", start(bundles={"dir": str(tmp_path / "store")}))
    assert (ran.code, "do not belong together" in ran.err) == (1, True)
    assert list((tmp_path / "store").iterdir()) == []


def test_a_stores_folder_that_is_elsewhere(run, start: Start, bundle: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    target = start(bundles={"dir": str(store)})
    store.rmdir()
    ran = run("policy", "push", str(bundle), "--target", target)
    assert (ran.code, "is not on this machine" in ran.err) == (1, True)
    assert not store.exists()


def test_canary(run, start: Start) -> None:
    target = start()
    ran = run("engines", "canary", "e1", "--policy", "static:3", "--share", "0.2", "--target", target)
    assert (ran.code, ran.out) == (
        0,
        "e1: canary static:3 in 20 % of blocks of 64 steps: too few blocks to compare, 0 blocks against 0\n",
    )
    assert "e1: canary static:3" in run("engines", "list", "--target", target).out
    assert "canary             static:3" in run("engines", "show", "e1", "--target", target).out
    ran = run("engines", "canary", "e1", "--stop", "--target", target)
    assert ran.out.endswith("ended: stopped on request\n")
    for wrong in (("--policy", "static:3", "--stop"), ()):
        assert run("engines", "canary", "e1", *wrong, "--target", target).code == 2
    ran = run("engines", "canary", "e1", "--policy", "static:3", "--share", "2", "--target", target)
    assert (ran.code, "share must lie between 0 and 1" in ran.err) == (2, True)


def test_a_canarys_line() -> None:
    state = pb.CanaryState(
        policy="ppo",
        share=0.1,
        block_steps=64,
        candidate_blocks=30,
        active_blocks=270,
        difference=0.0123,
        difference_low=-0.004,
        difference_high=0.0287,
    )
    assert canary_line(state) == (
        "ppo in 10 % of blocks of 64 steps: +1.23 % output rate (95 % interval -0.40 to +2.87 %), "
        "30 blocks against 270"
    )


def test_what_was_restored_is_said_of_the_policy_that_it_was_restored_to() -> None:
    restored = ("  restored", "with what 5 reports had taught it")
    engine = pb.EngineState(policy="greedy", policy_text="greedy", restored_reports=5)
    assert policy_facts(engine) == [restored]
    engine.previous_policy_text = "greedy"
    assert restored not in policy_facts(engine)
