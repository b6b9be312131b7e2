"""What the engine's thread calls: submit a report, read the newest decision, never wait."""

from __future__ import annotations

import os
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from specgov.client.errors import ClientError
from specgov.client.mailbox import Mailbox
from specgov.client.messages import Decision, Report
from specgov.client.stream import Stream, StreamLimits
from specgov.client.tls import TlsFiles
from specgov.proto.v1 import specgov_pb2 as pb

DEFAULT_QUEUE_SIZE = 256
_STOP_S = 2.0
_UNIX_PATH_MAX_BYTES = 107


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counts since the client was made. ``dropped`` are reports that made way for newer ones."""

    connected: bool
    reconnects: int
    submitted: int
    queued: int
    dropped: int
    sent: int
    reports_rejected: int
    decisions: int
    decisions_rejected: int
    last_error: str


class StreamClient:
    """An engine's end of the control stream.

    ``submit``, ``current``, ``newest`` and ``event`` belong to one thread of the engine's and never wait,
    whatever state the sidecar is in; a daemon thread owns the stream: it connects, sends, receives,
    reconnects.

    That thread and gRPC's own run Python in the engine's process, and take the interpreter's lock (the GIL)
    for some hundred microseconds a step from whatever else runs Python there. An engine whose own loop is
    bound by Python, as SGLang's is at small batches, should take a ``RelayClient``: the same calls, with the
    stream in a process beside it. This one is for engines that are not Python-bound, for emulated engines
    and tests (it can wait for a step), and where no process can be started.

    A client belongs to the process that started it. Make and start it after any fork: a forked child's copy
    takes reports and finds no new decision, but cannot be started.

    Args:
        target: ``unix:///path`` or ``HOST:PORT``.
        info: who the engine is and what it can do; sent first on every connection. A decision with a tier
            outside ``info.tiers`` is rejected.
        queue_size: reports kept for sending; when full, the oldest make way and are counted.
        clock: seconds, monotonic; called on both threads.
        rng: source of the reconnect jitter.
        limits: reconnect pacing and what is accepted from the sidecar.
        on_decision: called with each decision on the stream's thread; it must not wait.
        tls: for a target ``HOST:PORT`` that wants TLS; the files are read anew for each connection.

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
        rng: random.Random | None = None,
        limits: StreamLimits | None = None,
        on_decision: Callable[[Decision], None] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        check_arguments(target, info, queue_size)
        self._mailbox = Mailbox(queue_size, on_decision)
        self._clock = clock
        jitter = rng or random.Random()  # noqa: S311 - spreads reconnects, guards nothing
        self._stream = Stream(target, info, self._mailbox, limits or StreamLimits(), clock, jitter, tls)
        self._pid: int | None = None
        self._closer: weakref.finalize[..., StreamClient] | None = None

    def start(self) -> None:
        """Start connecting; returns at once.

        Raises:
            ClientError: the client was started before, here or in the process that this one was forked from.

        """
        if self._pid is not None:
            where = (
                "already" if self._pid == os.getpid() else f"in process {self._pid}, which forked this one"
            )
            raise ClientError(f"the client was started {where}: make a new one")
        self._pid = os.getpid()
        # Runs at interpreter exit too: a process that leaves a call open may hang in gRPC's threads.
        self._closer = weakref.finalize(self, _stop, self._stream, self._pid)
        self._stream.start()

    def submit(self, report: Report) -> None:
        """Queue the result of a step; never waits. When the queue is full the oldest report makes way."""
        mailbox = self._mailbox
        mailbox.reported(self._clock(), report.after_idle)
        mailbox.submitted = number = mailbox.submitted + 1
        mailbox.reports.append((number, report))
        mailbox.signal()

    def count_dropped(self, reports: int) -> None:
        """Note reports that never came to ``submit``: the next one tells the sidecar of them."""
        self._mailbox.submitted += reports

    def current(self, step_id: int) -> Decision | None:
        """The newest decision if it may be applied to step ``step_id``, else None: use the engine's own rule.

        None where none has come, where it is for the record only (shadow), where ``step_id`` is more than its
        ``ttl_steps`` after the step that it knew, or where it is older than its ``ttl_ms``. That age counts
        the time from report to report since it came, except up to a report marked ``after_idle`` or the first
        after a pause; so it does not age while the engine has nothing to do.
        """
        return self._mailbox.current(step_id, self._clock())

    def newest(self) -> Decision | None:
        """The decision that came last, whatever its age and reason; None where none has come."""
        return self._mailbox.newest()

    def wait_for_step(self, step_id: int, timeout_s: float) -> Decision | None:
        """The newest decision once it knows ``step_id``; None after ``timeout_s``.

        For emulated engines and tests. An engine that serves requests never waits.
        """
        return self._mailbox.wait_for_step(step_id, timeout_s)

    def event(self, kind: pb.EngineEvent.Kind.ValueType, step_id: int) -> None:
        """Queue an event behind the reports submitted so far; ``step_id``: the newest step, or 0."""
        if kind == pb.EngineEvent.KIND_PAUSED:
            self._mailbox.pause()
        self._mailbox.events.append((self._mailbox.submitted, kind, step_id))
        self._mailbox.signal()

    def close(self, timeout_s: float = 0.5) -> None:
        """Send what is queued and end the stream; what takes longer than ``timeout_s`` is cut off.

        May be called again. What is submitted afterwards goes nowhere.
        """
        if self._closer is None or not self._closer.alive:
            return
        if self._pid == os.getpid():
            self._stream.finish(timeout_s)
        self._closer()

    def stats(self) -> ClientStats:
        """Counts so far; while reports are on their way each figure may be one off."""
        counters, mailbox = self._stream.counters, self._mailbox
        queued = len(mailbox.reports)
        return ClientStats(
            connected=counters.connected and self._pid == os.getpid(),
            reconnects=max(0, counters.connections - 1),
            submitted=mailbox.submitted,
            queued=queued,
            dropped=max(0, mailbox.submitted - counters.taken - queued),
            sent=counters.sent,
            reports_rejected=counters.reports_rejected,
            decisions=counters.decisions,
            decisions_rejected=counters.decisions_rejected,
            last_error=counters.last_error,
        )


def _stop(stream: Stream, pid: int) -> None:
    if pid == os.getpid():
        stream.stop(_STOP_S)


def check_arguments(target: str, info: pb.EngineInfo, queue_size: int) -> None:
    """Check what a client of any kind is made with.

    Raises:
        ClientError: one of them cannot be used.

    """
    check_target(target)
    if not info.tiers:
        raise ClientError(
            "EngineInfo.tiers is empty: name at least one num_steps that the engine has prepared"
        )
    if queue_size < 1:
        raise ClientError(f"queue_size is {queue_size}: it must be at least 1")


def check_target(target: str) -> None:
    """Check that a client can be made for ``target``.

    Raises:
        ClientError: it is neither an absolute socket path nor a host with a port.

    """
    path = target.removeprefix("unix://")
    if path != target:
        if not path.startswith("/"):
            raise ClientError(
                f"target {target!r}: a socket's path must be absolute, as in unix:///run/specgov.sock"
            )
        if len(os.fsencode(path)) > _UNIX_PATH_MAX_BYTES:
            raise ClientError(f"target {target!r}: a socket's path has at most {_UNIX_PATH_MAX_BYTES} bytes")
        return
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ClientError(f"target {target!r} is neither unix:///path nor HOST:PORT")
