"""The decision log: one JSON object a line, enough to calibrate step times and to replay decisions.

Schema version 1. Every file stands alone. Fields that are not known are null. ``time_s`` is the wall clock
(seconds since 1970) at which the sidecar handled the row. Rows by their ``kind``:

``log``, the first line of a file: ``schema`` ("specgov.decision_log"), ``schema_version`` (1).

``engine``, at the start of each stream, and again for every known engine at the start of a new file:
``time_s``, the fields of the protocol's ``EngineInfo`` by their names, and ``policy``, as in ``--policy``.

``step``, for each accepted report, in the engine's order:
  ``engine_id``, ``step_id``, ``batch_size``, ``padded_batch_size`` (0 = not known), ``cuda_graph_ran``,
  ``num_steps``;
  ``accepted``: how many live requests had 0, 1, ... num_steps accepted drafts (num_steps + 1 numbers);
  ``sum_seq_len_tokens``, ``max_seq_len_tokens``, ``waiting_requests``, ``kv_use_ratio``;
  ``step_ms`` (null where the step's time was not valid);
  ``flags``: those that hold of ``after_prefill``, ``after_idle``, ``has_grammar``, ``warm_up``;
  ``followed_decision_id`` (0 = the engine's own rule), ``lag_steps`` (from the newest step that this decision
  knew to this one), ``engine_rule_num_steps``, ``reports_dropped`` (lost before this one);
  ``mode``: ``active``, ``shadow``, ``frozen`` or ``off``;
  ``decision``: what was decided after the step: ``decision_id``, ``known_step_id`` (several steps share a
  decision when they arrived together), ``num_steps``, ``reason``, ``policy``, ``policy_version``,
  ``propensity``; null where nothing was sent.

Rows are written by a thread of the log's own. Where the disk is full, read-only or too slow, rows are dropped
and counted, and the sidecar goes on. Numbers that JSON lacks (NaN, infinity) are null.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from google.protobuf.json_format import MessageToDict

from specgov.controller.config import DecisionLogConfig
from specgov.controller.logs import get_logger
from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.engine import StepRecord

SCHEMA = "specgov.decision_log"
SCHEMA_VERSION = 1
MAX_ENGINE_ROWS = 1024
MAX_LINE_BYTES = 1 << 20

_FLAGS = ("after_prefill", "after_idle", "has_grammar", "warm_up")
_REASONS = {value: name.removeprefix("REASON_").lower() for name, value in pb.Reason.items()}
_MODES = {value: name.removeprefix("MODE_").lower() for name, value in pb.Mode.items()}


class LogFile(Protocol):
    """What the log needs of an unbuffered binary file."""

    def write(self, data: bytes, /) -> int | None:
        """Write; returns how many bytes were taken."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def open_to_append(path: Path) -> LogFile:
    """The file, unbuffered, at its end."""
    return path.open("ab", buffering=0)


class DecisionLog:
    """Writes rows to ``config.path``; ``wall_clock`` gives seconds since 1970.

    ``steps`` and ``stream`` only append to a bounded queue. ``flush`` writes what waits; after ``start`` a
    thread calls it every ``config.flush_s``.
    """

    def __init__(
        self,
        path: str | Path,
        config: DecisionLogConfig,
        wall_clock: Callable[[], float] = time.time,
        open_file: Callable[[Path], LogFile] = open_to_append,
    ) -> None:
        self.rows_dropped = 0
        self._path = Path(path)
        self._config = config
        self._wall_clock = wall_clock
        self._open_file = open_file
        self._rows: deque[Callable[[], dict[str, Any]]] = deque()
        self._engine_lines: dict[str, bytes] = {}
        self._file: LogFile | None = None
        self._size = 0
        self._just_begun = False
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specgov-decision-log", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self, timeout_s: float = 0.5) -> None:
        """Write what waits and end the thread, within ``timeout_s``."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def stream(self, info: pb.EngineInfo, policy: str) -> None:
        """A stream began."""
        now_s = self._wall_clock()
        self._put(lambda: engine_row(now_s, info, policy))

    def steps(
        self,
        engine_id: str,
        records: Sequence[StepRecord],
        decision: pb.Decision | None,
        mode: pb.Mode.ValueType,
    ) -> None:
        """Steps were observed, after which ``decision`` was made."""
        now_s = self._wall_clock()
        for record in records:
            self._put(lambda record=record: step_row(now_s, engine_id, record, decision, mode))  # type: ignore[misc]

    def flush(self) -> None:
        """Write the rows that wait; those that the disk does not take are dropped and counted."""
        rows = [self._rows.popleft()() for _ in range(len(self._rows))]
        lines = deque((_line(row), row) for row in rows)
        try:
            while lines:
                self._write_one_file(lines)
        except OSError as error:
            self._fail(error, len(lines))

    def _put(self, make_row: Callable[[], dict[str, Any]]) -> None:
        if len(self._rows) >= self._config.queue_rows:
            self.rows_dropped += 1
        else:
            self._rows.append(make_row)

    def _run(self) -> None:
        try:
            self._begin()
        except OSError as error:  # said now, and not only when the first engine comes
            self._fail(error, 0)
        while not self._stop.wait(self._config.flush_s):
            self.flush()
        self.flush()
        self._close_file()

    def _write_one_file(self, lines: deque[tuple[bytes, dict[str, Any]]]) -> None:
        """Write as many of ``lines`` as fit into the file, taking them off, and rotate if some are left."""
        file = self._file or self._begin()
        count = self._fitting(line for line, _ in lines)
        data = b"".join(line for line, _ in itertools.islice(lines, count))
        taken = data[: self._write(file, data)].count(b"\n")
        for _ in range(taken):
            line, row = lines.popleft()
            if row["kind"] == "engine":
                self._remember_engine(row["engine_id"], line)
        if taken < count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if lines:
            self._rotate()

    def _fitting(self, lines: Iterable[bytes]) -> int:
        """How many of ``lines`` the file has room for; a file that was just begun takes one in any case."""
        room = int(self._config.max_mb * 1e6) - self._size
        count = 0
        for line in lines:
            room -= len(line)
            if room < 0 and (count or not self._just_begun):
                break
            count += 1
        return count

    def _begin(self) -> LogFile:
        """Open the file; a new one begins with its header and the engines that are known."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._size = _cut_to_whole_lines(self._path)
        is_new = self._size == 0
        file = self._file = self._open_file(self._path)
        if is_new:
            header = _line({"kind": "log", "schema": SCHEMA, "schema_version": SCHEMA_VERSION})
            data = b"".join((header, *self._engine_lines.values()))
            if self._write(file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._just_begun = is_new
        return file

    def _write(self, file: LogFile, data: bytes) -> int:
        written = file.write(data) or 0
        self._size += written
        self._just_begun = False
        return written

    def _remember_engine(self, engine_id: str, line: bytes) -> None:
        """Keep the newest row of each engine for the files to come."""
        self._engine_lines.pop(engine_id, None)
        self._engine_lines[engine_id] = line
        while len(self._engine_lines) > MAX_ENGINE_ROWS:
            del self._engine_lines[next(iter(self._engine_lines))]

    def _rotate(self) -> None:
        self._close_file()
        for number in range(self._config.keep_files, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        if self._config.keep_files == 0:
            self._path.unlink(missing_ok=True)

    def _numbered(self, number: int) -> Path:
        return self._path if number == 0 else self._path.with_name(f"{self._path.name}.{number}")

    def _fail(self, error: OSError, rows: int) -> None:
        self.rows_dropped += rows
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            get_logger().error(
                "decision log cannot be written; rows are dropped",
                path=str(self._path),
                problem=error.strerror or str(error),
                rows_dropped=self.rows_dropped,
            )
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                get_logger().error("decision log cannot be closed", problem=error.strerror)


def engine_row(now_s: float, info: pb.EngineInfo, policy: str) -> dict[str, Any]:
    """The row of a stream's start, as the module's docstring says."""
    fields = MessageToDict(info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    fields.setdefault("draft_kv_stays_warm", None)
    fields["kv_capacity_tokens"] = info.kv_capacity_tokens  # the JSON mapping has 64-bit numbers as text
    return {"kind": "engine", "time_s": round(now_s, 6), **fields, "policy": policy}


def step_row(
    now_s: float, engine_id: str, record: StepRecord, decision: pb.Decision | None, mode: pb.Mode.ValueType
) -> dict[str, Any]:
    """The row of a step, as the module's docstring says."""
    step = record.step
    return {
        "kind": "step",
        "time_s": round(now_s, 6),
        "engine_id": engine_id,
        "step_id": step.step_id,
        "batch_size": step.batch_size,
        "padded_batch_size": step.padded_batch_size,
        "cuda_graph_ran": step.cuda_graph_ran,
        "num_steps": step.num_steps,
        "accepted": np.bincount(step.accepted, minlength=step.num_steps + 1).tolist(),
        "sum_seq_len_tokens": step.sum_seq_len_tokens,
        "max_seq_len_tokens": step.max_seq_len_tokens,
        "waiting_requests": step.waiting_requests,
        "kv_use_ratio": step.kv_use_ratio,
        "step_ms": step.step_ms,
        "flags": [flag for flag in _FLAGS if getattr(step, flag)],
        "followed_decision_id": record.followed_decision_id,
        "lag_steps": record.lag_steps,
        "engine_rule_num_steps": record.engine_rule_num_steps,
        "reports_dropped": record.reports_dropped,
        "mode": _MODES[mode],
        "decision": None if decision is None else _decision_row(decision),
    }


def _decision_row(decision: pb.Decision) -> dict[str, Any]:
    known = decision.HasField("propensity") and math.isfinite(decision.propensity)
    return {
        "decision_id": decision.decision_id,
        "known_step_id": decision.known_step_id,
        "num_steps": decision.num_steps,
        "reason": _REASONS[decision.reason],
        "policy": decision.policy,
        "policy_version": decision.policy_version,
        "propensity": decision.propensity if known else None,
    }


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _cut_to_whole_lines(path: Path) -> int:
    """Cut off a last line that a crash or a full disk left unfinished; the size that remains."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - MAX_LINE_BYTES))
        tail = file.read()
        whole = start + tail.rfind(b"\n") + 1
        if whole < size:
            file.truncate(whole)
        return whole
