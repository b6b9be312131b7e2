"""Rows of the sidecar's decision log, one after the other: JSON lines or Parquet, a file, a folder, or a URL.

What the rows hold stands in ``specgov.controller.decision_log``. Schema versions 1 and 2 are read; a row of
version 1 lacks the estimates of its decision. The last line of a file may be cut short, as a crash leaves it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

from specgov.env.recording import RecordingError

SCHEMA = "specgov.decision_log"
SCHEMA_VERSIONS = (1, 2)
PARQUET_MAGIC = b"PAR1"
HEADER_START = b'{"kind":"log"'
BATCH_ROWS = 4096
_PART_SUFFIXES = (".jsonl", ".parquet")

LoggedRow = dict[str, Any]


@dataclass(frozen=True)
class LogFile:
    """A file of a log; ``files`` is fsspec's file system, None for this machine's."""

    path: str
    files: Any = None

    @property
    def name(self) -> str:
        """Without its folders."""
        return PurePosixPath(self.path).name

    def open(self) -> IO[bytes]:
        """The file, to read.

        Raises:
            RecordingError: it cannot be read.

        """
        try:
            return Path(self.path).open("rb") if self.files is None else self.files.open(self.path)
        except OSError as error:
            raise RecordingError(
                f"cannot read the recording {self.path}: {error.strerror or error}"
            ) from error

    def rows(self) -> Iterator[tuple[str, LoggedRow]]:
        """Each row with where it stands, in words.

        Raises:
            RecordingError: the file cannot be read, or is no decision log of a known version.

        """
        with self.open() as file:
            if file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC:
                file.seek(0)
                yield from _parquet_rows(file, self.path)
            else:
                file.seek(0)
                yield from _json_rows(file, self.path)


def log_files(paths: Sequence[str | Path]) -> list[LogFile]:
    """The files of the logs by the time of their first row; a folder's parts by their names, together.

    Raises:
        RecordingError: a path cannot be read, or a folder holds no parts.

    """
    logs = sorted((_files_of(str(path)) for path in paths), key=lambda files: _first_time_s(files[0]))
    return [file for files in logs for file in files]


def read_rows(paths: Sequence[str | Path]) -> Iterator[tuple[str, LoggedRow]]:
    """All rows of the logs in the order of their files' first rows, each with where it stands.

    Raises:
        RecordingError: as ``LogFile.rows`` and ``log_files``.

    """
    for file in log_files(paths):
        yield from file.rows()


def is_decision_log(path: str | Path) -> bool:
    """Whether ``path`` looks like a decision log: a folder, a URL, Parquet, or a file that begins with {."""
    if "://" in str(path) or Path(path).is_dir():
        return True
    with LogFile(str(path)).open() as file:
        start = file.read(64)
    return start.startswith(PARQUET_MAGIC) or start.lstrip()[:1] == b"{"


def _files_of(path: str) -> list[LogFile]:
    if "://" in path:
        fsspec = _require("fsspec", path, "remote")
        try:
            files, inner = fsspec.core.url_to_fs(path)
            names = sorted(files.ls(inner, detail=False)) if files.isdir(inner) else [inner]
        except (ImportError, ValueError, OSError) as error:
            raise RecordingError(f"cannot read the log {path}: {error}") from error
        found = [LogFile(name, files) for name in names if name == inner or _is_part(name)]
    elif Path(path).is_dir():
        found = [LogFile(str(part)) for part in sorted(Path(path).iterdir()) if _is_part(part.name)]
    else:
        return [LogFile(path)]
    if not found:
        raise RecordingError(f"{path}: the folder holds no parts of a decision log (*.parquet, *.jsonl)")
    return found


def _is_part(name: str) -> bool:
    return PurePosixPath(name).suffix in _PART_SUFFIXES


def _first_time_s(file: LogFile) -> float:
    """Of a file without any: the end of time."""
    times = (row["time_s"] for _, row in islice(file.rows(), 2) if isinstance(row.get("time_s"), int | float))
    return float(next(times, float("inf")))


def _json_rows(file: IO[bytes], path: str) -> Iterator[tuple[str, LoggedRow]]:
    for number, line in enumerate(file, start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            is_header = HEADER_START.startswith(line[: len(HEADER_START)])
            if not line.endswith(b"\n") and (number > 1 or is_header):
                return  # a crash or a full disk cut it
            raise RecordingError(f"{where}: not a line of JSON ({error})") from error
        if not isinstance(row, dict):
            raise RecordingError(f"{where}: expected a JSON object")
        if number == 1 or row.get("kind") == "log":
            _check_schema(row.get("schema"), row.get("schema_version"), where)
        yield where, row


def _parquet_rows(file: IO[bytes], path: str) -> Iterator[tuple[str, LoggedRow]]:
    pq = _require("pyarrow.parquet", path, "parquet")
    pa = importlib.import_module("pyarrow")
    try:
        parquet = pq.ParquetFile(file)
        metadata = parquet.schema_arrow.metadata or {}
        version = metadata.get(b"schema_version", b"").decode()
        _check_schema(
            metadata.get(b"schema", b"").decode() or None, int(version) if version.isdigit() else None, path
        )
        number = 0
        for batch in parquet.iter_batches(BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", json.loads(row["engine"]) if row["kind"] == "engine" else row
    except pa.ArrowException as error:
        raise RecordingError(f"{path}: not readable as Parquet: {error}") from error


def _check_schema(schema: Any, version: Any, where: str) -> None:
    if schema != SCHEMA:
        raise RecordingError(f"{where}: not a decision log (its first line should say {SCHEMA!r})")
    if version not in SCHEMA_VERSIONS:
        known = " and ".join(map(str, SCHEMA_VERSIONS))
        raise RecordingError(
            f"{where}: decision log of schema version {version!r}, this release reads {known}"
        )


def _require(module: str, path: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecordingError(
            f"{path}: reading it needs {module.partition('.')[0]}: pip install 'specgov[{extra}]'"
        ) from error
