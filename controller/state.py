"""What engines have taught their rules, kept over restarts: saved as it goes, read at the start.

One file for each engine in ``state.dir`` (``state_file.py``), written by a thread of its own; an engine's
lock is held only while its rule's numbers are copied. All files are read before the sidecar serves, so no
stream ever waits for the disk. A file that is damaged, of a newer release, or of another engine, model or
policy is renamed to ``*.bad`` with one message, and its engine starts cold. Where the disk is full, slow or
read-only, saves are left out and counted, and the sidecar goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgov.controller import state_file
from specgov.controller.config import StateConfig
from specgov.controller.logs import get_logger

if TYPE_CHECKING:
    from specgov.controller.engine import Engine

SUFFIX = ".state"
BAD_SUFFIX = ".state.bad"
LOCK_FILE = "lock"


class StateError(OSError):
    """The folder of the saved states is another sidecar's; the message says which and what to do."""


class StateKeeper:
    """Saves the engines that ``engines()`` lists, and has what was saved of those that have yet to come.

    Args:
        config: ``dir`` must be given.
        max_files: the most states that are kept; the oldest go first, since engines' ids come from outside.
        engines: all engines that the sidecar knows.
        write: puts a file in its place.

    Attributes: saves, saves_failed, set_aside: files written, files that the disk did not take, files renamed
        to ``*.bad``.

    """

    def __init__(
        self,
        config: StateConfig,
        max_files: int,
        engines: Callable[[], list[Engine]],
        write: Callable[[Path, bytes], None] = state_file.write,
    ) -> None:
        if config.dir is None:
            raise ValueError("there is no folder to keep states in")
        self.saves = self.saves_failed = self.set_aside = 0
        self._folder = Path(config.dir)
        self._every_s = config.every_s
        self._max_files = max_files
        self._engines = engines
        self._write = write
        self._saved: dict[str, dict[str, Any]] = {}
        self._marks: dict[str, object] = {}
        self._unfit: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specgov-state", daemon=True)
        self._lock_file: int | None = None

    def start(self) -> None:
        """Take the folder, read what is in it, and begin to save.

        Raises:
            StateError: another sidecar uses the folder.

        """
        try:
            self._take_folder()
        except OSError as error:
            if isinstance(error, StateError):
                raise
            self._fail(error, self._folder)
        self._read_all()
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Save once more and end the thread, within ``timeout_s``."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive() and self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def saved(self, engine_id: str) -> dict[str, Any] | None:
        """What was saved of an engine that has not come yet, None if nothing was; given out once."""
        return self._saved.pop(engine_id, None)

    def does_not_fit(self, engine_id: str, problem: str) -> None:
        """What ``saved`` gave out is of no use to its engine: its file is set aside at the next save."""
        self._unfit[engine_id] = problem

    def save(self) -> None:
        """Write the state of every engine that changed since it was written last."""
        try:
            self._take_folder()
        except OSError as error:
            self._fail(error, self._folder)
            return
        while self._unfit:
            engine_id, problem = self._unfit.popitem()
            self._set_aside(self._path(engine_id), problem)
        written, engines = False, self._engines()
        known = {engine.info.engine_id for engine in engines}
        self._marks = {engine_id: mark for engine_id, mark in self._marks.items() if engine_id in known}
        for engine in engines:
            engine_id = engine.info.engine_id
            try:
                mark, document = self._take(engine)
            except Exception as error:  # noqa: BLE001 - whatever a rule holds, the other engines are saved
                self._fail(error, self._path(engine_id))
                continue
            if document is None or mark == self._marks.get(engine_id):
                continue
            if self._save_one(engine_id, document):
                self._marks[engine_id] = mark
                written = True
        if written:
            self._drop_surplus()

    def _take(self, engine: Engine) -> tuple[object, dict[str, Any] | None]:
        """The engine's state, None where it has none, and a mark that changes with it."""
        with engine.lock:
            mark = engine.change_mark
            if mark == self._marks.get(engine.info.engine_id):
                return mark, None
            return mark, engine.snapshot()

    def _save_one(self, engine_id: str, document: dict[str, Any]) -> bool:
        try:
            self._write(self._path(engine_id), state_file.to_bytes(document))
        except (OSError, ValueError) as error:
            self._fail(error, self._path(engine_id))
            return False
        self.saves += 1
        return True

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._save_safely()
        self._save_safely()

    def _save_safely(self) -> None:
        try:
            self.save()
        except Exception as error:  # noqa: BLE001 - a fault of ours here must not end all later saves
            self.saves_failed += 1
            get_logger().error("states cannot be saved", exc_info=error)

    def _fail(self, error: Exception, path: Path) -> None:
        """Count a save that failed; log the first, the second, the fourth and so on."""
        self.saves_failed += 1
        if self.saves_failed & (self.saves_failed - 1) == 0:
            get_logger().error(
                "state cannot be saved; the sidecar goes on without",
                path=str(path),
                problem=_said(error),
                times=self.saves_failed,
            )

    def _path(self, engine_id: str) -> Path:
        """A name that a person recognises and no engine can choose: ids come from outside."""
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", engine_id)[:40]
        return self._folder / f"{readable}-{hashlib.sha256(engine_id.encode()).hexdigest()[:16]}{SUFFIX}"

    def _take_folder(self) -> None:
        """Make the folder and lock it, unless that is done."""
        if self._lock_file is not None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise StateError(
                f"{self._folder}: another sidecar keeps its states here; give each its own state.dir"
            ) from error
        self._lock_file = descriptor
        for left_over in self._folder.glob(f"*{SUFFIX}.tmp"):
            left_over.unlink(missing_ok=True)

    def _read_all(self) -> None:
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                document = state_file.read(path)
                engine_id = document["engine_id"]
                if not isinstance(engine_id, str) or self._path(engine_id) != path:
                    raise state_file.StateFileError("it is not the file of the engine that it names")
                self._saved[engine_id] = document
            except (state_file.StateFileError, KeyError) as error:
                self._set_aside(path, _said(error))
            except OSError as error:
                get_logger().error("saved state cannot be read", path=str(path), problem=_said(error))
        if self._saved:
            get_logger().info("states read", folder=str(self._folder), engines=len(self._saved))

    def _set_aside(self, path: Path, problem: str) -> None:
        aside = path.with_name(path.name.removesuffix(SUFFIX) + BAD_SUFFIX)
        self.set_aside += 1
        get_logger().error(
            "saved state cannot be used and is set aside; its engine starts cold",
            path=str(path),
            renamed_to=aside.name,
            problem=problem,
        )
        try:
            path.replace(aside)
        except OSError as error:
            get_logger().error("state cannot be renamed", path=str(path), problem=_said(error))

    def _drop_surplus(self) -> None:
        """Remove the oldest files beyond the limit."""
        for pattern in (f"*{SUFFIX}", f"*{BAD_SUFFIX}"):
            try:
                found = sorted(self._folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
                for path in found[: max(0, len(found) - self._max_files)]:
                    path.unlink(missing_ok=True)
            except OSError as error:
                get_logger().error("old states cannot be removed", problem=_said(error))


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"no {error}" if isinstance(error, KeyError) else str(error)
