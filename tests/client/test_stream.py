"""Connection, reconnection, and a sidecar that does what it should not, while the engine's calls work."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from specgov.client import ClientError, Report, StreamClient, StreamLimits
from specgov.proto.v1 import specgov_pb2 as pb

MakeClient = Callable[..., StreamClient]
Eventually = Callable[[Callable[[], Any]], None]
WAIT_S = 60.0
FAST = StreamLimits(backoff_base_s=0.01, backoff_max_s=0.05)


def decision(step_id: int, **changes: Any) -> pb.Decision:
    fields: dict[str, Any] = {"num_steps": 3, "batch_size_min": 1, "batch_size_max": 4, "ttl_steps": 8}
    fields |= {"ttl_ms": 60_000, "reason": pb.REASON_POLICY, "known_step_id": step_id}
    return pb.Decision(**(fields | changes))


def step(client: StreamClient, step_id: int) -> None:
    """One healthy step: report it and see the decision on it."""
    client.submit(Report(step_id, 1, 3))
    assert client.wait_for_step(step_id, WAIT_S) is not None
    assert client.current(step_id + 1) is not None


def test_a_stream_begins_with_the_engines_info_and_carries_reports_and_events(
    sidecar: Any, make_client: MakeClient, info: pb.EngineInfo
) -> None:
    client = make_client()
    client.submit(Report(1, 2, 3, accepted=b"\x00\x03"))
    client.event(pb.EngineEvent.KIND_WEIGHTS_UPDATED, 1)
    client.submit(Report(2, 2, 3))
    messages = [sidecar.next_message() for _ in range(4)]
    assert messages[0].info == info
    assert messages[1].report.accepted_drafts == b"\x00\x03"
    assert messages[2].event == pb.EngineEvent(kind=pb.EngineEvent.KIND_WEIGHTS_UPDATED, step_id=1)
    assert messages[3].report.step_id == 2
    assert client.wait_for_step(2, WAIT_S) is not None
    stats = client.stats()
    assert (stats.connected, stats.reconnects, stats.sent, stats.decisions) == (True, 0, 2, 2)


def test_tcp_serves_as_well(info: pb.EngineInfo, eventually: Eventually) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = StreamClient(f"127.0.0.1:{port}", info, limits=FAST)
    client.start()
    # A server without the service still answers, with UNIMPLEMENTED: the connection was made.
    eventually(lambda: client.stats().last_error.startswith("UNIMPLEMENTED"))
    client.close()
    server.stop(0).wait()


def test_after_a_restart_the_info_comes_first_again(
    sidecar: Any, make_client: MakeClient, eventually: Eventually, info: pb.EngineInfo
) -> None:
    client = make_client(limits=FAST)
    step(client, 1)
    sidecar.stop()
    eventually(lambda: not client.stats().connected)
    assert client.current(2) is not None  # what came before the loss still lives as long as its TTL says
    assert client.current(10) is None
    sidecar.start()
    step(client, 20)
    messages = [sidecar.next_message() for _ in range(4)]
    assert [m.WhichOneof("message") for m in messages] == ["info", "report", "info", "report"]
    assert messages[2].info == info
    assert (client.stats().reconnects, client.stats().connected) == (1, True)


def test_a_sidecar_that_ends_the_stream_is_asked_again(
    sidecar: Any, make_client: MakeClient, eventually: Eventually
) -> None:
    sidecar.behaviour = lambda messages, context: iter(())
    client = make_client(limits=FAST)
    eventually(lambda: sidecar.streams >= 3)
    assert client.stats().last_error == "the sidecar ended the stream"


def test_a_refusal_is_kept_for_people_and_asked_again(
    sidecar: Any, make_client: MakeClient, eventually: Eventually
) -> None:
    def refuse(messages: Any, context: grpc.ServicerContext) -> Iterator[pb.Decision]:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "32 streams are open, the limit")
        yield pb.Decision()

    sidecar.behaviour = refuse
    client = make_client(limits=FAST)
    eventually(lambda: sidecar.streams >= 3)
    assert client.stats().last_error == "RESOURCE_EXHAUSTED: 32 streams are open, the limit"


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 16, decision(1, policy="x" * 70_000)],
    ids=["not a message", "larger than 64 KiB"],
)
def test_garbage_ends_the_stream_and_nothing_else(
    sidecar: Any, make_client: MakeClient, eventually: Eventually, garbage: Any
) -> None:
    healthy = sidecar.behaviour
    sidecar.behaviour = lambda messages, context: itertools.chain([garbage], messages)
    client = make_client(limits=FAST)
    client.submit(Report(1, 1, 3))
    eventually(lambda: client.stats().last_error)
    assert client.current(2) is None
    assert client.newest() is None
    sidecar.behaviour = healthy
    step_ids = itertools.count(2)

    def is_answered() -> bool:
        """A report on a stream that still ends with garbage is lost with it."""
        step_id = next(step_ids)
        client.submit(Report(step_id, 1, 3))
        return client.wait_for_step(step_id, 0.1) is not None

    eventually(is_answered)


@pytest.mark.parametrize(
    "bad",
    [
        decision(2, num_steps=2),
        decision(2, neighbours=[pb.TierRange(batch_size_min=5, batch_size_max=9, num_steps=7)]),
        decision(2, neighbours=[pb.TierRange(batch_size_min=5, batch_size_max=9, num_steps=1)] * 65),
        decision(2, policy="x" * 257),
        decision(2, policy_version="x" * 257),
        decision(2**63),
    ],
    ids=[
        "unknown tier",
        "unknown tier for a neighbour",
        "too many ranges",
        "a long policy",
        "a long version",
        "a step not made yet",
    ],
)
def test_a_decision_that_cannot_be_meant_is_rejected_and_counted(
    sidecar: Any, make_client: MakeClient, eventually: Eventually, bad: pb.Decision
) -> None:
    def behaviour(messages: Any, context: Any) -> Iterator[pb.Decision]:
        for message in messages:
            if message.HasField("report"):
                yield bad if message.report.step_id == 2 else decision(message.report.step_id)

    sidecar.behaviour = behaviour
    client = make_client()
    step(client, 1)
    client.submit(Report(2, 1, 3))
    eventually(lambda: client.stats().decisions_rejected == 1)
    newest = client.newest()
    assert newest is not None
    assert newest.known_step_id == 1
    step(client, 3)
    assert client.stats().reconnects == 0


def test_a_flood_is_cut_off(
    sidecar: Any, make_client: MakeClient, eventually: Eventually, clock: Any
) -> None:
    """The clock stands still, so all fall into one second: 50 are allowed, and two more for each report."""
    healthy = sidecar.behaviour
    cut_off = threading.Event()

    def flood(messages: Any, context: grpc.ServicerContext) -> Iterator[pb.Decision]:
        sidecar.behaviour = healthy
        context.add_callback(cut_off.set)
        return itertools.repeat(decision(0))

    sidecar.behaviour = flood
    client = make_client(clock=clock, limits=StreamLimits(0.01, 0.05, spare_decisions_per_s=50))
    assert cut_off.wait(WAIT_S)
    eventually(lambda: client.stats().last_error == "the sidecar floods the stream with decisions")
    assert client.stats().decisions == 51
    step(client, 1)


def test_many_decisions_are_no_flood_when_as_many_reports_were_sent(
    make_client: MakeClient, clock: Any
) -> None:
    client = make_client(clock=clock, limits=StreamLimits(spare_decisions_per_s=1))
    for step_id in range(1, 101):
        step(client, step_id)
    assert client.stats().reconnects == 0


def test_waits_between_attempts_grow_and_have_full_jitter(
    tmp_path: Path, info: pb.EngineInfo, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    """And all that time one warning is enough."""

    class Recorded(random.Random):
        def uniform(self, a: float, b: float) -> float:
            bounds.append((a, b))
            return 0.0

    bounds: list[tuple[float, float]] = []
    client = StreamClient(f"unix://{tmp_path}/nobody", info, rng=Recorded(), clock=lambda: 0.0)
    client.start()
    eventually(lambda: len(bounds) >= 8)
    client.close()
    assert bounds[:8] == [(0.0, b) for b in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)]
    assert [record.name for record in caplog.records] == ["specgov.client"]


def test_a_sidecar_that_refuses_the_engine_each_time_is_told_of_once_for_each_reason(
    sidecar: Any, make_client: MakeClient, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of these streams is a connection that the sidecar ends."""
    reason = "unknown profile"

    def refuse(messages: Any, context: Any) -> Iterator[pb.Decision]:
        next(messages)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        yield from ()

    sidecar.behaviour = refuse
    make_client(limits=StreamLimits(backoff_max_s=1e6, backoff_base_s=1e-6))
    eventually(lambda: sidecar.streams >= 5)
    reason = "bad tiers"
    streams = sidecar.streams
    eventually(lambda: sidecar.streams >= streams + 5)
    told = [record.getMessage() for record in caplog.records if record.name == "specgov.client"]
    assert ["unknown profile" in text for text in told] == [True, False]
    assert "bad tiers" in told[1]


def test_a_stream_that_lived_long_starts_the_waits_again(
    sidecar: Any, make_client: MakeClient, eventually: Eventually, clock: Any
) -> None:
    class Recorded(random.Random):
        def uniform(self, a: float, b: float) -> float:
            bounds.append(b)
            return 0.0

    def end_at_once(messages: Any, context: Any) -> Iterator[pb.Decision]:
        return iter(())

    def live_for_5_s(messages: Any, context: Any) -> Iterator[pb.Decision]:
        clock.advance(5.0)
        sidecar.behaviour = end_at_once
        return iter(())

    def end_thrice(messages: Any, context: Any) -> Iterator[pb.Decision]:
        if sidecar.streams == 3:
            sidecar.behaviour = live_for_5_s
        return iter(())

    bounds: list[float] = []
    sidecar.behaviour = end_thrice
    make_client(clock=clock, rng=Recorded())
    eventually(lambda: len(bounds) >= 6)
    assert bounds[:6] == [0.1, 0.2, 0.4, 0.1, 0.2, 0.4]


def test_without_a_sidecar_the_engine_only_finds_no_decision(
    tmp_path: Path, info: pb.EngineInfo, eventually: Eventually
) -> None:
    client = StreamClient(f"unix://{tmp_path}/nobody", info, queue_size=4, limits=FAST)
    client.start()
    for step_id in range(1, 101):
        client.submit(Report(step_id, 1, 3))
        assert client.current(step_id + 1) is None
    eventually(lambda: client.stats().last_error.startswith("UNAVAILABLE"))
    stats = client.stats()
    assert (stats.connected, stats.submitted, stats.queued, stats.dropped) == (False, 100, 4, 96)
    assert client.wait_for_step(1, 0.0) is None
    client.close()


def test_close_sends_what_is_queued_and_ends_the_thread(sidecar: Any, make_client: MakeClient) -> None:
    client = make_client()
    step(client, 1)
    for step_id in range(2, 202):
        client.submit(Report(step_id, 1, 3))
    client.event(pb.EngineEvent.KIND_SHUTTING_DOWN, 201)
    client.close(timeout_s=WAIT_S)
    messages = [sidecar.next_message() for _ in range(203)]
    assert [m.report.step_id for m in messages[1:202]] == list(range(1, 202))
    assert messages[202].event.kind == pb.EngineEvent.KIND_SHUTTING_DOWN
    assert not client.stats().connected
    client.close()


def test_close_does_not_wait_for_a_sidecar_that_does_not_end(sidecar: Any, make_client: MakeClient) -> None:
    entered, cut_off = threading.Event(), threading.Event()

    def hang(messages: Any, context: grpc.ServicerContext) -> Iterator[pb.Decision]:
        assert context.add_callback(cut_off.set)
        entered.set()
        cut_off.wait(WAIT_S)
        return iter(())

    sidecar.behaviour = hang
    client = make_client()
    assert entered.wait(WAIT_S)
    client.close(timeout_s=0.0)
    assert cut_off.wait(WAIT_S)


def test_a_client_that_is_forgotten_ends_its_stream(sidecar: Any, info: pb.EngineInfo) -> None:
    client = StreamClient(sidecar.target, info)
    client.start()
    step(client, 1)
    (thread,) = (t for t in threading.enumerate() if t.name == "specgov-client")
    del client
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_client_starts_once(make_client: MakeClient) -> None:
    client = make_client()
    with pytest.raises(ClientError, match="already"):
        client.start()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("unix://relative", "absolute"),
        ("unix:///" + "x" * 107, "107 bytes"),
        ("localhost", "HOST:PORT"),
        ("localhost:", "HOST:PORT"),
        (":50051", "HOST:PORT"),
        ("localhost:0", "HOST:PORT"),
        ("localhost:65536", "HOST:PORT"),
    ],
)
def test_a_target_that_cannot_be_is_refused(info: pb.EngineInfo, target: str, message: str) -> None:
    with pytest.raises(ClientError, match=message):
        StreamClient(target, info)


def test_arguments_that_cannot_be_are_refused(info: pb.EngineInfo) -> None:
    with pytest.raises(ClientError, match="queue_size"):
        StreamClient("localhost:1", info, queue_size=0)
    with pytest.raises(ClientError, match="tiers"):
        StreamClient("localhost:1", pb.EngineInfo())


def test_a_report_tells_how_long_the_last_decision_took(
    sidecar: Any, make_client: MakeClient, clock: Any
) -> None:
    proceed = threading.Semaphore(0)

    def after_a_sign(messages: Any, context: grpc.ServicerContext) -> Iterator[pb.Decision]:
        for message in messages:
            if message.HasField("report") and message.report.step_id != 2:
                proceed.acquire()
                yield decision(message.report.step_id)

    sidecar.behaviour = after_a_sign
    client = make_client(clock=clock)
    sidecar.next_message()  # the info

    def report(step_id: int) -> pb.StepReport:
        client.submit(Report(step_id, 1, 3))
        return sidecar.next_report()

    def answered_after(seconds: float, step_id: int) -> None:
        clock.advance(seconds)
        proceed.release()
        assert client.wait_for_step(step_id, WAIT_S) is not None

    assert not report(1).HasField("round_trip_us")
    answered_after(0.0015, 1)
    assert report(2).round_trip_us == 1500
    # 2 is never answered by itself: the decision that knows 3 is its answer too, 4 + 3 ms after it was sent.
    clock.advance(0.004)
    assert not report(3).HasField("round_trip_us")
    answered_after(0.003, 3)
    assert report(4).round_trip_us == 7000
    answered_after(10.5, 4)  # so late that it answers nothing
    assert not report(5).HasField("round_trip_us")
    answered_after(0.001, 5)
    assert report(6).round_trip_us == 1000
    proceed.release()
