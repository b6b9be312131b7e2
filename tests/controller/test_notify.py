"""What systemd hears: ready, alive as long as decisions make progress, stopping."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specgov.controller.liveness import STUCK_ROUNDS, Waits
from specgov.controller.notify import ALIVE, READY, STOPPING, Notifier

Make = Callable[..., Any]


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        listening.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield listening


class StuckStream:
    moves, waits_for, name = 0, Waits.SIDECAR, "engine-1"


def test_a_service_is_ready_alive_and_stopping(
    start: Make, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgov.controller.ticker.Ticker.start", lambda self: None)  # the test ticks
    sidecar = start().sidecar
    assert systemd.recv(100).decode() == READY
    sidecar._ticker.tick()
    assert systemd.recv(100).decode() == ALIVE
    sidecar.watchdog._streams = lambda: [StuckStream]
    sidecar.watchdog._pools = []
    for _ in range(STUCK_ROUNDS):
        sidecar._ticker.tick()
        assert systemd.recv(100).decode() == ALIVE
    sidecar._ticker.tick()  # stuck from here on: silence until it stops
    sidecar.stop()
    assert systemd.recv(100).decode() == STOPPING


@pytest.mark.parametrize("name", ["", "/there/is/nobody", "@specgov-test-nobody"])
def test_nobody_to_tell_is_no_error(name: str) -> None:
    Notifier({"NOTIFY_SOCKET": name}).say(READY)
    Notifier({}).say(READY)


def test_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0specgov-test-notify")
        listening.settimeout(60)
        Notifier({"NOTIFY_SOCKET": "@specgov-test-notify"}).say(ALIVE)
        assert listening.recv(100) == b"WATCHDOG=1"
