"""JSON lines in a local file that grows, rotated by size and age."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log.errors import RowsLost
from specgov.controller.decision_log.rows import SCHEMA_VERSION, KnownEngines, Row, header_row, line
from specgov.controller.logs import get_logger

MAX_LINE_BYTES = 1 << 20
CLOCK_SLACK_S = 60.0
"""Clocks are set back by a little all the time, for which no file is rotated."""


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


class GrowingFile:
    """Appends rows to ``path``; older files are ``path.1``, ``path.2`` and so on.

    A file that a crash left with half a line is cut to whole lines; one of another schema version is rotated
    away, so that a file's header holds for all of it. ``wall_clock`` gives seconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        config: DecisionLogConfig,
        wall_clock: Callable[[], float],
        open_file: Callable[[Path], LogFile] = open_to_append,
    ) -> None:
        self._path = path
        self._config = config
        self._wall_clock = wall_clock
        self._open_file = open_file
        self._engines = KnownEngines()
        self._file: LogFile | None = None
        self._size = 0
        self._begun_s = 0.0
        self._just_begun = False

    def begin(self) -> None:
        """Open the file, so that what is wrong with its path shows at once.

        Raises:
            OSError: it cannot be written.

        """
        try:
            self._open()
        except OSError:
            self._close_file()
            raise

    def write(self, rows: Sequence[Row], *, final: bool = False) -> None:
        """Write ``rows``; ``final`` closes the file.

        Raises:
            RowsLost: some or all of them could not be written.

        """
        lines = deque((line(row), row) for row in rows)
        try:
            if self._file is not None and self._is_old(self._wall_clock()):
                self._rotate()
            while lines:
                self._write_one_file(lines)
        except OSError as error:
            self._close_file()
            raise RowsLost(len(lines), error) from error
        if final:
            self._close_file()

    def _is_old(self, now_s: float) -> bool:
        """Whether its time is over, or it began in the future, by a clock that was set back since."""
        return not -CLOCK_SLACK_S <= now_s - self._begun_s < self._config.rotate_s

    def _write_one_file(self, lines: deque[tuple[bytes, Row]]) -> None:
        """Write as many of ``lines`` as fit into the file, taking them off, and rotate if some are left."""
        file = self._file or self._open()
        count = self._fitting(text for text, _ in lines)
        data = b"".join(text for text, _ in itertools.islice(lines, count))
        taken = data[: self._write(file, data)].count(b"\n")
        for _ in range(taken):
            self._engines.remember(lines.popleft()[1])
        if taken < count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if lines:
            self._rotate()

    def _fitting(self, lines: Iterable[bytes]) -> int:
        """How many of ``lines`` the file has room for; a file that was just begun takes one in any case."""
        room = int(self._config.max_mb * 1e6) - self._size
        count = 0
        for text in lines:
            room -= len(text)
            if room < 0 and (count or not self._just_begun):
                break
            count += 1
        return count

    def _open(self) -> LogFile:
        """Open the file; a new one begins with its header and the engines that are known."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._size = _cut_to_whole_lines(self._path)
        self._begun_s = now_s = self._wall_clock()
        if self._size:
            version, begun_s = _header_of(self._path)
            if version is None:
                raise FileExistsError(
                    errno.EEXIST, "there is a file that is no decision log", str(self._path)
                )
            self._begun_s = now_s if begun_s is None else begun_s
            if version != SCHEMA_VERSION or self._is_old(now_s):
                self._rotate()
                self._size, self._begun_s = 0, now_s
        is_new = self._size == 0
        file = self._file = self._open_file(self._path)
        if is_new:
            data = b"".join(map(line, (header_row(now_s), *self._engines.rows())))
            if self._write(file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._just_begun = is_new
        return file

    def _write(self, file: LogFile, data: bytes) -> int:
        written = file.write(data) or 0
        self._size += written
        self._just_begun = False
        return written

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

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                get_logger().error("decision log cannot be closed", problem=error.strerror)


def _header_of(path: Path) -> tuple[int | None, float | None]:
    """Schema version and beginning of a file; None where its first line does not say."""
    with path.open("rb") as file:
        try:
            first = json.loads(file.readline(MAX_LINE_BYTES))
            return first.get("schema_version"), first.get("time_s")
        except (ValueError, AttributeError):
            return None, None


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
