"""The decision log: what a row holds, rotation, and disks that fail."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log import DecisionLog, open_to_append
from specgov.controller.step_record import StepRecord
from specgov.controller.validation import check_report
from specgov.policies.types import EngineSpec
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]

DECISION = pb.Decision(
    decision_id=8,
    known_step_id=3,
    num_steps=5,
    reason=pb.REASON_EXPLORATION,
    policy="greedy",
    policy_version="2",
    propensity=0.25,
    estimates=[
        pb.TierEstimate(num_steps=0, expected_tokens=4.0, expected_ms=5.5),
        pb.TierEstimate(num_steps=5, expected_tokens=7.123456, expected_ms=float("nan")),
    ],
)


@pytest.fixture
def record(make_report: Make) -> Callable[..., StepRecord]:
    def make(step_id: int = 3, **changes: Any) -> StepRecord:
        step = check_report(make_report(step_id, **changes), EngineSpec(tiers=(0, 1, 3, 5)), 0)
        return StepRecord(
            step, followed_decision_id=6, lag_steps=2, engine_rule_num_steps=None, reports_dropped=1
        )

    return make


def _log(path: Path, open_file: Any = open_to_append, **config: Any) -> DecisionLog:
    return DecisionLog(
        path, DecisionLogConfig(**config), wall_clock=lambda: 1_800_000_000.25, open_file=open_file
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows(tmp_path: Path, make_info: Make, record: Make) -> None:
    log = _log(tmp_path / "new" / "log.jsonl")
    log.stream(make_info(model="llama", kv_capacity_tokens=2**40), "greedy")
    log.steps(
        "engine-1", [record(padded_batch_size=8, warm_up=True, after_idle=True)], DECISION, pb.MODE_ACTIVE
    )
    log.steps("engine-1", [record(4, step_time_valid=False)], None, pb.MODE_OFF)
    log.flush()
    header, engine, step, silent = _rows(tmp_path / "new" / "log.jsonl")
    assert header == {
        "kind": "log",
        "schema": "specgov.decision_log",
        "schema_version": 2,
        "time_s": 1_800_000_000.25,
    }
    assert (engine["kind"], engine["time_s"], engine["policy"]) == ("engine", 1_800_000_000.25, "greedy")
    assert (engine["model"], engine["tiers"], engine["kv_capacity_tokens"]) == ("llama", [0, 1, 3, 5], 2**40)
    assert (engine["gpu"], engine["graph_batch_sizes"], engine["draft_kv_stays_warm"]) == ("", [], None)
    assert step == {
        "kind": "step",
        "time_s": 1_800_000_000.25,
        "engine_id": "engine-1",
        "step_id": 3,
        "batch_size": 4,
        "padded_batch_size": 8,
        "cuda_graph_ran": None,
        "num_steps": 3,
        "accepted": [1, 1, 1, 1],  # one request each with 0, 1, 2 and 3 accepted drafts
        "sum_seq_len_tokens": 1000,
        "max_seq_len_tokens": 400,
        "waiting_requests": 0,
        "kv_use_ratio": None,
        "step_ms": 6.5,
        "flags": ["after_idle", "warm_up"],
        "followed_decision_id": 6,
        "lag_steps": 2,
        "engine_rule_num_steps": None,
        "reports_dropped": 1,
        "mode": "active",
        "decision": {
            "decision_id": 8,
            "known_step_id": 3,
            "num_steps": 5,
            "reason": "exploration",
            "policy": "greedy",
            "policy_version": "2",
            "propensity": 0.25,
            "guard_cause": None,
            "by_candidate": False,
            "expected_tokens": [4.0, 7.1235],
            "expected_ms": [5.5, None],
        },
    }
    assert (silent["step_ms"], silent["mode"], silent["decision"]) == (None, "off", None)
    assert log.rows_dropped == 0


def test_rotation_by_size(tmp_path: Path, make_info: Make, record: Make) -> None:
    path = tmp_path / "log.jsonl"
    log = _log(
        path, max_mb=0.002, keep_files=2
    )  # 2,000 bytes: two rows of some 570 each after header and engine
    log.stream(make_info(), "greedy")
    for step_id in range(1, 21):
        log.steps("engine-1", [record(step_id)], DECISION, pb.MODE_ACTIVE)
        log.flush()
    files = [path, path.with_name("log.jsonl.1"), path.with_name("log.jsonl.2")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    for file in files:
        assert file.stat().st_size <= 2000
        header, engine, *_ = _rows(file)  # each file stands alone
        assert (header["kind"], engine["kind"]) == ("log", "engine")
    kept = [row["step_id"] for file in reversed(files) for row in _rows(file) if row["kind"] == "step"]
    assert kept == list(range(kept[0], 21))
    assert log.rows_dropped == 0


def test_rotation_within_one_flush(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "log.jsonl"
    log = _log(path, max_mb=0.002, keep_files=50)
    log.steps("engine-1", [record(step_id) for step_id in range(1, 21)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    steps = [row["step_id"] for file in tmp_path.iterdir() for row in _rows(file) if row["kind"] == "step"]
    assert sorted(steps) == list(range(1, 21))
    assert all(file.stat().st_size <= 2000 for file in tmp_path.iterdir())


def test_rotation_by_age(tmp_path: Path, record: Make) -> None:
    path, now_s = tmp_path / "log.jsonl", [1000.0]
    log = DecisionLog(path, DecisionLogConfig(rotate_s=3600.0), wall_clock=lambda: now_s[0])
    for step_id, at_s in ((1, 1000.0), (2, 4599.0), (3, 4600.0), (4, 4700.0)):
        now_s[0] = at_s
        log.steps("engine-1", [record(step_id)], DECISION, pb.MODE_ACTIVE)
        log.flush()
    assert [row["step_id"] for row in _rows(path.with_name("log.jsonl.1"))[1:]] == [1, 2]
    assert [row["step_id"] for row in _rows(path)[1:]] == [3, 4]
    # A file's age is that of its header, also for a sidecar that comes later.
    now_s[0] = 4600.0 + 3600.0
    log = DecisionLog(path, DecisionLogConfig(rotate_s=3600.0), wall_clock=lambda: now_s[0])
    log.steps("engine-1", [record(5)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert [row["step_id"] for row in _rows(path)[1:]] == [5]


def test_a_file_of_an_older_schema_is_rotated_away(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "log.jsonl"
    older = '{"kind":"log","schema":"specgov.decision_log","schema_version":1}\n'
    path.write_text(older)
    log = _log(path)
    log.steps("engine-1", [record(1)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert path.with_name("log.jsonl.1").read_text() == older
    assert [row["kind"] for row in _rows(path)] == ["log", "step"]


@pytest.mark.parametrize("keep_files", [0, 2])
def test_a_file_that_is_no_log_is_left_alone(tmp_path: Path, record: Make, keep_files: int) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("what I must not forget\n")
    log = _log(path, keep_files=keep_files)
    log.steps("engine-1", [record(1)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert log.rows_dropped == 1
    assert path.read_text() == "what I must not forget\n"


def test_no_old_files_are_kept_where_none_are_wanted(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "log.jsonl"
    log = _log(path, max_mb=0.001, keep_files=0)
    log.steps("engine-1", [record(step_id) for step_id in range(1, 21)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert list(tmp_path.iterdir()) == [path]
    assert _rows(path)[-1]["step_id"] == 20


def test_full_queue_drops_and_counts(tmp_path: Path, record: Make) -> None:
    log = _log(tmp_path / "log.jsonl", queue_rows=3)
    log.steps("engine-1", [record(step_id) for step_id in range(1, 6)], DECISION, pb.MODE_ACTIVE)
    assert log.rows_dropped == 2
    log.flush()
    assert [row["step_id"] for row in _rows(tmp_path / "log.jsonl")[1:]] == [1, 2, 3]


class Disk:
    """Files that take ``room`` bytes more: then, as on a full disk, a short write, and after it errors."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open(self, path: Path) -> _FileOnDisk:
        return _FileOnDisk(self, path)


class _FileOnDisk:
    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._file = open_to_append(path)

    def write(self, data: bytes) -> int:
        if self._disk.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: self._disk.room]
        self._disk.room -= len(taken)
        self._file.write(taken)
        return len(taken)

    def close(self) -> None:
        self._file.close()


def test_full_disk_loses_rows_and_recovers(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "log.jsonl"
    disk = Disk(room=10_000)
    log = _log(path, open_file=disk.open)
    log.steps("engine-1", [record(1)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    row_bytes = path.stat().st_size - len(path.read_text().splitlines()[0]) - 1
    disk.room = row_bytes + row_bytes // 2
    log.steps("engine-1", [record(step_id) for step_id in (2, 3, 4)], DECISION, pb.MODE_ACTIVE)
    log.flush()  # 2 fits, half of 3 does, 4 does not
    assert log.rows_dropped == 2
    log.steps("engine-1", [record(5)], DECISION, pb.MODE_ACTIVE)
    log.flush()  # nothing fits
    assert log.rows_dropped == 3
    disk.room = 10_000
    log.steps("engine-1", [record(6)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert [row["step_id"] for row in _rows(path)[1:]] == [1, 2, 6]  # and every line is whole


def test_full_disk_at_the_header(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "log.jsonl"
    disk = Disk(room=10)
    log = _log(path, open_file=disk.open)
    log.steps("engine-1", [record(1)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert log.rows_dropped == 1
    disk.room = 10_000
    log.steps("engine-1", [record(2)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert [row["kind"] for row in _rows(path)] == ["log", "step"]


def test_folder_that_cannot_be_made(tmp_path: Path, record: Make) -> None:
    (tmp_path / "file").write_text("")
    log = _log(tmp_path / "file" / "log.jsonl")
    log.steps("engine-1", [record(1)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert log.rows_dropped == 1


def test_last_line_that_a_crash_cut_is_taken_off(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind":"log","schema":"specgov.decision_log","schema_version":2}\n{"kind":"st')
    log = _log(path)
    log.steps("engine-1", [record(1)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert [row["kind"] for row in _rows(path)] == ["log", "step"]


def test_through_a_server(start: Make, make_report: Make, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sidecar = start(decision_log={"path": str(path), "flush_s": 60.0})
    stream = sidecar.stream(boot_id="first")
    for step_id in (1, 2, 3):
        stream.send(make_report(step_id))
        stream.decision_that_knows(step_id)
    stream.send(make_report(3))
    stream.send(make_report(4))
    stream.decision_that_knows(4)
    sidecar.sidecar.stop()  # what waits is written
    header, engine, first, *steps = _rows(path)
    assert (header["kind"], engine["boot_id"]) == ("log", "first")
    assert (first["kind"], first["decision"]["decision_id"], first["mode"]) == ("decision", 1, "active")
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]  # the second report of 3 was rejected
    assert [step["decision"]["known_step_id"] for step in steps] == [1, 2, 3, 4]
    assert {step["decision"]["policy"] for step in steps} == {"threshold"}


def test_a_failing_disk_does_not_stop_decisions(start: Make, make_report: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sidecar = start(decision_log={"path": str(tmp_path / "file" / "log.jsonl"), "flush_s": 0.01})
    stream = sidecar.stream()
    for step_id in range(1, 50):
        stream.send(make_report(step_id))
        stream.decision_that_knows(step_id)
    sidecar.sidecar.stop()
    # 49 steps, the engine's row and its first decision
    assert sidecar.metric("specgov_decision_log_rows_dropped_total") == 51


def test_a_probability_that_is_no_number_is_null(tmp_path: Path, record: Make) -> None:
    log = _log(tmp_path / "log.jsonl")
    log.steps("e", [record()], pb.Decision(propensity=float("nan"), reason=pb.REASON_POLICY), pb.MODE_ACTIVE)
    log.flush()
    assert _rows(tmp_path / "log.jsonl")[1]["decision"]["propensity"] is None


def test_a_path_that_cannot_be_written_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = _log(tmp_path)  # a folder
    log.start()
    log.close(timeout_s=60)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "cannot be written" in said[0]
    assert "Is a directory" in said[0]
