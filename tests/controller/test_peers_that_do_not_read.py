"""Peers that read nothing, or take no decision: cut, where a silent engine is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hand_made_peer import HandMadePeer
from watchdog_rounds import health, rounds

from specgov.controller import doors
from specgov.controller.liveness import UNREAD_ROUNDS, Waits
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


@pytest.fixture
def many_ranges() -> str:
    """Another tier for each batch size: decisions of a quarter of a kilobyte."""
    return "schedule:" + ":".join(f"{size}={(0, 3)[size % 2]}" for size in range(1, 61))


@contextlib.contextmanager
def blocked(sidecar: Any, peer: HandMadePeer, make_info: Make, eventually: Make) -> Iterator[Any]:
    """An engine over ``peer`` whose session sends decisions until none goes out any more."""
    with peer:
        peer.send(pb.EngineMessage(info=make_info()))
        eventually(lambda: sidecar.metric("specgov_connected_engines") == 1, "the stream's beginning")
        (session,) = sidecar.sidecar._controller.sessions
        engine = sidecar.sidecar.engines.get("engine-1")

        def stands_still() -> bool:
            decisions = engine.decisions
            session.refresh()
            return session._mailbox.qsize() > 100 and engine.decisions == decisions

        eventually(stands_still, "the end of what the connection takes")
        assert session.waits_for is Waits.PEER
        assert engine.decisions < 1000
        yield session


def test_a_peer_that_takes_no_decision_is_cut_and_holds_no_memory(
    start: Make, make_info: Make, eventually: Make, many_ranges: str
) -> None:
    """It answers pings, and lets no more through than the 65,535 bytes that HTTP/2 begins with. The stream's
    thread stands still, nothing grows, and after half a minute of rounds the engine's place is free.
    """
    sidecar = start(policy=many_ranges)
    sidecar.sidecar._ticker.stop()
    with blocked(sidecar, HandMadePeer(sidecar.sidecar.address.path), make_info, eventually):
        rounds(sidecar, UNREAD_ROUNDS + 1)
        eventually(lambda: sidecar.metric("specgov_connected_engines") == 0, "the end of the stream")
        assert sidecar.metric("specgov_streams_cut_total") == 1
        assert health(sidecar) == "SERVING"
        sidecar.stream()


def test_a_peer_that_reads_no_byte_holds_its_place_no_longer(
    start: Make, make_info: Make, eventually: Make, many_ranges: str
) -> None:
    """The socket's buffer is full: no ping and not even the stream's end can be written, and gRPC keeps the
    call. The engine's place is free all the same.
    """
    sidecar = start(policy=many_ranges)
    sidecar.sidecar._ticker.stop()
    peer = HandMadePeer(sidecar.sidecar.address.path, reads=False)
    with blocked(sidecar, peer, make_info, eventually):
        rounds(sidecar, UNREAD_ROUNDS + 1)
        eventually(lambda: sidecar.metric("specgov_connected_engines") == 0, "the end of the stream")
        assert sidecar.metric("specgov_streams_cut_total") == 1
        assert health(sidecar) == "SERVING"
        sidecar.stream()


def test_a_peer_that_answers_no_ping_is_gone(
    start: Make, make_info: Make, eventually: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is silent, so that pings can be written."""
    monkeypatch.setattr(doors, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(doors, "PING_TIMEOUT_MS", 1000)
    sidecar = start()
    with HandMadePeer(sidecar.sidecar.address.path, reads=False) as peer:
        peer.send(pb.EngineMessage(info=make_info()))
        eventually(lambda: sidecar.metric("specgov_streams_total") == 1, "the stream's beginning")
        eventually(lambda: sidecar.metric("specgov_connected_engines") == 0, "the end of the stream")


def test_a_silent_engine_is_not_cut(start: Make, make_report: Make, eventually: Make) -> None:
    """One that has nothing to do for hours: no rounds of the watchdog end its stream."""
    sidecar = start()
    sidecar.sidecar._ticker.stop()
    stream = sidecar.stream()
    (session,) = sidecar.sidecar._controller.sessions
    eventually(lambda: session.waits_for is Waits.NOTHING, "the end of sending the first decision")
    rounds(sidecar, 1000)
    stream.send(make_report(1))
    assert stream.decision().known_step_id == 1
