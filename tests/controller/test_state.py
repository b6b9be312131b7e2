"""Saved states: an engine goes on after a restart as if there had been none, whatever became of the disk."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgov.controller import state_file
from specgov.controller.config import ServeConfig, StateConfig
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.state import StateError, StateKeeper
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import check_info
from specgov.policies.registry import policy_names
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]
SECONDS_UNTIL_NEVER = 86_400.0


class Sidecar:
    """Engines and their keeper, whose thread only runs at the end; streams are opened by hand."""

    def __init__(self, folder: Path, make_info: Make, write: Any = state_file.write, **config: Any) -> None:
        self._make_info = make_info
        fields = {"policy": "greedy", "guard": {"enabled": False}, **config}
        self.config = ServeConfig.model_validate(fields)
        self.engines = Engines(self.config, clock=lambda: 0.0)
        state = StateConfig(dir=str(folder), every_s=SECONDS_UNTIL_NEVER)
        self.keeper = StateKeeper(state, self.config.max_engines, self.engines.all, write)
        self.engines.keeper = self.keeper
        self.keeper.start()

    def connect(self, **changes: Any) -> Engine:
        session = Session(self.engines, Telemetry(Metrics(), timer=lambda: 0.0))
        info = self._make_info(**changes)
        return self.engines.connect(session, info, check_info(info))[0]

    def stop(self) -> None:
        self.keeper.close(60.0)


@pytest.fixture
def sidecar(tmp_path: Path, make_info: Make) -> Iterator[Callable[..., Sidecar]]:
    made: list[Sidecar] = []

    def start(**config: Any) -> Sidecar:
        made.append(Sidecar(tmp_path / "states", make_info, **config))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def reports(rng: np.random.Generator, first: int, count: int, make_report: Make) -> list[pb.StepReport]:
    """Steps of 4 to 40 requests whose tiers, acceptance and times vary."""
    made = []
    for step_id in range(first, first + count):
        size, num_steps = int(rng.integers(4, 41)), int(rng.choice([0, 1, 3, 5]))
        made.append(
            make_report(
                step_id,
                batch_size=size,
                num_steps=num_steps,
                accepted_drafts=rng.binomial(num_steps, 0.7, size).astype(np.uint8).tobytes(),
                slots_u16le=np.arange(size, dtype="<u2").tobytes(),
                slot_generations_u8=bytes(size),
                sum_seq_len_tokens=300 * size,
                step_time_us=int(5000 + 700 * num_steps + 40 * size + rng.integers(0, 300)),
            )
        )
    return made


def play(engine: Engine, steps: list[pb.StepReport]) -> list[tuple[Any, ...]]:
    """All that was decided, but for the numbers of the decisions."""
    said = []
    for report in steps:
        engine.observe(report)
        decision = engine.decide()
        assert decision is not None
        decision.decision_id = 0
        said.append(decision)
    return said


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """What is logged meanwhile, as event and fields."""
    said: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert isinstance(record.msg, dict)
            said.append(record.msg)

    handler = Keep()
    logger = logging.getLogger("specgov")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.state")
    return path


@pytest.mark.parametrize("policy", policy_names())
def test_decisions_after_a_restart_are_those_of_an_uninterrupted_run(
    policy: str, sidecar: Make, make_report: Make
) -> None:
    steps = reports(np.random.default_rng(7), 1, 160, make_report)
    first = sidecar(policy=policy)
    engine = first.connect()
    play(engine, steps[:100])
    first.stop()
    uninterrupted = play(engine, steps[100:])
    again = sidecar(policy=policy).connect()
    assert again.state().restored_reports == 100
    assert (again.policy_failure, engine.policy_failure) == ("", "")
    assert play(again, steps[100:]) == uninterrupted


def test_the_boot_goes_on_or_begins_anew(sidecar: Make, make_report: Make) -> None:
    first = sidecar()
    play(first.connect(), [make_report(9)])
    first.stop()
    second = sidecar()
    with pytest.raises(ValueError, match="step"):
        second.connect().observe(make_report(9))  # the engine has made this step already
    second.stop()
    new_boot = sidecar().connect(boot_id="boot-2")
    new_boot.observe(make_report(1))
    assert new_boot.last_record is not None
    assert new_boot.last_record.step.generations.tolist() == [102, 102, 103, 102]  # 101 on: other requests


def test_a_boot_that_finds_more_memory_keeps_all(sidecar: Make, make_report: Make) -> None:
    """Engines measure the KV cache's room at each boot; no estimate depends on it."""
    first = sidecar()
    engine = first.connect(kv_capacity_tokens=100_000)
    play(engine, [make_report(1)])
    rule = engine.policy
    assert first.connect(kv_capacity_tokens=100_007, boot_id="boot-2").policy is rule
    engine.change_policy("static:3")
    engine.change_policy("greedy")
    play(engine, [make_report(2)])
    first.stop()
    assert sidecar().connect(kv_capacity_tokens=99_000, boot_id="boot-3").restored_reports == 2


def test_what_an_operator_set_by_hand_stays(sidecar: Make) -> None:
    first = sidecar()
    engine = first.connect()
    engine.mode = pb.MODE_OFF
    engine.set_policy("threshold:8:3")
    first.stop()
    again = sidecar().connect()
    assert (again.mode, again.policy_text, again.policy.name) == (pb.MODE_OFF, "threshold:8:3", "threshold")


def test_what_was_only_configured_follows_the_configuration(sidecar: Make, make_report: Make) -> None:
    first = sidecar(policy="greedy")
    play(first.connect(), [make_report(1)])
    first.stop()
    second = sidecar(policy="thompson", mode="shadow")
    again = second.connect()
    assert (again.policy_text, again.mode, again.restored_reports) == ("thompson", pb.MODE_SHADOW, 0)


def test_an_engine_that_taught_nothing_leaves_no_file(sidecar: Make, tmp_path: Path) -> None:
    one = sidecar()
    one.connect()
    one.stop()
    assert list((tmp_path / "states").glob("*.state")) == []


def test_only_what_changed_is_written_again(sidecar: Make, make_report: Make) -> None:
    one = sidecar()
    play(one.connect(), [make_report(1)])
    play(one.connect(engine_id="engine-2"), [make_report(1)])
    one.keeper.save()
    one.keeper.save()
    assert one.keeper.saves == 2
    play(one.connect(engine_id="engine-2"), [make_report(2)])
    one.keeper.save()
    assert one.keeper.saves == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "other"}, "model was '' and is 'other'"),
        ({"draft": "other"}, "draft was"),
        ({"gpu": "other"}, "gpu was"),
        ({"tensor_parallel_size": 8}, "tensor_parallel_size was 0 and is 8"),
        ({"tiers": (0, 1, 3)}, "tiers was"),
        ({"graph_batch_sizes": (1, 2, 4)}, "graph_batch_sizes was"),
        ({"max_running_requests": 32}, "max_running_requests was 64 and is 32"),
        ({"profile": "h200-llama-3.1-8b"}, "profile was '' and is 'sha256:"),
    ],
)
def test_another_engine_under_the_same_id_starts_cold(
    sidecar: Make, make_report: Make, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    first = sidecar()
    play(first.connect(), [make_report(1)])
    first.stop()
    second = sidecar()
    with capture_logs() as logs:
        again = second.connect(**changes)
        second.keeper.save()
    assert again.restored_reports == 0
    (said,) = [entry for entry in logs if entry["level"] == "error"]
    assert problem in said["problem"]
    assert [path.suffix for path in (tmp_path / "states").iterdir() if path.name != "lock"] == [".bad"]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def newer(content: bytes) -> bytes:
    return content.replace(b"specgov.state 1 ", b"specgov.state 2 ", 1)


def with_document(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        document = state_file.from_bytes(content)
        change(document)
        return state_file.to_bytes(document)

    return damage


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": cut,
    "one bit": flip,
    "newer": newer,
    "another file": lambda _: b"\x80\x04\x95pickle",
    "no newline": lambda content: content.replace(b"\n", b" ", 1),
    "another engine's": with_document(lambda document: document.update(engine_id="engine-2")),
    "no engine": with_document(lambda document: document.pop("engine_id")),
    "no identity": with_document(lambda document: document.pop("identity")),
    "no policy": with_document(lambda document: document.update(policy=None)),
    "another version": with_document(lambda document: document["policy"].update(version="0")),
    "nothing learnt": with_document(lambda document: document["policy"].update(learnt=None)),
    "less learnt": with_document(lambda document: document["policy"]["learnt"].pop("model")),
    "an older release's": with_document(
        lambda document: document["policy"]["learnt"]["model"]["cost"].pop("_trial")
    ),
    "odd batch": with_document(lambda document: document.update(batch={"batch_size": 1, "x": 2})),
    "odd numbers": with_document(lambda document: document.update(last_step_id="many")),
    "odd hand": with_document(lambda document: document.update(by_hand=[])),
    "policy that is none": with_document(lambda document: document.update(by_hand={"policy": "best"})),
    "policy of a file": with_document(lambda document: document.update(by_hand={"policy": "ppo:/etc"})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_is_set_aside_with_one_error(
    damage: str, sidecar: Make, make_report: Make, tmp_path: Path
) -> None:
    steps = [make_report(step_id) for step_id in range(1, 30)]
    first = sidecar(policy="thompson")
    play(first.connect(), steps)
    first.stop()
    path = the_file(tmp_path / "states")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with capture_logs() as logs:
        second = sidecar(policy="thompson")
        again = second.connect()
        second.keeper.save()
    (said,) = [entry for entry in logs if entry["level"] == "error"]
    assert said["event"].startswith("saved state cannot be used and is set aside")
    assert said["problem"]
    assert second.keeper.set_aside == 1
    assert not path.exists()
    assert path.with_name(path.name + ".bad").exists()
    assert again.restored_reports == 0
    # Cold is cold: it decides as an engine that was never seen, its generator included.
    assert play(again, steps) == play(
        Sidecar(tmp_path / "fresh", second._make_info, policy="thompson").connect(), steps
    )
    second.stop()
    assert sidecar(policy="thompson").connect().restored_reports == len(steps)  # and it saves again


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


def test_nothing_is_written_where_no_folder_is_named(start: Make, make_report: Make, tmp_path: Path) -> None:
    running = start(policy="greedy")
    running.stream().send(make_report(1))
    running.sidecar.stop()
    assert {path.name for path in tmp_path.iterdir()} <= {"specgov.sock"}


def test_a_real_sidecar_saves_at_its_end_and_restores_at_its_start(
    start: Make, make_report: Make, tmp_path: Path
) -> None:
    state = {"dir": str(tmp_path / "states")}
    running = start(policy="greedy", state=state)
    stream = running.stream()
    stream.send(make_report(1))
    stream.decision_that_knows(1)
    running.sidecar.stop()
    again = start(policy="greedy", state=state)
    again.stream()
    assert again.state().restored_reports == 1
    assert again.metric("specgov_state_saves_failed_total") == 0


def test_a_save_holds_the_engine_only_while_its_numbers_are_copied(sidecar: Make, make_report: Make) -> None:
    locked: list[bool] = []
    one: Sidecar

    def write(path: Path, content: bytes) -> None:
        locked.append(engine.lock.locked())

    one = sidecar(write=write)
    engine = one.connect()
    play(engine, [make_report(1)])
    one.keeper.save()
    assert locked == [False]
