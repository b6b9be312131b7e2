"""Recorded steps of a real engine, read and filtered.

A recording of steps is a text file. ``#run,context,batch`` starts a run; every other line is one processed
result: is_decode (0 or 1), batch size, forward iteration, launch time (s), result time (s), verify width
(num_steps + 1; 0 where the server has no speculation), mean accepted drafts, sum of sequence lengths (the
last three empty or 0 for prefill). The sidecar's decision log is read too (``specgov.env.logged_steps``).

A step's duration is the time from the previous result to its own, which is right only between consecutive
decode steps. A step is used when

1. it and the step before it are decode steps with consecutive numbers, and it is no warm-up step;
2. the batch has the run's size (in a decision log, which has no runs: the padded size of the step before);
3. the three steps before it had its tier and batch size too, so that a switch has settled;
4. in a decision log, the row after it is the next step's: the result of a step before a prefill waits for the
   prefill's launch, which newer plugins know (they give no time) and older ones do not.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.logged_prefill import Interruption

SETTLED_STEPS = 3
"""Steps of the same tier and batch size before one that is used."""


class RecordingError(ValueError):
    """A recording cannot be read; the message says which file and line, and what was expected."""


@dataclass(frozen=True, slots=True)
class Row:
    """One processed result.

    ``step_ms`` is None where no duration is known, ``padded_batch_size`` 0 where not known; ``run`` counts
    runs from 0; ``context_tokens`` and ``run_batch_size`` are the run's, None outside runs.
    """

    step_id: int
    is_decode: bool
    batch_size: int
    num_steps: int
    sum_seq_len_tokens: int
    step_ms: float | None
    padded_batch_size: int = 0
    run: int = 0
    context_tokens: int | None = None
    run_batch_size: int | None = None
    warm_up: bool = False
    after_prefill: bool = False

    @property
    def running_size(self) -> int:
        """The padded batch size where known."""
        return self.padded_batch_size or self.batch_size


@dataclass(frozen=True, eq=False)
class Recording:
    """The usable steps of one file.

    The arrays of steps have one entry a usable step: ``context_tokens`` is the run's nominal context, or 0 in
    a decision log; ``padded_batch_size`` is 0 where not known. ``prefill_tokens`` and ``prefill_ms`` are
    contiguous prefill chunks of known size. ``rejected`` counts the rest by cause. ``engine`` holds what a
    decision log says of its engine, by the protocol's names; ``interruptions`` is where prefill came between
    its steps.
    """

    name: str
    sha256: str
    can_speculate: bool
    rows: int
    run: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    batch_size: NDArray[np.int64]
    padded_batch_size: NDArray[np.int64]
    num_steps: NDArray[np.int64]
    sum_seq_len_tokens: NDArray[np.int64]
    step_ms: NDArray[np.float64]
    prefill_tokens: NDArray[np.int64]
    prefill_ms: NDArray[np.float64]
    rejected: Mapping[str, int]
    engine: Mapping[str, Any] = field(default_factory=dict)
    interruptions: tuple[Interruption, ...] = ()


def read_recording(path: str | Path) -> Recording:
    """Read a recording of steps, or a decision log (file, folder or URL), told apart by their first bytes.

    Raises:
        RecordingError: the file cannot be read or is neither.

    """
    from specgov.env.logged_rows import is_decision_log
    from specgov.env.logged_steps import read_decision_log

    return (
        read_decision_log(path) if is_decision_log(path) else parse_steps(read_text(Path(path)), Path(path))
    )


def parse_steps(text: str, path: Path) -> Recording:
    """A recording of steps from its text; ``path`` names it in errors.

    Raises:
        RecordingError: the text is not a recording of steps.

    """
    rows: list[Row] = []
    widths: set[int] = set()
    context = run_batch = None
    run = -1
    last: tuple[int, bool, float] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}, line {number}"
        if line.startswith("#"):
            context, run_batch = _run_header(line, where)
            last, run = None, run + 1
            continue
        if context is None:
            raise RecordingError(f"{where}: expected a line '#run,context,batch' before the first step")
        row, result_s, width = _step(line, where, run, context, run_batch)
        if row.is_decode:
            widths.add(width)
        consecutive = last is not None and last[0] == row.step_id - 1 and last[1] == row.is_decode
        if consecutive and last is not None:
            step_ms = 1e3 * (result_s - last[2])
            row = replace(row, step_ms=step_ms if step_ms > 0 else None)
        rows.append(row)
        last = (row.step_id, row.is_decode, result_s)
    if not rows:
        raise RecordingError(f"{path}: holds no steps")
    if 0 in widths and len(widths) > 1:
        raise RecordingError(
            f"{path}: mixes a server without speculation (verify width 0) with one that speculates"
        )
    return filtered(path.name, digest(text), widths != {0}, rows)


def filtered(
    name: str,
    sha256: str,
    can_speculate: bool,
    rows: Sequence[Row],
    engine: Mapping[str, Any] | None = None,
    interruptions: Sequence[Interruption] = (),
) -> Recording:
    """Keep the usable steps of ``rows`` by the rules above and count the others."""
    used: list[Row] = []
    prefills: list[tuple[int, float]] = []
    rejected: Counter[str] = Counter()
    settled = 0
    before: Row | None = None
    for row, after in itertools.zip_longest(rows, rows[1:]):
        cause, settled = _judge(row, before, after, settled)
        if cause:
            rejected[cause] += 1
        else:
            used.append(row)
        if not row.is_decode and row.step_ms is not None and row.context_tokens is not None:
            prefills.append((row.batch_size * row.context_tokens, row.step_ms))
        before = row

    def column(values: Iterable[int]) -> NDArray[np.int64]:
        return np.fromiter(values, dtype=np.int64)

    return Recording(
        name=name,
        sha256=sha256,
        can_speculate=can_speculate,
        rows=len(rows),
        run=column(row.run for row in used),
        context_tokens=column(row.context_tokens or 0 for row in used),
        batch_size=column(row.batch_size for row in used),
        padded_batch_size=column(row.padded_batch_size for row in used),
        num_steps=column(row.num_steps for row in used),
        sum_seq_len_tokens=column(row.sum_seq_len_tokens for row in used),
        step_ms=np.array([row.step_ms for row in used], dtype=np.float64),
        prefill_tokens=column(tokens for tokens, _ in prefills),
        prefill_ms=np.array([ms for _, ms in prefills], dtype=np.float64),
        rejected=dict(sorted(rejected.items())),
        engine=dict(engine or {}),
        interruptions=tuple(interruptions),
    )


def read_text(path: Path) -> str:
    """The text of a recording.

    Raises:
        RecordingError: it cannot be read.

    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"cannot read the recording {path}: {error}") from error


def digest(text: str) -> str:
    """Identifies a recording's contents."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _judge(row: Row, before: Row | None, after: Row | None, settled: int) -> tuple[str, int]:
    """Why a row is not used (empty: it is), and how many steps before it were like it."""
    if not row.is_decode:
        return "prefill", 0
    if row.warm_up:
        return "warm-up", 0
    if row.run_batch_size is not None and row.batch_size != row.run_batch_size:
        return "batch size changed", 0
    contiguous = before is not None and before.is_decode and before.step_id == row.step_id - 1
    if before is None or not contiguous or row.step_ms is None:
        return ("before a prefill" if contiguous and _is_before_prefill(row, after) else "not contiguous"), 0
    if before.running_size != row.running_size:
        return "batch size changed", 0
    settled = settled + 1 if before.num_steps == row.num_steps else 0
    if _is_before_prefill(row, after):
        return "before a prefill", settled
    return ("" if settled >= SETTLED_STEPS else "tier not settled"), settled


def _is_before_prefill(row: Row, after: Row | None) -> bool:
    """In a decision log, which has no rows for prefill: step numbers are missing, or a flag says so."""
    if row.run_batch_size is not None or after is None:
        return False
    return after.step_id != row.step_id + 1 or after.after_prefill


def _run_header(line: str, where: str) -> tuple[int, int]:
    try:
        mark, context, batch = line.split(",")
        if mark != "#run":
            raise ValueError(mark)
        return int(context), int(batch)
    except ValueError as error:
        raise RecordingError(f"{where}: expected '#run,context,batch', got {line!r}") from error


def _step(line: str, where: str, run: int, context: int, run_batch: int | None) -> tuple[Row, float, int]:
    try:
        is_decode, batch, iteration, _, result_s, width, _, sum_seq_len = line.split(",")
        row = Row(
            step_id=int(iteration),
            is_decode=bool(int(is_decode)),
            batch_size=int(batch),
            num_steps=max(int(width or 0) - 1, 0),
            sum_seq_len_tokens=int(sum_seq_len or 0),
            step_ms=None,
            run=run,
            context_tokens=context,
            run_batch_size=run_batch,
        )
        values = (row, float(result_s), int(width or 0))
    except ValueError as error:
        raise RecordingError(
            f"{where}: expected 'is_decode,batch,iteration,launch_s,result_s,verify_width,accepted,"
            f"sum_seq_len', got {line!r}"
        ) from error
    if row.batch_size < 1 or not np.isfinite(values[1]):
        raise RecordingError(
            f"{where}: a step needs a batch of at least 1 and a finite result time, got {line!r}"
        )
    return values
