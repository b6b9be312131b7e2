"""A log as a folder of parts, each written whole: Parquet, and whatever lies behind a URL.

A part is one row group. It is complete or not there: locally it is written under another name and renamed,
and object stores take an object whole. So a crash loses the rows of the part that was not yet written, at
most ``part_s`` seconds or ``part_rows`` rows, and nothing of the parts before.

Names sort by time: ``part-20261129T205001Z-0f3a9c21-000001.parquet``, the middle being the writer's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log.errors import DecisionLogError, RowsLost
from specgov.controller.decision_log.rows import KnownEngines, Row, header_row, line

UNFINISHED = ".inprogress"


class Encoder(Protocol):
    """Collects rows and makes a part's bytes of them."""

    suffix: str

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows in, in as little memory as the format allows."""
        ...

    def part(self, first: Sequence[Row], now_s: float) -> bytes:
        """The part: ``first`` and then all rows taken in, which are forgotten."""
        ...


class Folder(Protocol):
    """Where parts are kept."""

    def begin(self) -> None:
        """Make the folder, if there is none.

        Raises:
            OSError: it cannot be written.

        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Keep a part.

        Raises:
            OSError: it cannot be written.

        """
        ...


class PartsLog:
    """Gathers rows and writes them as parts; ``run_id`` tells this writer's parts from others'."""

    def __init__(
        self,
        folder: Folder,
        encoder: Encoder,
        config: DecisionLogConfig,
        wall_clock: Callable[[], float],
        run_id: str,
    ) -> None:
        self._folder = folder
        self._encoder = encoder
        self._config = config
        self._wall_clock = wall_clock
        self._run_id = run_id
        self._engines = KnownEngines()
        self._written = 0
        self._rows = 0
        self._begun_s = 0.0

    def begin(self) -> None:
        """Make the folder, so that what is wrong with it shows at once.

        Raises:
            OSError: it cannot be written.

        """
        self._folder.begin()

    def write(self, rows: Sequence[Row], *, final: bool = False) -> None:
        """Take ``rows`` in; write a part where one is due, and in any case if ``final``.

        Raises:
            RowsLost: a part could not be written, and with it rows that had been taken in.

        """
        now_s = self._wall_clock()
        if rows:
            if not self._rows:
                self._begun_s = now_s
            self._encoder.add(rows)
            self._rows += len(rows)
        is_full = self._rows >= self._config.part_rows
        # A clock that went backwards must not hold a part open for ever.
        is_old = not 0 <= now_s - self._begun_s < self._config.part_s
        if self._rows and (is_full or is_old or final):
            self._write_part(now_s)
        for row in rows:
            self._engines.remember(row)

    def _write_part(self, now_s: float) -> None:
        rows, self._rows = self._rows, 0
        data = self._encoder.part(self._engines.rows(), now_s)
        self._written += 1
        at = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ")
        try:
            self._folder.put(f"part-{at}-{self._run_id}-{self._written:06d}{self._encoder.suffix}", data)
        except OSError as error:
            raise RowsLost(rows, error) from error


class LocalFolder:
    """A folder of this machine, of one writer, kept below ``max_bytes`` by removing the oldest parts."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes

    def begin(self) -> None:
        """Make the folder and remove what a crash left unfinished."""
        self._path.mkdir(parents=True, exist_ok=True)
        for left in self._path.glob(f"part-*{UNFINISHED}"):
            left.unlink()

    def put(self, name: str, data: bytes) -> None:
        """Write the part under another name, then rename it."""
        self._path.mkdir(parents=True, exist_ok=True)
        unfinished = self._path / (name + UNFINISHED)
        try:
            unfinished.write_bytes(data)
            unfinished.replace(self._path / name)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._make_room()

    def _make_room(self) -> None:
        parts = [path for path in sorted(self._path.glob("part-*")) if path.suffix != UNFINISHED]
        sizes = [path.stat().st_size for path in parts]
        total = sum(sizes)
        for path, size in zip(parts[:-1], sizes[:-1], strict=True):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


class RemoteFolder:
    """A folder behind a URL that fsspec knows. Nothing is removed there: that is the store's own rule.

    Raises:
        DecisionLogError: fsspec, or what it needs for this kind of URL, is not installed.

    """

    def __init__(self, url: str) -> None:
        fsspec = _require("fsspec", f"a decision log at {url}", "remote")
        try:
            self._files, self._path = fsspec.core.url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise DecisionLogError(f"decision log {url}: {error}") from error

    def begin(self) -> None:
        """Make the folder where the store has such."""
        try:
            self._files.makedirs(self._path, exist_ok=True)
        except OSError:
            raise
        except Exception as error:  # each store has exceptions of its own
            raise OSError(str(error)) from error

    def put(self, name: str, data: bytes) -> None:
        """Write the object whole."""
        try:
            self._files.pipe_file(f"{self._path}/{name}", data)
        except OSError:
            raise
        except Exception as error:  # each store has exceptions of its own
            raise OSError(str(error)) from error


class Lines:
    """Parts of JSON lines."""

    suffix = ".jsonl"

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows in."""
        self._lines.append(b"".join(map(line, rows)))

    def part(self, first: Sequence[Row], now_s: float) -> bytes:
        """The part's bytes."""
        lines, self._lines = self._lines, []
        return b"".join((*map(line, (header_row(now_s), *first)), *lines))


def local_folder(path: Path, config: DecisionLogConfig) -> LocalFolder:
    """A local folder that takes as much room as the files of a log of JSON lines would."""
    return LocalFolder(path, int(config.max_mb * 1e6) * (config.keep_files + 1))


def _require(module: str, what: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DecisionLogError(f"{what} needs {module}: pip install 'specgov[{extra}]'") from error


def parquet() -> Encoder:
    """Parts of Parquet.

    Raises:
        DecisionLogError: pyarrow is not installed.

    """
    _require("pyarrow.parquet", "a decision log in Parquet", "parquet")
    from specgov.controller.decision_log.parquet import Parquet

    return Parquet()
