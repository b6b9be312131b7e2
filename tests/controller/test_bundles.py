"""Bundles of a running sidecar, over the wire."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from bundle_bench import write_bundle

from specgov.controller.bundles import push
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


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
