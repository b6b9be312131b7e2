"""How long a decision may be applied, by either client. The clock stands still unless a test moves it.

It moves by powers of two. A relay's decision is as old as it is by the real clock, so those tests leave room.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specgov.client import Decision, RelayClient, Report, StreamClient, StreamLimits, TierRange
from specgov.proto.v1 import specgov_pb2 as pb

Client = StreamClient | RelayClient
MakeClient = Callable[..., Client]
WAIT_S = 60.0


@pytest.fixture(params=[StreamClient, RelayClient], ids=["thread", "relay"])
def make_client(request: Any, sidecar: Any, info: pb.EngineInfo) -> Iterator[MakeClient]:
    """Makes clients of one kind or the other, as the fixture of this name elsewhere."""
    clients: list[Client] = []

    def make(*, started: bool = True, **arguments: Any) -> Client:
        client = request.param(sidecar.target, info, **arguments)
        clients.append(client)
        if started:
            client.start()
        return client

    yield make
    for client in clients:
        client.close(timeout_s=0.0)


@pytest.fixture
def knows(eventually: Callable[[Callable[[], Any]], None]) -> Callable[[Client, int], None]:
    """Waits until a client has a decision that knows a step."""

    def wait(client: Client, step_id: int) -> None:
        eventually(lambda: (newest := client.newest()) is not None and newest.known_step_id >= step_id)

    return wait


@pytest.fixture
def decide(sidecar: Any, make_client: MakeClient, clock: Any, knows: Any) -> MakeClient:
    """A client that has made step 10 at time 0 and holds the sidecar's only decision, which knows step 10."""

    def make(limits: StreamLimits | None = None, **changes: Any) -> Client:
        def behaviour(messages: Any, context: Any) -> Any:
            for message in messages:
                if message.report.step_id == 10:
                    fields = {"known_step_id": 10, "num_steps": 3, "batch_size_min": 1, "batch_size_max": 4}
                    fields |= {"ttl_steps": 8, "ttl_ms": 500, "reason": pb.REASON_POLICY}
                    yield pb.Decision(**(fields | changes))

        sidecar.behaviour = behaviour
        client = make_client(clock=clock, limits=limits)
        client.submit(Report(10, 1, 3))
        knows(client, 10)
        return client

    return make


def run_steps(client: Client, clock: Any, first: int, count: int, step_s: float) -> None:
    for step_id in range(first, first + count):
        clock.advance(step_s)
        client.submit(Report(step_id, 1, 3))


def test_nothing_is_current_before_the_first_decision(make_client: MakeClient) -> None:
    client = make_client(started=False)
    assert client.current(1) is None
    assert client.newest() is None


def test_life_in_steps_counts_from_the_step_that_the_decision_knew(decide: MakeClient) -> None:
    client = decide(ttl_steps=8)
    assert [client.current(step_id) is not None for step_id in (11, 18, 19)] == [True, True, False]
    newest = client.newest()
    assert newest is not None
    assert (newest.known_step_id, newest.num_steps) == (10, 3)
    assert newest.received_s == pytest.approx(0.0, abs=WAIT_S)


def test_life_in_time_counts_from_report_to_report(decide: MakeClient, clock: Any) -> None:
    client = decide(ttl_ms=500, ttl_steps=100)
    run_steps(client, clock, 11, 2, 0.25)  # 0.5 s old: not older than its 500 ms
    assert client.current(13) is not None
    run_steps(client, clock, 13, 1, 0.125)
    assert client.current(14) is None


def test_an_idle_gap_does_not_age_a_decision(decide: MakeClient, clock: Any) -> None:
    client = decide(ttl_ms=500, ttl_steps=100)
    clock.advance(3600.0)
    assert client.current(11) is not None
    client.submit(Report(11, 1, 3, after_idle=True))
    assert client.current(12) is not None
    run_steps(client, clock, 12, 4, 0.125)
    assert client.current(16) is not None
    run_steps(client, clock, 16, 1, 0.125)
    assert client.current(17) is None


def test_a_pause_does_not_age_a_decision(decide: MakeClient, clock: Any) -> None:
    client = decide(ttl_ms=500, ttl_steps=100)
    client.event(pb.EngineEvent.KIND_PAUSED, 10)
    clock.advance(3600.0)
    client.event(pb.EngineEvent.KIND_RESUMED, 10)
    client.submit(Report(11, 1, 3))
    assert client.current(12) is not None
    run_steps(client, clock, 12, 5, 0.125)
    assert client.current(17) is None


def test_a_decision_that_comes_late_in_a_long_step_is_as_old_as_it_is(
    sidecar: Any, make_client: MakeClient, clock: Any, knows: Any
) -> None:
    may_answer = threading.Event()

    def behaviour(messages: Any, context: Any) -> Any:
        for message in messages:
            if message.report.step_id == 1:
                may_answer.wait(WAIT_S)
                yield pb.Decision(known_step_id=1, num_steps=3, ttl_steps=100, ttl_ms=500, reason=1)

    sidecar.behaviour = behaviour
    client = make_client(clock=clock)
    client.submit(Report(1, 1, 3))
    clock.advance(8.0)
    may_answer.set()
    knows(client, 1)
    run_steps(client, clock, 2, 1, 0.25)
    assert client.current(3) is not None  # the step took 8.25 s, but the decision is 0.25 s old
    run_steps(client, clock, 3, 2, 0.25)
    assert client.current(5) is None


def test_a_decision_for_the_record_is_never_current(decide: MakeClient) -> None:
    client = decide(reason=pb.REASON_SHADOW)
    assert client.current(11) is None
    newest = client.newest()
    assert newest is not None
    assert newest.reason == pb.REASON_SHADOW


@pytest.mark.parametrize("changes", [{"ttl_steps": 0}, {"ttl_ms": 0}])
def test_a_decision_without_a_life_is_never_current(decide: MakeClient, changes: dict[str, int]) -> None:
    assert decide(**changes).current(10) is None


def test_a_decision_cannot_outlive_the_clients_own_limits(decide: MakeClient, clock: Any) -> None:
    client = decide(StreamLimits(max_ttl_steps=16, max_ttl_s=0.5), ttl_steps=2**32 - 1, ttl_ms=2**32 - 1)
    assert client.current(26) is not None
    assert client.current(27) is None
    run_steps(client, clock, 11, 3, 0.25)
    assert client.current(14) is None


def test_the_newest_decision_replaces_the_one_before(
    sidecar: Any, make_client: MakeClient, clock: Any, knows: Any
) -> None:
    client = make_client(clock=clock)
    for step_id in (1, 2):
        client.submit(Report(step_id, 1, 3))
        knows(client, step_id)
    current = client.current(3)
    assert current is not None
    assert current.known_step_id == 2


def test_the_tier_follows_the_batch_size() -> None:
    neighbours = (TierRange(9, 16, 1), TierRange(17, 32, 0))
    decision = Decision(1, 1, 3, 2, 8, neighbours, 8, 500, pb.REASON_POLICY, "", "", None, 0.0)
    sizes = (1, 2, 8, 9, 16, 17, 32, 33)
    assert [decision.num_steps_for(size) for size in sizes] == [None, 3, 3, 1, 1, 0, 0, None]
