"""Whether the sidecar makes progress: health says so, not only that a socket is open.

Time is counted in rounds of the watchdog's own (one a second), each of which gives every other thread its
turn: a process that was stopped, or a clock that jumped, is no alarm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from enum import Enum
from typing import Protocol

from specgov.controller.logs import get_logger

STUCK_ROUNDS = 10
"""Rounds without progress, with something to do, after which a stream is stuck."""
UNREAD_ROUNDS = 30
"""Rounds in which a peer takes no byte of a decision after which its stream is cut."""
_SHOWN = 5


class Waits(Enum):
    """What a stream waits for."""

    NOTHING = "nothing"  # it is idle: the engine is to speak
    SIDECAR = "sidecar"  # there is something that the sidecar should do
    PEER = "peer"  # a decision is to be sent, and the peer does not read


class Watched(Protocol):
    """A stream as the watchdog sees it. ``moves`` grows with whatever it gets done."""

    moves: int

    @property
    def waits_for(self) -> Waits:
        """What it waits for now."""
        ...

    @property
    def name(self) -> str:
        """The engine's id, for people; empty before it is known."""
        ...

    @property
    def cut_off(self) -> Callable[[], object]:
        """End the stream although its thread waits for its peer."""
        ...


class Watchdog:
    """Looks at all streams, thread pools and sockets each time ``check`` is called.

    ``lost_sockets`` names those whose file is gone. ``on_change`` is called with False when something is
    stuck or lost, and with True when all is well again; ``on_cut`` for each stream that was cut because its
    peer reads nothing.
    """

    def __init__(
        self,
        streams: Callable[[], Iterable[Watched]],
        pools: Sequence[Executor],
        on_change: Callable[[bool], object],
        on_cut: Callable[[], object],
        lost_sockets: Callable[[], list[str]] = list,
    ) -> None:
        self._streams = streams
        self._pools = [_Pool(pool) for pool in pools]
        self._on_change = on_change
        self._on_cut = on_cut
        self._lost_sockets = lost_sockets
        self._told: tuple[list[str], list[str]] = ([], [])
        self._seen: dict[int, tuple[Watched, int, Waits, int]] = {}
        self.stuck = 0
        """How many streams and pools are stuck, and sockets lost."""

    def check(self) -> None:
        """One round."""
        before, self._seen = self._seen, {}
        stuck = []
        for stream in self._streams():
            rounds = self._rounds(before, stream)
            waits_for = self._seen[id(stream)][2]
            if waits_for is Waits.SIDECAR and rounds >= STUCK_ROUNDS:
                stuck.append(stream.name)
            elif waits_for is Waits.PEER and rounds >= UNREAD_ROUNDS:
                del self._seen[id(stream)]  # it is told of and counted once, should it take a while to go
                get_logger().warning("stream cut: its engine does not read", engine_id=stream.name)
                self._on_cut()
                stream.cut_off()
        stuck += ["thread pool"] * sum(pool.rounds_waiting() >= STUCK_ROUNDS for pool in self._pools)
        self._tell(stuck, self._lost_sockets())

    def _rounds(self, before: dict[int, tuple[Watched, int, Waits, int]], stream: Watched) -> int:
        """For how many rounds the stream has waited for the same without a move."""
        moves, waits_for = stream.moves, stream.waits_for
        last = before.get(id(stream))
        same = last is not None and last[0] is stream and last[1:3] == (moves, waits_for)
        rounds = last[3] + 1 if same and last is not None else 0
        self._seen[id(stream)] = (stream, moves, waits_for, rounds)
        return rounds

    def _tell(self, stuck: list[str], lost: list[str]) -> None:
        (stuck_before, lost_before), self._told = self._told, (stuck, lost)
        before, self.stuck = self.stuck, len(stuck) + len(lost)
        if stuck and not stuck_before:
            get_logger().error(
                "decisions are stuck: health says NOT_SERVING", stuck=sorted(stuck)[:_SHOWN], count=len(stuck)
            )
        if lost and lost != lost_before:
            get_logger().error(
                "the socket's file was removed or replaced, nobody can connect any more: health says "
                "NOT_SERVING; restart the sidecar",
                sockets=lost,
            )
        if self.stuck and not before:
            self._on_change(False)
        elif before and not self.stuck:
            get_logger().warning("all moves again: health says SERVING")
            self._on_change(True)


class _Pool:
    """A pool that gets a task that does nothing, to see whether a thread of it is free."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._probe: Future[None] | None = None
        self._rounds = 0

    def rounds_waiting(self) -> int:
        """For how many rounds a task has waited for a thread."""
        if self._probe is not None and not self._probe.done():
            self._rounds += 1
            return self._rounds
        self._rounds = 0
        try:
            self._probe = self._pool.submit(_nothing)
        except RuntimeError:  # it is shutting down
            self._probe = None
        return 0


def _nothing() -> None:
    threading.get_ident()
