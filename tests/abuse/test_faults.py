"""The machine fails: disks full or read-only, no file left to open. The sidecar lives, says so, recovers."""

from __future__ import annotations

import queue
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sidecar_watch import WatchedSidecar

from specgov.controller.config import DecisionLogConfig, ServeConfig, StateConfig
from specgov.controller.server import Sidecar
from specgov.env.logged_rows import read_rows
from specgov.proto.v1 import specgov_pb2 as pb

WAIT_S = 60.0
TIERS = (0, 1, 3, 5)
TOO_MANY = "Too many open files"
NOT_SAVED, NOT_LOGGED = (
    "state cannot be saved; the sidecar goes on without",
    "decision log cannot be written; rows are dropped",
)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition()`` holds; what happens on another thread has no other sign."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {WAIT_S:g} s"
        time.sleep(0.005)


class Engine:
    """An engine that reports a step and waits for the decision that knows it."""

    def __init__(self, target: str) -> None:
        self.step_id = 0
        self._channel = grpc.insecure_channel(target)
        self._outbox: queue.SimpleQueue[pb.EngineMessage | None] = queue.SimpleQueue()
        self._call = self._channel.stream_stream(
            "/specgov.v1.SpeculationController/Control",
            request_serializer=pb.EngineMessage.SerializeToString,
            response_deserializer=pb.Decision.FromString,
        )(iter(self._outbox.get, None), timeout=10 * WAIT_S)
        info = pb.EngineInfo(engine_id="e", boot_id="b", tiers=TIERS, max_running_requests=64)
        self._outbox.put(pb.EngineMessage(info=info))
        assert next(self._call).num_steps in TIERS

    def step(self) -> None:
        self.step_id += 1
        report = pb.StepReport(step_id=self.step_id, batch_size=2, num_steps=3, accepted_drafts=bytes([1, 3]),
                               step_time_us=6000, step_time_valid=True)  # fmt: skip
        self._outbox.put(pb.EngineMessage(report=report))
        while (decision := next(self._call)).known_step_id < self.step_id:
            pass
        assert decision.num_steps in TIERS

    def close(self) -> None:
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    place = tmp_path / "small"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody can write to, root included."""
    place = tmp_path / "read-only"
    place.mkdir()
    mount("--bind", str(place), str(place))
    mount("-o", "remount,bind,ro", str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def sidecar_in(folder: Path, tmp_path: Path) -> Sidecar:
    """A sidecar that keeps states and log in ``folder`` and its socket elsewhere."""
    return Sidecar(
        ServeConfig(
            listen=f"unix://{tmp_path}/specgov.sock",
            decision_log=DecisionLogConfig(path=str(folder / "log" / "decisions.jsonl"), flush_s=0.01),
            state=StateConfig(dir=str(folder / "states"), every_s=0.1),
        )
    )


def logged_steps(folder: Path) -> list[int]:
    return [
        row["step_id"] for _, row in read_rows([folder / "log" / "decisions.jsonl"]) if row["kind"] == "step"
    ]


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The lines of a kind."""
    lines = [record.msg for record in caplog.records if isinstance(record.msg, dict)]
    return [line for line in lines if line["event"] == event]


def test_a_disk_that_is_full_for_a_while(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = sidecar_in(small_disk, tmp_path)
    sidecar.start()
    keeper, log = sidecar.keeper, sidecar.decision_log
    assert keeper is not None
    assert log is not None
    engine = Engine(sidecar.target)
    ballast = small_disk / "ballast"
    try:
        engine.step()
        fill(ballast)
        while log.rows_dropped == 0 or keeper.saves_failed < 4:
            engine.step()
        assert [line["times"] for line in said(caplog, NOT_SAVED)][:3] == [1, 2, 4]
        assert 1 <= len(said(caplog, NOT_LOGGED)) <= 12  # of the failures 1, 2, 4, 8 ...
        assert {line["problem"] for line in said(caplog, NOT_LOGGED)} == {"No space left on device"}
        ballast.unlink()
        saves = keeper.saves
        eventually(lambda: _steps_until(engine, keeper.saves > saves), "a save after the full disk")
        last = engine.step_id
        eventually(lambda: last in logged_steps(small_disk), "a row after the full disk")
    finally:
        engine.close()
        sidecar.stop()
    again = sidecar_in(small_disk, tmp_path)
    again.start()
    assert again.keeper is not None
    assert (again.keeper.set_aside, again.keeper.saved("e") is None) == (0, False)
    again.stop()


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_for_ever(file)


def write_for_ever(file: RawIOBase) -> None:
    while file.write(bytes(4096)):
        pass


def _steps_until(engine: Engine, done: bool) -> bool:
    engine.step()
    return done


def test_a_folder_that_is_read_only_for_a_while(
    read_only: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = sidecar_in(read_only, tmp_path)
    sidecar.start()
    engine = Engine(sidecar.target)
    keeper = sidecar.keeper
    assert keeper is not None
    try:
        while keeper.saves_failed < 4:
            engine.step()
        lines = said(caplog, NOT_SAVED) + said(caplog, NOT_LOGGED)
        assert {line["problem"] for line in lines} == {"Read-only file system"}
        assert [line["times"] for line in said(caplog, NOT_SAVED)][:3] == [1, 2, 4]
        mount("-o", "remount,bind,rw", str(read_only))
        eventually(lambda: _steps_until(engine, keeper.saves > 0), "a save")
        eventually(lambda: (read_only / "log" / "decisions.jsonl").exists(), "a log")
        engine.step()
        last = engine.step_id
        eventually(lambda: last in logged_steps(read_only), "a row of a step")
    finally:
        engine.close()
        sidecar.stop()


def test_no_file_descriptor_is_left_for_a_while(tmp_path: Path) -> None:
    """Connected engines are served on; saves fail and are made up for; others may connect afterwards."""
    (tmp_path / "specgov.toml").write_text(f'[state]\ndir = "{tmp_path}/states"\nevery_s = 0.1\n')
    sidecar = WatchedSidecar(tmp_path, ["--config", str(tmp_path / "specgov.toml")])
    sidecar.start()
    before = resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE)
    engine = Engine(sidecar.target)
    try:
        engine.step()
        eventually(lambda: any((tmp_path / "states").glob("*.state")), "the first save")
        # New ones would be 3 at least, as 0 to 2 are taken.
        resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        eventually(
            lambda: _steps_until(engine, "Too many open files" in sidecar.messages()), "a save that fails"
        )
        with grpc.insecure_channel(sidecar.target) as late:
            call = health_pb2_grpc.HealthStub(late).Check.future(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=WAIT_S
            )
            for _ in range(50):
                engine.step()
            resource.prlimit(sidecar.pid, resource.RLIMIT_NOFILE, before)
            assert call.result().status == health_pb2.HealthCheckResponse.SERVING
        (state,) = (tmp_path / "states").glob("*.state")
        saved_ns = state.stat().st_mtime_ns
        eventually(lambda: _steps_until(engine, state.stat().st_mtime_ns > saved_ns), "a save that works")
        assert sidecar.messages().count("Traceback") == 0
        engine.close()
    finally:
        assert sidecar.end(signal.SIGTERM) == 0
