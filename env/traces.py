"""Readers for published request traces, from a path that the user gives.

Formats, told apart by the file's content:

- Azure LLM inference (github.com/Azure/AzurePublicDataset): CSV ``TIMESTAMP,ContextTokens,GeneratedTokens``,
  absolute times.
- Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release): JSON lines with ``timestamp`` in ms,
  ``input_length`` and ``output_length``.
- BurstGPT (github.com/HPMLL/BurstGPT): CSV ``Timestamp,Model,Request tokens,Response tokens,Total
  tokens,Log Type``, newer files with ``Session ID`` and ``Elapsed time`` too; times in seconds. Rows of 0
  response tokens are failed requests and are left out.
- plain: CSV ``t_s,in_tok,out_tok``.

A ServeGen table (``category,t_s,total_rate_rps,mean_client_cv``) holds no requests but the rate and
burstiness of time windows: ``read_servegen_windows``. Lines that start with ``#`` are comments.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and what to do."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of arrival.

    ``arrival_s`` (n,) ascends from 0; ``prompt_tokens`` and ``output_tokens`` (n,) are at least 1.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def period_s(self) -> float:
        """Length of one pass when the trace is repeated: its span and one mean gap."""
        n = len(self)
        return float(self.arrival_s[-1]) * n / (n - 1) if n > 1 else 1.0

    def scaled(self, time: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> Trace:
        """The trace with arrival times and lengths multiplied; ``time`` 0.5 means twice the rate."""
        return Trace(
            self.arrival_s * time,
            np.maximum(1, np.rint(self.prompt_tokens * prompt)).astype(np.int64),
            np.maximum(1, np.rint(self.output_tokens * output)).astype(np.int64),
        )


@dataclass(frozen=True)
class RateWindows:
    """Request rate and burstiness by window; ``start_s`` ascends from 0, ``end_s`` ends the last."""

    start_s: NDArray[np.float64]
    end_s: float
    rate_rps: NDArray[np.float64]
    gap_cv: NDArray[np.float64]


@dataclass(frozen=True)
class _Columns:
    """Where a CSV format keeps what we need, and whether its times are dates."""

    time: str
    prompt: str
    output: str
    dates: bool = False


_CSV_FORMATS = (
    _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", dates=True),
    _Columns("Timestamp", "Request tokens", "Response tokens"),
    _Columns("t_s", "in_tok", "out_tok"),
)


def read_trace(path: str | Path) -> Trace:
    """Read a request trace in any of the formats above.

    Raises:
        TraceError: the file is missing, of no known format, empty, or a line is wrong.

    """
    path = Path(path)
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path}: no requests in it")
    rows = _mooncake_rows(path, first, lines) if first[1].startswith("{") else _csv_rows(path, first, lines)
    requests = np.array(list(rows), dtype=np.float64).reshape(-1, 3)
    requests = requests[requests[:, 2] > 0]
    if len(requests) == 0:
        raise TraceError(f"{path}: no requests in it")
    requests = requests[np.argsort(requests[:, 0], kind="stable")]
    return Trace(
        requests[:, 0] - requests[0, 0],
        np.maximum(1, requests[:, 1]).astype(np.int64),
        requests[:, 2].astype(np.int64),
    )


def read_servegen_windows(path: str | Path, category: str) -> RateWindows:
    """Read one category's windows of a ServeGen table, in the order of time.

    Raises:
        TraceError: as for ``read_trace``, or the category is not in the file (the message lists those that
        are).

    """
    path = Path(path)
    lines = _lines(path)
    first = next(lines, None)
    header = _fields(first[1]) if first else []
    wanted = ("category", "t_s", "total_rate_rps", "mean_client_cv")
    missing = [name for name in wanted if name not in header]
    if missing:
        raise TraceError(f"{path}: not a ServeGen table: no column {', '.join(missing)}")
    positions = [header.index(name) for name in wanted]
    found: dict[str, list[tuple[float, float, float]]] = {}
    for number, line in lines:
        fields = _fields(line)
        try:
            name, start, rate, cv = (fields[position] for position in positions)
            found.setdefault(name, []).append((float(start), float(rate), float(cv)))
        except (IndexError, ValueError) as error:
            _reject(path, number, line, error)
    if category not in found:
        raise TraceError(f"{path}: no category {category!r}; it has {', '.join(sorted(found))}")
    windows = np.array(sorted(found[category]))
    start_s = windows[:, 0] - windows[0, 0]
    width_s = float(np.median(np.diff(start_s))) if len(start_s) > 1 else 600.0
    return RateWindows(start_s, float(start_s[-1]) + width_s, windows[:, 1], windows[:, 2])


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is neither empty nor a comment."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            yield number, line.strip()


def _csv_rows(
    path: Path, header_line: tuple[int, str], lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[float, float, float]]:
    header = _fields(header_line[1])
    for columns in _CSV_FORMATS:
        if {columns.time, columns.prompt, columns.output} <= set(header):
            break
    else:
        known = "; ".join(f"{c.time},{c.prompt},{c.output}" for c in _CSV_FORMATS)
        raise TraceError(
            f"{path}:{header_line[0]}: the columns {','.join(header)} belong to no known format ({known}, "
            "or JSON lines with timestamp, input_length, output_length)"
        )
    time_at, prompt_at, output_at = (header.index(n) for n in (columns.time, columns.prompt, columns.output))
    for number, line in lines:
        fields = _fields(line)
        try:
            time_s = _seconds(fields[time_at]) if columns.dates else float(fields[time_at])
            yield time_s, float(fields[prompt_at]), float(fields[output_at])
        except (IndexError, ValueError) as error:
            _reject(path, number, line, error)


def _mooncake_rows(
    path: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]
) -> Iterator[tuple[float, float, float]]:
    for number, line in (first, *lines):
        try:
            row = json.loads(line)
            yield float(row["timestamp"]) / 1000.0, float(row["input_length"]), float(row["output_length"])
        except (KeyError, TypeError, ValueError) as error:
            _reject(path, number, line, error)


def _seconds(date: str) -> float:
    """Seconds since the epoch of a date such as ``2023-11-16 18:15:46.6805900``; without a zone it is UTC."""
    moment = datetime.fromisoformat(date)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _fields(line: str) -> list[str]:
    return [field.strip() for field in next(csv.reader([line]))]


def _reject(path: Path, number: int, line: str, error: Exception) -> NoReturn:
    raise TraceError(
        f"{path}:{number}: cannot be read as a request or window ({error!r}): {line[:80]}"
    ) from error
