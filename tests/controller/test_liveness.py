"""Health of a sidecar whose socket is lost or whose decision path hangs; rounds are the test's own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watchdog_rounds import health, rounds

from specgov.controller.liveness import STUCK_ROUNDS, Waits

Make = Callable[..., Any]


def _remove(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))  # while it is there the new file cannot have its inode
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))


def _remove_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


@pytest.mark.parametrize("lose", [_remove, _replace, _remove_folder])
@pytest.mark.parametrize("door", ["listen", "admin_listen"])
def test_a_sidecar_whose_socket_is_lost_says_what_to_do(
    start: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lose: Callable[[Path], None],
    door: str,
) -> None:
    """Whoever is connected is served on, and asks in vain for nothing: health and metric say it."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "s.sock"
    doors_of = {"listen": f"unix://{tmp_path}/engines.sock", "admin_listen": f"unix://{tmp_path}/admin.sock"}
    sidecar = start(**{**doors_of, door: f"unix://{path}"})
    sidecar.sidecar._ticker.stop()
    stream = sidecar.stream()
    sidecar.sidecar.watchdog.check()
    assert (health(sidecar), sidecar.metric("specgov_stuck")) == ("SERVING", 0)
    lose(path)
    for _ in range(3):
        sidecar.sidecar.watchdog.check()
    assert (health(sidecar), sidecar.metric("specgov_stuck")) == ("NOT_SERVING", 1)
    told = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert [("restart the sidecar" in text, "serving" in text) for text in told][-1:] == [(True, False)]
    assert sum("restart the sidecar" in text for text in told) == 1
    stream.close()


def test_a_socket_that_cannot_be_looked_at_or_comes_back_is_not_lost(
    start: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = start()
    path = sidecar.sidecar.address.path
    moved = path.rename(path.with_suffix(".moved"))
    assert sidecar.sidecar._doors.lost_sockets() == [str(path)]
    moved.rename(path)
    assert sidecar.sidecar._doors.lost_sockets() == []

    def refuse(path: Path) -> None:
        raise PermissionError(str(path))

    monkeypatch.setattr(Path, "lstat", refuse)
    assert sidecar.sidecar._doors.lost_sockets() == []


def test_health_follows_the_decision_path(
    start: Make, make_report: Make, eventually: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that hangs while its engine's lock is held, in a real sidecar whose rounds the test makes."""
    sidecar = start()
    sidecar.sidecar._ticker.stop()
    other = sidecar.stream(engine_id="other")
    stream = sidecar.stream()
    rule, go_on = sidecar.sidecar.engines.get("engine-1").policy, threading.Event()

    def observe(self: Any, step: Any) -> None:
        if self is rule:
            go_on.wait()

    monkeypatch.setattr(type(rule), "observe", observe)
    stream.send(make_report(1))
    try:
        eventually(
            lambda: any(s.waits_for is Waits.SIDECAR for s in sidecar.sidecar._controller.sessions),
            "the report's arrival",
        )
        assert health(sidecar) == "SERVING"
        rounds(sidecar, STUCK_ROUNDS + 1)
        assert health(sidecar) == health(sidecar, "specgov.v1.SpeculationController") == "NOT_SERVING"
        assert sidecar.metric("specgov_stuck") == 1
        other.send(make_report(1))  # the others are served meanwhile
        assert other.decision().known_step_id == 1
    finally:
        go_on.set()
    stream.decision_that_knows(1)
    rounds(sidecar, 1)
    assert health(sidecar) == "SERVING"
