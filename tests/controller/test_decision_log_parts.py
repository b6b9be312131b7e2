"""The decision log as a folder of parts: Parquet, remote paths, kills and disks that fail."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log import DecisionLog, DecisionLogError
from specgov.controller.decision_log.parquet import COLUMNS
from specgov.controller.decision_log.rows import decision_row, engine_row, step_row
from specgov.controller.step_record import StepRecord
from specgov.controller.validation import check_report
from specgov.env.logged_rows import log_files, read_rows
from specgov.env.recording import RecordingError
from specgov.policies.types import EngineSpec
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]

DECISION = pb.Decision(
    decision_id=8,
    num_steps=5,
    reason=pb.REASON_EXPLORATION,
    policy="greedy",
    propensity=0.25,
    estimates=[pb.TierEstimate(num_steps=0, expected_tokens=4.0, expected_ms=5.5)],
)


@pytest.fixture
def record(make_report: Make) -> Callable[..., StepRecord]:
    def make(step_id: int = 3) -> StepRecord:
        return StepRecord(
            check_report(make_report(step_id), EngineSpec(tiers=(0, 1, 3, 5)), 0), 6, 2, None, 1
        )

    return make


def _steps(path: str | Path) -> list[int]:
    return [row["step_id"] for _, row in read_rows([path]) if row["kind"] == "step"]


@pytest.mark.parametrize("name", ["log.parquet", "log.jsonl", "memory"])
def test_every_format_gives_the_same_rows_back(
    tmp_path: Path, make_info: Make, record: Make, name: str
) -> None:
    path = str(tmp_path / name) if name != "memory" else f"memory://{uuid.uuid4().hex}/log.parquet"
    log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: 100.5)
    log.stream(make_info(kv_capacity_tokens=2**40), "greedy")
    log.decided("engine-1", DECISION, pb.MODE_SHADOW)
    log.steps("engine-1", [record(3)], DECISION, pb.MODE_ACTIVE)
    log.steps("engine-1", [record(4)], None, pb.MODE_OFF)
    log.flush(final=True)
    # The same rows through JSON, which turns tuples into lists and nothing else.
    expected = [
        engine_row(100.5, make_info(kv_capacity_tokens=2**40), "greedy"),
        decision_row(100.5, "engine-1", DECISION, pb.MODE_SHADOW),
        step_row(100.5, "engine-1", record(3), DECISION, pb.MODE_ACTIVE),
        step_row(100.5, "engine-1", record(4), None, pb.MODE_OFF),
    ]
    rows = [row for _, row in read_rows([path]) if row["kind"] != "log"]
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        # Parquet has every column in every row; those that a row lacks are null.
        assert {key: row[key] for key in wanted} == json.loads(json.dumps(wanted))
        assert all(value is None for key, value in row.items() if key not in wanted)


def test_parquet_has_a_column_for_every_field(record: Make) -> None:
    """A field that is added to the rows must not be lost on the way."""
    row = step_row(0.0, "e", record(), DECISION, pb.MODE_ACTIVE)
    assert set(row) <= set(COLUMNS.names)
    decision = COLUMNS.field("decision").type
    assert set(row["decision"]) == {decision.field(index).name for index in range(decision.num_fields)}


def test_a_part_is_due_by_rows_by_age_and_at_the_end(tmp_path: Path, record: Make) -> None:
    path, now_s = tmp_path / "log.parquet", [0.0]
    log = DecisionLog(path, DecisionLogConfig(part_rows=3, part_s=60.0), wall_clock=lambda: now_s[0])

    def take(step_id: int, at_s: float) -> int:
        now_s[0] = at_s
        log.steps("e", [record(step_id)], DECISION, pb.MODE_ACTIVE)
        log.flush()
        return len(list(path.iterdir())) if path.exists() else 0

    assert [take(1, 0.0), take(2, 1.0), take(3, 2.0)] == [0, 0, 1]  # three rows
    assert [take(4, 10.0), take(5, 69.9), take(6, 70.0)] == [1, 1, 2]
    assert [take(7, 80.0), take(8, 79.0)] == [2, 3]  # the clock went back: the part is not held open
    log.steps("e", [record(9)], DECISION, pb.MODE_ACTIVE)
    log.flush(final=True)
    assert _steps(path) == list(range(1, 10))


def test_each_part_stands_alone_and_the_oldest_make_room(
    tmp_path: Path, make_info: Make, record: Make
) -> None:
    path, now_s = tmp_path / "log.parquet", [0.0]
    config = DecisionLogConfig(part_rows=1, max_mb=0.02, keep_files=1)  # 40,000 bytes in all
    log = DecisionLog(path, config, wall_clock=lambda: now_s[0])
    log.stream(make_info(), "greedy")
    for step_id in range(1, 21):
        now_s[0] = float(step_id)
        log.steps("engine-1", [record(step_id)], DECISION, pb.MODE_ACTIVE)
        log.flush()
    assert sum(part.stat().st_size for part in path.iterdir()) <= 40_000
    kept = _steps(path)
    assert 1 < len(kept) < 20
    assert kept == list(range(kept[0], 21))
    for file in log_files([path]):
        assert [row["kind"] for _, row in file.rows()] == ["engine", "step"]
    assert log.rows_dropped == 0


def test_a_folder_that_cannot_be_written_loses_the_open_part_only(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "log.parquet"
    path.write_text("")  # a file stands in the folder's place
    log = DecisionLog(path, DecisionLogConfig(part_rows=2), wall_clock=lambda: 0.0)
    for step_id in (1, 2, 3):
        log.steps("e", [record(step_id)], DECISION, pb.MODE_ACTIVE)
        log.flush()
    assert log.rows_dropped == 2  # the third waits for its part
    path.unlink()
    log.steps("e", [record(4)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert (_steps(path), log.rows_dropped) == ([3, 4], 2)


def test_a_store_that_fails_loses_and_counts(monkeypatch: pytest.MonkeyPatch, record: Make) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("AccessDenied")  # what a store's own exceptions look like to us

    path = f"memory://{uuid.uuid4().hex}/log"
    log = DecisionLog(path, DecisionLogConfig(part_rows=1), wall_clock=lambda: 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("memory")), "pipe_file", fail)
        log.steps("e", [record(1)], DECISION, pb.MODE_ACTIVE)
        log.flush()
    assert log.rows_dropped == 1
    log.steps("e", [record(2)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert _steps(path) == [2]


@pytest.mark.parametrize("name", ["log.parquet", "log.jsonl"])
def test_numbers_as_large_as_the_protocol_allows(tmp_path: Path, record: Make, name: str) -> None:
    largest = 2**64 - 1
    path = tmp_path / name
    log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: 0.0)
    step = dataclasses.replace(record(), followed_decision_id=largest)  # no check bounds what an engine says
    log.steps("e", [step], pb.Decision(decision_id=largest), pb.MODE_ACTIVE)
    log.flush(final=True)
    (row,) = [row for _, row in read_rows([path]) if row["kind"] == "step"]
    assert (row["followed_decision_id"], row["decision"]["decision_id"]) == (largest, largest)


@pytest.mark.parametrize("name", ["log.parquet", "log.jsonl"])
def test_a_row_that_cannot_be_written_is_counted_and_the_log_goes_on(
    tmp_path: Path, record: Make, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: 0.0)
    good = record(1)
    log.steps("e", [dataclasses.replace(good, lag_steps=object())], DECISION, pb.MODE_ACTIVE)  # no number
    log.flush()
    assert log.rows_dropped == 1
    assert "cannot be written" in caplog.text
    log.steps("e", [good], DECISION, pb.MODE_ACTIVE)
    log.flush(final=True)
    assert _steps(path) == [1]


def test_what_a_crash_left_unfinished_is_not_read_and_is_removed(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "log.parquet"
    path.mkdir()
    left = path / "part-19700101T000000Z-00000000-000001.parquet.inprogress"
    left.write_bytes(b"PAR1 and no more")
    log = DecisionLog(path, DecisionLogConfig(part_rows=1), wall_clock=lambda: 0.0)
    log.steps("e", [record(1)], DECISION, pb.MODE_ACTIVE)
    log.flush()
    assert _steps(path) == [1]
    log.start()
    log.close(timeout_s=60)
    assert not left.exists()


@pytest.mark.parametrize(
    ("path", "module", "said"),
    [
        ("log.parquet", "pyarrow.parquet", r"needs pyarrow.parquet: pip install 'specgov\[parquet\]'"),
        ("memory://log", "fsspec", r"needs fsspec: pip install 'specgov\[remote\]'"),
        ("nonsense://log", None, "nonsense"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, module: str | None, said: str
) -> None:
    if module is not None:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DecisionLogError, match=said):
        DecisionLog(path if "://" in path else tmp_path / path, DecisionLogConfig())


@pytest.mark.parametrize("length", [1, 7, 40])
def test_a_header_that_was_cut_is_an_empty_file_and_other_text_is_none(tmp_path: Path, length: int) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"kind":"log","schema":"specgov.decision_log","schema_version":2}'[:length])
    assert list(read_rows([path])) == []
    path.write_bytes(b'{"mind":"log","schema":"specgov.decision_log","schema_version":2}'[: length + 2])
    with pytest.raises(RecordingError, match="line 1: not a line of JSON"):
        list(read_rows([path]))


WRITE_FOR_EVER = """
import itertools, sys
from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log import DecisionLog
from specgov.proto.v1 import specgov_pb2 as pb
log = DecisionLog(sys.argv[1], DecisionLogConfig(part_rows=10, max_mb=float(sys.argv[2]), keep_files=1000))
for number in itertools.count(1):
    log.decided("e", pb.Decision(decision_id=number), pb.MODE_ACTIVE)
    log.flush()
    if number % 10 == 0:
        print(number, flush=True)  # the row group with this row is closed
"""


@pytest.mark.parametrize(
    ("name", "max_mb"), [("log.parquet", "1000"), ("log.jsonl", "1000"), ("rotating.jsonl", "0.002")]
)
def test_a_kill_loses_at_most_the_open_row_group(tmp_path: Path, name: str, max_mb: str) -> None:
    path = tmp_path / name
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(path), max_mb]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(20)][-1]
        writer.send_signal(signal.SIGKILL)
        # What it still told before the signal reached it counts too.
        told = max([told, *(int(line) for line in writer.stdout if line.endswith(b"\n"))])
    files = [path] if name == "log.parquet" else list(tmp_path.iterdir())
    assert (len(files) > 10) == (name == "rotating.jsonl")
    ids = sorted(row["decision"]["decision_id"] for _, row in read_rows(files) if row["kind"] == "decision")
    assert ids == list(range(1, len(ids) + 1))
    # The part after the last that was told of may have been closed, and the one after it was open.
    assert told <= len(ids) <= told + (10 if name == "log.parquet" else 20)
    # And a sidecar that comes after goes on.
    log = DecisionLog(path, DecisionLogConfig(keep_files=1000, part_rows=1))
    log.decided("e", pb.Decision(decision_id=len(ids) + 1), pb.MODE_ACTIVE)
    log.flush(final=True)
    files = [path] if name == "log.parquet" else list(tmp_path.iterdir())
    again = {row["decision"]["decision_id"] for _, row in read_rows(files) if row["kind"] == "decision"}
    assert again == {*ids, len(ids) + 1}
    assert log.rows_dropped == 0
