"""A client whose stream lives in a process of its own, the relay: no thread of ours in the engine's process.

Why: Python runs one thread at a time (the GIL). A stream's threads and gRPC's run Python for each report and
each decision, and whenever an engine's loop lets go of the lock, as most C calls do, one of them may take it;
the loop then waits. A loop that is bound by Python, as SGLang's scheduler is at small batches, loses more
time that way than the threads' own work takes. So the stream is in another process. What the engine's thread
has to say goes into memory that both see, and there it finds the newest decision. While steps are being made
the relay looks by itself; after a pause the first report wakes it, by a socket on which nobody waits. So a
step costs the engine's thread no system call.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from specgov.client import packets
from specgov.client.client import DEFAULT_QUEUE_SIZE, ClientStats, check_arguments
from specgov.client.errors import ClientError
from specgov.client.life import DecisionLife
from specgov.client.mailbox import MAX_EVENTS
from specgov.client.messages import Decision, Report
from specgov.client.relay_line import RelayLine
from specgov.client.stream import StreamLimits
from specgov.client.tls import TlsFiles
from specgov.proto.v1 import specgov_pb2 as pb

log = logging.getLogger("specgov.client")

RESTART_BASE_S, RESTART_MAX_S = 1.0, 60.0
"""The first wait before a relay that has ended is started again, and the longest; each is twice the last."""

_DONT_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_GONE = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN, errno.EBADF))
_END_S = 2.0
_UINT32_MAX = 2**32 - 1
_NO_STATS = ClientStats(False, 0, 0, 0, 0, 0, 0, 0, 0, "")


class RelayClient:
    """An engine's end of the control stream, for engines that are bound by Python.

    ``submit``, ``current``, ``newest`` and ``event`` belong to one thread of the engine's, never wait and
    never raise, whatever state relay and sidecar are in. Reports go to the relay through memory that holds a
    few hundred; when it is full, which only a relay that stands still brings about, the newest report is
    dropped and counted in the next that is sent. A relay that has ended is started again, first after a
    second, then after twice as long each time up to a minute; the second report that it does not take shows
    that, or the first after a pause. Until then decisions age and reports are dropped. The start costs the
    calling thread a few milliseconds, at most once in that time.

    The relay ends with the client or with the engine's process, however that ends. A forked child's copy of
    a client takes reports and finds no new decision, but cannot be started.

    Args:
        target: ``unix:///path`` or ``HOST:PORT``.
        info: who the engine is and what it can do; sent first on every connection. A decision with a tier
            outside ``info.tiers`` is rejected.
        queue_size: reports that the relay keeps while there is no sidecar; when full, the oldest make way.
        clock: seconds, monotonic.
        limits: the relay's reconnect pacing and what is accepted from the sidecar.
        tls: for a target ``HOST:PORT`` that wants TLS; the relay reads the files for each connection.

    Raises:
        ClientError: the target or an argument cannot be used.

    """

    def __init__(
        self,
        target: str,
        info: pb.EngineInfo,
        *,
        queue_size: int = DEFAULT_QUEUE_SIZE,
        clock: Callable[[], float] = time.monotonic,
        limits: StreamLimits | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        check_arguments(target, info, queue_size)
        self._clock = clock
        self._limits = limits or StreamLimits()
        self._life = DecisionLife()
        self._line = RelayLine(target, info, queue_size, self._limits, tls)
        self._closer: weakref.finalize[..., RelayClient] | None = None
        self._events: deque[bytes] = deque(maxlen=MAX_EVENTS)
        self._started_s = self._restart_s = 0.0
        self._restart_wait_s = RESTART_BASE_S
        self._submitted = self._rejected = self._untold = 0
        self._stats = _NO_STATS  # of the relay
        self._past = _NO_STATS  # of those that have ended
        self._last_error = ""

    def start(self) -> None:
        """Start the relay; returns before it has connected.

        Raises:
            ClientError: the client was started before, here or in the process that this one was forked from.

        """
        if self._closer is not None:
            pid = self._line.owner_pid
            where = "already" if pid == os.getpid() else f"in process {pid}, which forked this one"
            raise ClientError(f"the client was started {where}: make a new one")
        self._closer = weakref.finalize(self, self._line.end, _END_S)
        self._line.owner_pid = os.getpid()
        self._start_relay(self._clock())

    def submit(self, report: Report) -> None:
        """Send the result of a step to the relay; never waits. Where there is no room it is dropped."""
        self._read()  # what came up to now came before this report, for its age
        self._life.reported(self._clock(), report.after_idle)
        self._submitted += 1
        try:
            packet = packets.pack_report(report, self._untold and min(self._untold, _UINT32_MAX))
        except (AttributeError, TypeError, ValueError) as error:
            self._rejected += 1
            self._untold += 1
            self._last_error = f"report {report!r:.200} cannot be sent: {error}"
            log.warning(self._last_error)
            return
        board = self._line.board
        if board is not None and (not self._events or self._put_events()) and board.packets.write(packet):
            self._untold = 0
        else:
            self._untold += 1
        self._wake_where_asleep()

    def current(self, step_id: int) -> Decision | None:
        """As ``StreamClient.current``: the newest decision if it may be applied to step ``step_id``."""
        self._read()
        return self._life.current(step_id, self._clock())

    def newest(self) -> Decision | None:
        """The decision that came last, whatever its age and reason; None where none has come."""
        self._read()
        return self._life.newest()

    def event(self, kind: pb.EngineEvent.Kind.ValueType, step_id: int) -> None:
        """Send an event behind the reports so far; ``step_id``: the newest step, or 0."""
        if kind == pb.EngineEvent.KIND_PAUSED:
            self._life.pause()
        self._events.append(packets.EVENT + pb.EngineEvent(kind=kind, step_id=step_id).SerializeToString())
        self._put_events()
        self._wake_where_asleep()

    def close(self, timeout_s: float = _END_S) -> None:
        """Let the relay send what it has and end the stream; it is killed where that takes longer.

        May be called again. What is submitted afterwards goes nowhere.
        """
        if self._closer is None or not self._closer.alive:
            return
        self._closer.detach()
        self._put_events()
        self._line.finish(timeout_s)
        self._relay_stats()  # its last
        self._line.end(0.0)

    def stats(self) -> ClientStats:
        """Counts so far; those of the relay are up to a second old, and what a dead one held is in none."""
        relay, past = self._relay_stats(), self._past
        return ClientStats(
            connected=relay.connected and self._line.connection is not None,
            reconnects=past.reconnects + relay.reconnects,
            submitted=self._submitted,
            queued=relay.queued,
            dropped=past.dropped + relay.dropped + self._untold,
            sent=past.sent + relay.sent,
            reports_rejected=self._rejected + past.reports_rejected + relay.reports_rejected,
            decisions=past.decisions + relay.decisions,
            decisions_rejected=past.decisions_rejected + relay.decisions_rejected,
            last_error=self._last_error or relay.last_error,
        )

    def _relay_stats(self) -> ClientStats:
        board = self._line.board
        if board is not None and (packet := board.stats.news()) is not None:
            self._stats = packets.unpack_stats(packet)
        return self._stats

    # Board and socket. Nothing here waits.

    def _put(self, packet: bytes) -> bool:
        board = self._line.board
        return board is not None and board.packets.write(packet)

    def _put_events(self) -> bool:
        events = self._events
        while events:
            if not self._put(events[0]):
                return False
            events.popleft()
        return True

    def _wake_where_asleep(self) -> None:
        board, connection = self._line.board, self._line.connection
        if board is None or connection is None or not board.packets.must_be_woken(time.monotonic()):
            return
        try:
            connection.send(packets.WAKE_UP, _DONT_WAIT)
        except OSError as error:  # no room, since it was woken often enough, or nobody there
            if error.errno in _GONE:
                self._lose(os.strerror(error.errno))

    def _read(self) -> None:
        """Hold the newest decision where it is news. The relay lets none with unknown tiers through."""
        board = self._line.board
        if board is None:
            self._restart_when_due()
        elif (packet := board.decisions.news()) is not None:
            ahead_s = 0.0 if self._clock is time.monotonic else self._clock() - time.monotonic()
            decision = packets.unpack_decision(packet, ahead_s)
            self._life.hold(decision, self._limits.max_ttl_steps, self._limits.max_ttl_s)

    # The relay's life.

    def _start_relay(self, now_s: float) -> None:
        self._started_s = now_s
        try:
            self._line.start()
        except (OSError, ValueError) as error:
            self._lose(f"it cannot be started: {error}")

    def _restart_when_due(self) -> None:
        if self._closer is None or not self._closer.alive or self._line.owner_pid != os.getpid():
            return
        now_s = self._clock()
        if now_s >= self._restart_s:
            self._start_relay(now_s)

    def _lose(self, why: str) -> None:
        """Note that there is no relay, and when the next one may be started."""
        past, relay = self._past, self._relay_stats()
        if self._line.board is not None:
            left = self._line.board.packets.left()
            self._untold += packets.reports_in(left)
            self._events.extendleft(packet for packet in reversed(left) if packet.startswith(packets.EVENT))
        self._line.cut()
        self._stats = _NO_STATS
        self._past = replace(
            past,
            reconnects=past.reconnects + relay.reconnects + bool(relay.connected),
            dropped=past.dropped + relay.dropped,
            sent=past.sent + relay.sent,
            reports_rejected=past.reports_rejected + relay.reports_rejected,
            decisions=past.decisions + relay.decisions,
            decisions_rejected=past.decisions_rejected + relay.decisions_rejected,
        )
        if self._closer is None or not self._closer.alive:
            return
        now_s = self._clock()
        lived_long = now_s - self._started_s >= RESTART_MAX_S
        wait_s = RESTART_BASE_S if lived_long else self._restart_wait_s
        self._restart_s = now_s + wait_s
        self._restart_wait_s = min(2.0 * wait_s, RESTART_MAX_S)
        self._last_error = f"no relay to the sidecar ({why})"
        log.warning("%s; starting it again in %.0f s", self._last_error, wait_s)
