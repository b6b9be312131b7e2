"""Saved states on disks that are full, fail or belong to another sidecar."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from state_bench import capture_logs, play, the_file

from specgov.controller import state_file
from specgov.controller.state import StateError

Make = Callable[..., Any]


class Disk:
    """Takes files while it is well."""

    def __init__(self) -> None:
        self.well = True

    def write(self, path: Path, content: bytes) -> None:
        if not self.well:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        state_file.write(path, content)


def test_a_full_disk_costs_saves_and_nothing_else(sidecar: Make, make_report: Make, tmp_path: Path) -> None:
    disk = Disk()
    one = sidecar(write=disk.write)
    engine = one.connect()
    play(engine, [make_report(1)])
    one.keeper.save()
    before = the_file(tmp_path / "states").read_bytes()
    disk.well = False
    with capture_logs() as logs:
        for step_id in range(2, 7):
            play(engine, [make_report(step_id)])
            one.keeper.save()
    assert (one.keeper.saves, one.keeper.saves_failed) == (1, 5)
    assert [entry["times"] for entry in logs] == [1, 2, 4]
    assert logs[0]["problem"] == "No space left on device"
    assert the_file(tmp_path / "states").read_bytes() == before
    disk.well = True
    one.keeper.save()
    assert one.keeper.saves == 2


def test_a_rule_that_cannot_be_saved_costs_the_others_nothing(
    sidecar: Make, make_report: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever taking a snapshot raises: it is counted and said, and the engines after it are saved."""
    one = sidecar()
    broken, sound = one.connect(engine_id="a"), one.connect(engine_id="b")
    play(broken, [make_report(1)])
    play(sound, [make_report(1)])

    def fails() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(broken, "snapshot", fails)
    with capture_logs() as logs:
        one.keeper.save()
    assert (one.keeper.saves, one.keeper.saves_failed) == (1, 1)
    assert [entry["problem"] for entry in logs] == ["Too many open files"]
    assert the_file(tmp_path / "states").name.startswith("b-")
    monkeypatch.undo()
    one.keeper.save()
    assert one.keeper.saves == 2


def test_a_write_that_fails_half_way_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.state"
    state_file.write(path, b"older")

    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        state_file.write(path, b"newer")
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_used_is_tried_again(
    sidecar: Make, make_report: Make, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "states"
    in_the_way.write_text("")
    with capture_logs() as logs:
        one = sidecar()
        play(one.connect(), [make_report(1)])
        one.keeper.save()
    assert one.keeper.saves_failed == 2
    assert logs[0]["event"].startswith("state cannot be saved")
    in_the_way.unlink()
    one.keeper.save()
    assert one.keeper.saves == 1


def test_a_write_cut_off_by_a_crash_leaves_no_trace(sidecar: Make, make_report: Make, tmp_path: Path) -> None:
    first = sidecar()
    play(first.connect(), [make_report(1)])
    first.stop()
    path = the_file(tmp_path / "states")
    path.with_name(path.name + ".tmp").write_bytes(b"half")
    again = sidecar().connect()
    assert again.restored_reports == 1
    assert {entry.name for entry in (tmp_path / "states").iterdir()} == {path.name, "lock"}


def test_two_sidecars_do_not_share_a_folder(sidecar: Make) -> None:
    first = sidecar()
    with pytest.raises(
        StateError, match=r"another sidecar keeps its states here; give each its own state\.dir"
    ):
        sidecar()
    first.stop()
    sidecar()


def test_engines_that_come_and_go_do_not_fill_the_disk(
    sidecar: Make, make_report: Make, tmp_path: Path
) -> None:
    one = sidecar(max_engines=3)
    for number in range(6):
        engine = one.connect(engine_id=f"../{number}")
        play(engine, [make_report(1)])
        one.keeper.save()
        for path in (tmp_path / "states").glob("*.state"):  # so that each is older than the next
            at = path.stat().st_mtime_ns - 10**9
            os.utime(path, ns=(at, at))
        assert engine.session is not None
        one.engines.disconnect(engine, engine.session)
    assert len(one.keeper._marks) == 3
    names = sorted(path.name[:4] for path in (tmp_path / "states").glob("*.state"))
    assert names == ["___3", "___4", "___5"]
