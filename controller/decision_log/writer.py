"""The decision log's writer: a bounded queue, and a thread of its own that empties it.

Where the disk is full, read-only or too slow, rows are dropped and counted, and the sidecar goes on.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log import parts
from specgov.controller.decision_log.errors import RowsLost
from specgov.controller.decision_log.files import GrowingFile, LogFile, open_to_append
from specgov.controller.decision_log.rows import Row, decision_row, engine_row, step_row
from specgov.controller.logs import get_logger
from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.step_record import StepRecord


MAX_PROBLEM_CHARS = 500


class Sink(Protocol):
    """Where rows end up."""

    def begin(self) -> None:
        """Show at once what is wrong with the path.

        Raises:
            OSError: it cannot be written.

        """
        ...

    def write(self, rows: Sequence[Row], *, final: bool = False) -> None:
        """Take ``rows``; ``final``: nothing comes after them.

        Raises:
            RowsLost: some could not be written.

        """
        ...


class DecisionLog:
    """Writes rows to ``path``; ``wall_clock`` gives seconds since 1970.

    ``steps``, ``decided`` and ``stream`` only append to a bounded queue. ``flush`` writes what waits; after
    ``start`` a thread calls it every ``config.flush_s``. ``rows_dropped`` counts what was lost.

    Raises:
        DecisionLogError: the format or the path needs a package that is not installed.

    """

    def __init__(
        self,
        path: str | Path,
        config: DecisionLogConfig,
        wall_clock: Callable[[], float] = time.time,
        open_file: Callable[[Path], LogFile] = open_to_append,
    ) -> None:
        self.rows_dropped = 0
        self._path = str(path)
        self._config = config
        self._wall_clock = wall_clock
        self._sink = make_sink(self._path, config, wall_clock, open_file)
        self._rows: deque[Callable[[], Row]] = deque()
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

    def decided(self, engine_id: str, decision: pb.Decision, mode: pb.Mode.ValueType) -> None:
        """A decision was made that no step called for."""
        now_s = self._wall_clock()
        self._put(lambda: decision_row(now_s, engine_id, decision, mode))

    def flush(self, *, final: bool = False) -> None:
        """Write the rows that wait; those that the disk does not take are dropped and counted."""
        makers = [self._rows.popleft() for _ in range(len(self._rows))]
        try:
            self._sink.write([make_row() for make_row in makers], final=final)
        except RowsLost as lost:
            self._fail(str(lost.cause.strerror or lost.cause), lost.rows)
        except Exception as error:  # noqa: BLE001 - whatever a row holds, the log goes on after it
            self._fail(f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARS], len(makers))

    def _put(self, make_row: Callable[[], Row]) -> None:
        if len(self._rows) >= self._config.queue_rows:
            self.rows_dropped += 1
        else:
            self._rows.append(make_row)

    def _run(self) -> None:
        try:
            self._sink.begin()
        except OSError as error:  # said now, and not only when the first engine comes
            self._fail(error.strerror or str(error), 0)
        while not self._stop.wait(self._config.flush_s):
            self.flush()
        self.flush(final=True)

    def _fail(self, problem: str, rows: int) -> None:
        """Count lost rows; log the first failure, the second, the fourth and so on."""
        self.rows_dropped += rows
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            get_logger().error(
                "decision log cannot be written; rows are dropped",
                path=self._path,
                problem=problem,
                rows_dropped=self.rows_dropped,
            )


def make_sink(
    path: str,
    config: DecisionLogConfig,
    wall_clock: Callable[[], float],
    open_file: Callable[[Path], LogFile] = open_to_append,
) -> Sink:
    """A file that grows, or a folder of parts where the format or the place cannot append.

    Raises:
        DecisionLogError: the format or the path needs a package that is not installed.

    """
    is_parquet = config.format == "parquet" or (config.format == "auto" and path.endswith(".parquet"))
    is_remote = "://" in path
    if not is_parquet and not is_remote:
        return GrowingFile(Path(path), config, wall_clock, open_file)
    folder = parts.RemoteFolder(path) if is_remote else parts.local_folder(Path(path), config)
    encoder = parts.parquet() if is_parquet else parts.Lines()
    return parts.PartsLog(folder, encoder, config, wall_clock, uuid.uuid4().hex[:8])
