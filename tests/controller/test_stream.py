"""Streams through a real server: what an engine sees, and what the sidecar makes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from specgov.controller import service
from specgov.controller.session import Session
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]
Eventually = Callable[[Callable[[], bool], str], None]


def test_first_decision_comes_at_once(start: Make, make_info: Make) -> None:
    stream = start().silent_stream()
    stream.send(make_info())
    decision = stream.decision()
    assert (decision.decision_id, decision.known_step_id) == (1, 0)
    # threshold:3:5 gives 5 for batches 1 and 2, and 0 from 3 to the engine's largest.
    assert (decision.num_steps, decision.batch_size_min, decision.batch_size_max) == (5, 1, 2)
    assert [(n.batch_size_min, n.batch_size_max, n.num_steps) for n in decision.neighbours] == [(3, 64, 0)]
    assert (decision.ttl_steps, decision.ttl_ms) == (50, 1000)
    assert decision.reason == pb.REASON_POLICY
    assert (decision.policy, decision.propensity) == ("threshold", 1.0)


def test_decisions_follow_the_batch(start: Make, make_report: Make) -> None:
    stream = start(ttl_steps=20, ttl_ms=300).stream()
    stream.send(make_report(1))
    decision = stream.decision()
    assert (decision.decision_id, decision.known_step_id, decision.num_steps) == (2, 1, 0)
    assert [(n.batch_size_min, n.batch_size_max, n.num_steps) for n in decision.neighbours] == [(1, 2, 5)]
    assert (decision.ttl_steps, decision.ttl_ms) == (20, 300)
    stream.send(pb.StepReport(step_id=2, batch_size=2, num_steps=0))
    assert stream.decision().num_steps == 5


def test_bad_report_is_one_rejection(start: Make, make_report: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    stream.send(make_report(1))
    stream.decision()
    stream.send(make_report(2, num_steps=4), make_report(1), make_report(2, kv_use_ratio=float("nan")))
    stream.send(make_report(2))
    assert stream.decision_that_knows(2).known_step_id == 2
    state = sidecar.state()
    assert (state.reports, state.reports_rejected, state.connected) == (2, 3, True)
    for cause in ("unknown_tier", "step_id_not_new", "not_a_number"):
        assert sidecar.metric("specgov_messages_rejected_total", cause=cause) == 1


def test_second_info_is_rejected(start: Make, make_info: Make, make_report: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    stream.send(make_info(tiers=[0, 7]), make_report(1))
    assert stream.decision_that_knows(1).num_steps == 0
    assert list(sidecar.state().info.tiers) == [0, 1, 3, 5]
    assert sidecar.metric("specgov_messages_rejected_total", cause="repeated_info") == 1


@pytest.mark.parametrize("first", ["report", "event", "empty"])
def test_report_before_info(start: Make, make_report: Make, first: str) -> None:
    sidecar = start()
    stream = sidecar.silent_stream()
    stream.send_raw(
        {
            "report": pb.EngineMessage(report=make_report()),
            "event": pb.EngineMessage(event=pb.EngineEvent(kind=pb.EngineEvent.KIND_PAUSED)),
            "empty": pb.EngineMessage(),
        }[first]
    )
    assert stream.end() == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "the first message of a stream must be EngineInfo",
    )
    assert sidecar.metric("specgov_messages_rejected_total", cause="missing_info") == 1
    assert sidecar.metric("specgov_connected_engines") == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine_id": ""}, "EngineInfo: engine_id is empty"),
        ({"tiers": [5, 3]}, "EngineInfo: tiers must be ascending and distinct, not [5, 3]"),
        ({"profile": "/etc/passwd"}, "there is no profile '/etc/passwd'"),
        ({"profile": "no-such"}, "there is no profile 'no-such'"),
    ],
)
def test_bad_info_ends_the_stream(start: Make, make_info: Make, changes: dict[str, Any], says: str) -> None:
    stream = start().silent_stream()
    stream.send(make_info(**changes))
    code, details = stream.end()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert says in details


@pytest.mark.parametrize(
    ("settings", "changes", "cause"),
    [
        ({}, {"profile": "nobody's"}, "unknown_profile"),
        ({}, {"tiers": [3, 1]}, "bad_tiers"),
        ({"policy": "static:7"}, {}, "policy"),
        ({"max_streams": 1}, {}, "too_many_engines"),
    ],
)
def test_a_refused_engine_is_told_of_and_not_at_each_attempt(
    start: Make,
    make_info: Make,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    changes: dict[str, Any],
    cause: str,
) -> None:
    """An engine tries again every few seconds for as long as nobody sees to it: at the 1st, 2nd, 4th, ..."""
    sidecar = start(**settings)
    if cause == "too_many_engines":
        sidecar.stream()
    for engine_id, attempts in (("engine-8", 5), ("engine-9", 1)):
        for _ in range(attempts):
            stream = sidecar.silent_stream()
            stream.send(make_info(engine_id=engine_id, **changes))
            stream.end()
    told = [text for record in caplog.records if "engine refused" in (text := record.getMessage())]
    assert [(cause in text, "engine-8" in text) for text in told] == [(True, True)] * 3 + [(True, False)]


def test_policy_that_the_engine_cannot_use(start: Make, make_info: Make) -> None:
    sidecar = start(policy="static:5")
    stream = sidecar.silent_stream()
    stream.send(make_info(tiers=[0, 3]))
    code, details = stream.end()
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "no tier 5" in details
    assert len(sidecar.admin.ListEngines(pb.ListEnginesRequest()).engines) == 0


def test_oversized_message_ends_the_stream_only(start: Make, make_report: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    stream.send(make_report(1, accepted_drafts=bytes(2_000_000)))
    code, details = stream.end()
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in details
    again = sidecar.stream()
    again.send(make_report(1))
    assert again.decision().known_step_id == 1


# A varint without an end, and a string (engine_id of info) that is not UTF-8.
NO_MESSAGES = (b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe")


@pytest.mark.parametrize("data", NO_MESSAGES)
def test_first_message_that_is_none(start: Make, data: bytes) -> None:
    sidecar = start()
    call = sidecar.channel.stream_stream("/specgov.v1.SpeculationController/Control")
    with pytest.raises(grpc.RpcError) as raised:
        next(call(iter([data]), timeout=60))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"{len(data)} bytes that are no EngineMessage" in raised.value.details()
    assert sidecar.metric("specgov_messages_rejected_total", cause="unreadable") == 1
    assert sidecar.stream().call.is_active()


@pytest.mark.parametrize("data", NO_MESSAGES)
def test_bytes_that_are_no_message_are_rejected_and_the_session_lives(
    start: Make, make_info: Make, make_report: Make, data: bytes
) -> None:
    sidecar = start()
    call = sidecar.channel.stream_stream(
        "/specgov.v1.SpeculationController/Control", response_deserializer=pb.Decision.FromString
    )
    info, report = pb.EngineMessage(info=make_info()), pb.EngineMessage(report=make_report(1))
    messages = [info.SerializeToString(), data, report.SerializeToString()]
    list(call(iter(messages), timeout=60))  # ends without an error
    assert sidecar.state().reports == 1
    assert sidecar.metric("specgov_messages_rejected_total", cause="unreadable") == 1


def test_unknown_fields_and_messages_are_ignored(start: Make, make_info: Make, make_report: Make) -> None:
    """A newer engine: field 1000 (a varint) in every message, and a kind of message not known here."""
    newer_field = b"\xc0\x3e\x01"  # tag 1000 << 3 = 8000 = 0x1f40, as a varint c0 3e
    stream = start().silent_stream()
    stream.send(pb.EngineInfo.FromString(make_info().SerializeToString() + newer_field))
    stream.decision()
    stream.send_raw(pb.EngineMessage.FromString(newer_field))
    stream.send(pb.EngineEvent(kind=99))  # type: ignore[arg-type]
    stream.send(pb.StepReport.FromString(make_report(1).SerializeToString() + newer_field))
    assert stream.decision().known_step_id == 1


def test_oldest_engine_says_only_what_it_must(start: Make) -> None:
    stream = start().silent_stream()
    stream.send(pb.EngineInfo(engine_id="e", boot_id="b", tiers=[0, 5]))
    assert stream.decision().batch_size_max == 2
    stream.send(pb.StepReport(step_id=3, batch_size=5))
    decision = stream.decision()
    assert (decision.num_steps, decision.batch_size_max) == (0, 65_535)


def test_newer_stream_of_the_same_boot_takes_over(start: Make, make_report: Make) -> None:
    sidecar = start()
    older = sidecar.stream()
    older.send(make_report(5))
    older.decision()
    newer = sidecar.stream()
    code, details = older.end()
    assert code == grpc.StatusCode.ABORTED
    assert "superseded" in details
    newer.send(make_report(5), make_report(6))  # the step count goes on: 5 is not new
    assert newer.decision_that_knows(6).decision_id >= 2
    state = sidecar.state()
    assert (state.reports, state.reports_rejected, state.connected) == (2, 1, True)
    assert sidecar.metric("specgov_streams_superseded_total") == 1
    assert sidecar.metric("specgov_connected_engines") == 1


def test_new_boot_restarts_the_step_count_and_keeps_the_rest(
    start: Make, make_report: Make, eventually: Eventually
) -> None:
    sidecar = start(policy="ema")
    stream = sidecar.stream()
    for step_id in range(1, 40):
        stream.send(make_report(step_id))
    stream.decision_that_knows(39)
    stream.close()
    assert stream.end()[0] == grpc.StatusCode.OK
    eventually(lambda: not sidecar.state().connected, "the engine's leaving")
    before = dict(sidecar.admin.GetEngine(pb.GetEngineRequest(engine_id="engine-1")).estimates)
    assert before
    again = sidecar.stream(boot_id="boot-2")
    assert dict(sidecar.admin.GetEngine(pb.GetEngineRequest(engine_id="engine-1")).estimates) == before
    again.send(make_report(1))
    assert again.decision().known_step_id == 1
    assert sidecar.state().reports == 40


def test_reconnect_knows_the_last_batch(start: Make, make_report: Make, make_info: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    stream.send(make_report(1))
    stream.decision()
    again = sidecar.silent_stream()
    again.send(make_info())
    decision = again.decision()
    # The batch had 4 requests, so the first decision of the new stream is for the range from 3 on.
    assert (decision.decision_id, decision.known_step_id, decision.batch_size_min) == (1, 1, 3)


def test_stream_over_the_limit(
    start: Make, make_info: Make, make_report: Make, eventually: Eventually
) -> None:
    sidecar = start(max_streams=2)
    first = sidecar.stream(engine_id="a")
    sidecar.stream(engine_id="b")
    third = sidecar.silent_stream()
    third.send(make_info(engine_id="c"))
    code, details = third.end()
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_streams" in details
    first.send(make_report(1))
    assert first.decision().known_step_id == 1
    taken_over = sidecar.stream(engine_id="a")  # one that takes its own engine over needs no room
    taken_over.close()
    assert taken_over.end()[0] == grpc.StatusCode.OK
    eventually(lambda: sidecar.metric("specgov_connected_engines") == 1, "the first engine's leaving")
    sidecar.stream(engine_id="c")


def test_silent_streams_leave_workers_for_everyone_else(
    start: Make, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that never say who they are cannot use up the server's threads."""
    # However slow the machine, none of them is ended for its silence before the last one has come.
    monkeypatch.setattr(service, "Session", partial(Session, hello_timeout_s=600.0))
    sidecar = start(max_streams=1)
    silent = [sidecar.silent_stream() for _ in range(17)]  # the limit of 1 and the 16 above it
    # Threads begin them, in any order: the one that is to be refused must not come before another.
    eventually(lambda: sidecar.sidecar.open_streams == 17, "the silent streams' beginning")
    refused = sidecar.silent_stream()
    code, details = refused.end()
    assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are open")
    assert len(sidecar.admin.ListEngines(pb.ListEnginesRequest(), timeout=60).engines) == 0
    for stream in silent:
        stream.call.cancel()
    eventually(lambda: sidecar.sidecar.open_streams == 0, "the silent streams' end")
    sidecar.stream()


def test_vanished_engine_is_disconnected(start: Make, eventually: Eventually) -> None:
    sidecar = start()
    stream = sidecar.stream()
    stream.call.cancel()
    eventually(lambda: not sidecar.state().connected, "the engine's leaving")


def test_weights_update_forgets(start: Make, make_report: Make) -> None:
    sidecar = start(policy="ema")
    sidecar.stream(engine_id="fresh")
    fresh = _estimates(sidecar, "fresh")
    stream = sidecar.stream()
    for step_id in range(1, 40):
        stream.send(make_report(step_id))
    stream.decision_that_knows(39)
    assert _estimates(sidecar, "engine-1") != fresh
    stream.send(pb.EngineEvent(kind=pb.EngineEvent.KIND_WEIGHTS_UPDATED, step_id=39))
    stream.decision()
    assert _estimates(sidecar, "engine-1") == fresh


def test_resumed_engine_gets_a_decision(start: Make) -> None:
    stream = start().stream()
    stream.send(pb.EngineEvent(kind=pb.EngineEvent.KIND_PAUSED))
    stream.send(pb.EngineEvent(kind=pb.EngineEvent.KIND_RESUMED))
    assert stream.decision().decision_id == 2


def test_decision_lag_is_measured(start: Make, make_report: Make) -> None:
    sidecar = start()
    stream = sidecar.stream()
    stream.send(make_report(10))
    known_10 = stream.decision_that_knows(10)
    stream.send(make_report(13, decision_id=known_10.decision_id))
    stream.decision_that_knows(13)
    assert sidecar.state().decision_lag_steps_p50 == 3  # step 13 followed a decision that knew step 10
    stream.send(make_report(14, decision_id=999))  # a decision of an older stream says nothing
    stream.decision_that_knows(14)
    assert sidecar.state().decision_lag_steps_p50 == 3


def _estimates(sidecar: Any, engine_id: str) -> dict[str, float]:
    return dict(sidecar.admin.GetEngine(pb.GetEngineRequest(engine_id=engine_id)).estimates)
