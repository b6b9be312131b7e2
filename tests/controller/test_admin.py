"""What operators see and do: engines, modes, policies, watch streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from specgov.controller.guard.config import GuardConfig
from specgov.controller.watch import MAX_WAITING_SUMMARIES, Watcher, Watchers
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


def test_no_engines(start: Make) -> None:
    assert len(start().admin.ListEngines(pb.ListEnginesRequest(), timeout=60).engines) == 0


def test_state(start: Make, make_report: Make) -> None:
    sidecar = start()
    stream = sidecar.stream(model="llama")
    stream.send(make_report(1, reports_dropped=2, waiting_requests=3, kv_use_ratio=0.5, round_trip_us=700))
    stream.decision()
    sidecar.stream(engine_id="a-second")
    listed = sidecar.admin.ListEngines(pb.ListEnginesRequest(), timeout=60).engines
    assert [engine.info.engine_id for engine in listed] == ["a-second", "engine-1"]
    state = listed[1]
    assert (state.info.model, state.connected, state.mode) == ("llama", True, pb.MODE_ACTIVE)
    assert (state.policy, state.reports, state.reports_rejected, state.reports_dropped) == (
        "threshold",
        1,
        0,
        2,
    )
    assert (state.decisions, state.tier_switches) == (2, 1)  # 5 at connect, 0 for the batch of 4
    assert state.last_step == pb.StepSummary(
        engine_id="engine-1",
        step_id=1,
        batch_size=4,
        num_steps=3,
        accept_length=2.5,  # 6 accepted drafts and 4 bonus tokens of 4 requests
        step_ms=6.5,
        output_tokens_per_s=10 / 0.0065,
        decided_num_steps=0,
        reason=pb.REASON_POLICY,
        waiting_requests=3,
        kv_use_ratio=0.5,
        round_trip_ms=0.7,
    )
    assert not state.HasField("decision_lag_steps_p50")


def test_the_newest_round_trip_is_kept_until_there_is_a_newer_one(start: Make, make_report: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    seen = []
    for step_id, measured in enumerate(({}, {"round_trip_us": 900}, {}, {"round_trip_us": 0}), start=1):
        stream.send(make_report(step_id, **measured))
        stream.decision_that_knows(step_id)
        step = sidecar.state().last_step
        seen.append(step.round_trip_ms if step.HasField("round_trip_ms") else None)
    assert seen == [None, 0.9, 0.9, 0.0]
    assert sidecar.metric("specgov_round_trip_seconds_count", engine="engine-1") == 2


def test_last_decisions_and_estimates(start: Make, make_report: Make) -> None:
    sidecar = start(policy="ema")
    stream = sidecar.stream()
    for step_id in range(1, 41):
        stream.send(make_report(step_id))
        stream.decision_that_knows(step_id)
    response = sidecar.admin.GetEngine(pb.GetEngineRequest(engine_id="engine-1"), timeout=60)
    assert [d.known_step_id for d in response.last_decisions] == list(range(9, 41))  # the last 32
    assert response.estimates


@pytest.mark.parametrize(
    "call",
    [
        lambda admin: admin.GetEngine(pb.GetEngineRequest(engine_id="x"), timeout=60),
        lambda admin: admin.SetMode(pb.SetModeRequest(engine_id="x", mode=pb.MODE_OFF), timeout=60),
        lambda admin: admin.SetPolicy(pb.SetPolicyRequest(engine_id="x", policy="static"), timeout=60),
    ],
)
def test_unknown_engine(start: Make, call: Callable[[Any], Any]) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        call(start().admin)
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert raised.value.details() == "there is no engine 'x': there is none yet"


def test_set_mode_sends_a_decision(start: Make, make_report: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    state = _set_mode(sidecar, pb.MODE_SHADOW)
    assert state.mode == pb.MODE_SHADOW
    assert stream.decision().reason == pb.REASON_SHADOW
    _set_mode(sidecar, pb.MODE_OFF)
    stream.send(make_report(1))
    _set_mode(sidecar, pb.MODE_ACTIVE)
    decision = stream.decision()
    assert (decision.decision_id, decision.reason) == (3, pb.REASON_POLICY)  # none was sent while it was off


RULE, ID = "threshold:3:5", "engine-1"


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("SetMode", pb.SetModeRequest(engine_id=ID, mode=pb.MODE_ACTIVE)),
        ("SetPolicy", pb.SetPolicyRequest(engine_id=ID, policy=RULE)),
        ("RollBackPolicy", pb.RollBackPolicyRequest(engine_id=ID)),
        ("RollBackPolicy", pb.RollBackPolicyRequest()),
        ("SetCanary", pb.SetCanaryRequest(engine_id=ID, policy=RULE, share=0.5)),
        ("SetCanary", pb.SetCanaryRequest(engine_id=ID)),
    ],
    ids=("mode", "policy", "rollback", "rollback of all", "canary", "no canary"),
)
def test_a_switch_by_command_is_no_thrashing(
    start: Make, make_report: Make, method: str, wanted: Any
) -> None:
    """The rule has had the only switch that the guard allows; what comes of a command is sent.

    Each command comes at the step of the decision before it.
    """
    guard = GuardConfig(most_switches=1, switch_window_steps=1000, allowance_tokens=1e9)
    sidecar = start(policy=RULE, guard=guard)
    stream = sidecar.stream()
    sidecar.admin.SetPolicy(pb.SetPolicyRequest(engine_id=ID, policy=RULE), timeout=60)
    stream.decision()
    seen = []
    for step_id, batch_size in enumerate((2, 4, 2), start=1):
        report = make_report(step_id, batch_size=batch_size, accepted_drafts=bytes(batch_size))
        report.ClearField("slots_u16le")
        report.ClearField("slot_generations_u8")
        report.sum_seq_len_tokens = 400
        stream.send(report)
        decision = stream.decision()
        seen.append((decision.num_steps, decision.guard_cause))
    no, thrashing = pb.GUARD_CAUSE_UNSPECIFIED, pb.GUARD_CAUSE_THRASHING
    assert seen == [(5, no), (0, no), (0, thrashing)]
    getattr(sidecar.admin, method)(wanted, timeout=60)
    decision = stream.decision()
    assert (decision.num_steps, decision.guard_cause) == (5, no)


@pytest.mark.parametrize("mode", [pb.MODE_UNSPECIFIED, 77])
def test_set_mode_that_does_not_exist(start: Make, mode: Any) -> None:
    sidecar = start()
    sidecar.stream()
    with pytest.raises(grpc.RpcError) as raised:
        _set_mode(sidecar, mode)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sidecar.state().mode == pb.MODE_ACTIVE


def test_configured_mode(start: Make, make_info: Make) -> None:
    stream = start(mode="frozen").silent_stream()
    stream.send(make_info())
    assert stream.decision().reason == pb.REASON_FROZEN


def test_set_policy_sends_a_decision(start: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    response = sidecar.admin.SetPolicy(
        pb.SetPolicyRequest(engine_id="engine-1", policy="static:1"), timeout=60
    )
    assert response.engine.policy == "static"
    decision = stream.decision()
    assert (decision.policy, decision.num_steps) == ("static", 1)
    again = sidecar.stream()  # and the engine keeps it
    assert sidecar.state().policy == "static"
    assert again.call.is_active()


@pytest.mark.parametrize("policy", ["best", "static:4", "", "x" * 100_000, "ema:/etc/hostname"])
def test_set_policy_that_cannot_be(start: Make, policy: str) -> None:
    sidecar = start()
    sidecar.stream()
    with pytest.raises(grpc.RpcError) as raised:
        sidecar.admin.SetPolicy(pb.SetPolicyRequest(engine_id="engine-1", policy=policy), timeout=60)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sidecar.state().policy == "threshold"


def test_watch_samples(start: Make, make_report: Make, eventually: Make) -> None:
    sidecar = start()
    stream, other = sidecar.stream(), sidecar.stream(engine_id="other")
    watch = sidecar.admin.Watch(pb.WatchRequest(engine_id="engine-1", every_steps=3), timeout=60)
    eventually(lambda: len(sidecar.sidecar.watchers.all) == 1, "the watch's beginning")
    other.send(make_report(1))
    stream.send(*(make_report(step_id) for step_id in range(1, 8)))
    assert [next(watch).step_id for _ in range(3)] == [1, 4, 7]
    watch.cancel()
    eventually(lambda: not sidecar.sidecar.watchers.all, "the watch's end")


def test_watch_all(start: Make, make_report: Make, eventually: Make) -> None:
    sidecar = start()
    streams = [sidecar.stream(engine_id=engine_id) for engine_id in ("a", "b")]
    watch = sidecar.admin.Watch(pb.WatchRequest(), timeout=60)
    eventually(lambda: len(sidecar.sidecar.watchers.all) == 1, "the watch's beginning")
    for stream in streams:
        stream.send(make_report(5))
    seen = [next(watch) for _ in streams]
    assert sorted(summary.engine_id for summary in seen) == ["a", "b"]
    assert {summary.decided_num_steps for summary in seen} == {0}


def test_watch_over_the_limit(start: Make, eventually: Make) -> None:
    sidecar = start(max_watchers=1)
    first = sidecar.admin.Watch(pb.WatchRequest(), timeout=60)
    eventually(lambda: len(sidecar.sidecar.watchers.all) == 1, "the first watch's beginning")
    second = sidecar.admin.Watch(pb.WatchRequest(), timeout=60)
    with pytest.raises(grpc.RpcError) as raised:
        next(second)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert first.is_active()


def _nothing() -> None:
    pass


def test_slow_watcher_is_dropped() -> None:
    watcher = Watcher("", every_steps=1, cut_off=_nothing)
    for step_id in range(1, MAX_WAITING_SUMMARIES + 1):
        watcher.put(pb.StepSummary(step_id=step_id))
    assert not watcher.too_slow
    watcher.put(pb.StepSummary(step_id=0))
    assert watcher.too_slow
    watcher.put(pb.StepSummary(step_id=0))  # takes nothing more
    assert watcher.waiting <= MAX_WAITING_SUMMARIES + 1
    assert list(watcher.run()) == []


def test_slow_watcher_gets_a_status(start: Make, make_report: Make, eventually: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    watch = sidecar.admin.Watch(pb.WatchRequest(), timeout=60)
    eventually(lambda: len(sidecar.sidecar.watchers.all) == 1, "the watch's beginning")
    (watcher,) = sidecar.sidecar.watchers.all
    for _ in range(100 * MAX_WAITING_SUMMARIES):  # faster than any stream could carry them
        watcher.put(pb.StepSummary(engine_id="x" * 1000))
    stream.send(make_report(1))  # the next step finds it too slow
    assert stream.decision_that_knows(1)
    with pytest.raises(grpc.RpcError) as raised:
        for _ in watch:
            pass
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "reads too slowly" in raised.value.details()
    eventually(lambda: not sidecar.sidecar.watchers.all, "the watch's end")
    assert sidecar.metric("specgov_watchers_dropped_total") == 1


def test_watcher_that_reads_nothing_makes_room_for_another(start: Make, eventually: Make) -> None:
    sidecar = start(max_watchers=1)
    stuck = sidecar.admin.Watch(pb.WatchRequest(), timeout=60)
    eventually(lambda: len(sidecar.sidecar.watchers.all) == 1, "the watch's beginning")
    (watcher,) = sidecar.sidecar.watchers.all
    for _ in range(100 * MAX_WAITING_SUMMARIES):  # until the stream is full and the thread waits in it
        watcher.put(pb.StepSummary(engine_id="x" * 1000))
    assert watcher.too_slow
    another = sidecar.admin.Watch(pb.WatchRequest(), timeout=60)
    eventually(lambda: sidecar.sidecar.watchers.all not in ((), (watcher,)), "the other's beginning")
    sidecar.sidecar.watchers.all[0].put(pb.StepSummary(step_id=4))
    assert next(another).step_id == 4
    eventually(lambda: sidecar.metric("specgov_watchers_dropped_total") == 1, "the stuck one's end")
    stuck.cancel()


def test_watchers_are_removed_once() -> None:
    watchers, watcher = Watchers(), Watcher("", 0, _nothing)
    assert watchers.add(watcher, limit=1)
    assert not watchers.add(Watcher("", 0, _nothing), limit=1)
    watchers.remove(watcher)
    watchers.remove(watcher)
    assert watchers.all == ()


def _set_mode(sidecar: Any, mode: Any) -> pb.EngineState:
    return sidecar.admin.SetMode(pb.SetModeRequest(engine_id="engine-1", mode=mode), timeout=60).engine


def test_what_operators_did_is_in_the_log(start: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sidecar = start()
    sidecar.stream()
    _set_mode(sidecar, pb.MODE_SHADOW)
    sidecar.admin.SetPolicy(pb.SetPolicyRequest(engine_id="engine-1", policy="static:1"), timeout=60)
    canary = pb.SetCanaryRequest(engine_id="engine-1", policy="greedy", share=0.5)
    sidecar.admin.SetCanary(canary, timeout=60)
    sidecar.admin.SetCanary(pb.SetCanaryRequest(engine_id="engine-1"), timeout=60)
    for said in (
        "mode set", "'mode': 'shadow', 'mode_before': 'active'",
        "policy set", "'policy': 'static:1', 'policy_before': 'threshold:3:5'",
        "canary begun", "canary stopped",
    ):  # fmt: skip
        assert said in caplog.text
