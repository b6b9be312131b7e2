"""Watch streams: per-step summaries for people, which never hold up a session."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from specgov.proto.v1 import specgov_pb2 as pb

MAX_WAITING_SUMMARIES = 1000


class Watcher:
    """One watch stream: one summary in ``every_steps`` of one engine, of each if ``engine_id`` is empty.

    ``cut_off`` ends the stream also where its thread waits for a peer that reads nothing.
    """

    def __init__(self, engine_id: str, every_steps: int, cut_off: Callable[[], object]) -> None:
        self.cut_off = cut_off
        self.engine_id = engine_id
        self.too_slow = False
        self._every_steps = max(1, every_steps)
        self._seen: Counter[str] = Counter()
        self._mailbox: queue.SimpleQueue[pb.StepSummary | None] = queue.SimpleQueue()

    @property
    def waiting(self) -> int:
        """How many summaries wait to be sent."""
        return self._mailbox.qsize()

    def wants(self, engine_id: str) -> bool:
        """Whether this step of the engine is one to show; counts it."""
        if self.engine_id not in ("", engine_id):
            return False
        self._seen[engine_id] += 1
        return (self._seen[engine_id] - 1) % self._every_steps == 0

    def put(self, summary: pb.StepSummary) -> None:
        """Hand a summary over; a watcher that has let too many wait is ended instead."""
        if self.too_slow:
            return  # its stream's end is under way
        if self._mailbox.qsize() >= MAX_WAITING_SUMMARIES:
            self.too_slow = True
            self.end()
        else:
            self._mailbox.put(summary)

    def end(self) -> None:
        """End the stream after what waits."""
        self._mailbox.put(None)

    def run(self) -> Iterator[pb.StepSummary]:
        """The summaries to send, until the stream is ended."""
        while not self.too_slow and (summary := self._mailbox.get()) is not None:
            yield summary


class Watchers:
    """All watch streams. Sessions read ``all`` without a lock: the tuple is replaced, never changed."""

    def __init__(self) -> None:
        self.all: tuple[Watcher, ...] = ()
        self._lock = threading.Lock()

    def add(self, watcher: Watcher, limit: int) -> bool:
        """Add a watcher unless there are ``limit`` already; whether it was added.

        Those that were too slow and have not even taken their status make room.
        """
        with self._lock:
            stuck = [other for other in self.all if other.too_slow] if len(self.all) >= limit else []
            others = tuple(other for other in self.all if other not in stuck)
            has_room = len(others) < limit
            self.all = (*others, watcher) if has_room else others
        for other in stuck:
            other.cut_off()
        return has_room

    def remove(self, watcher: Watcher) -> None:
        """Forget a watcher; may be called more than once."""
        with self._lock:
            self.all = tuple(other for other in self.all if other is not watcher)
