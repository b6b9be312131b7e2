"""The thread that owns the stream to the sidecar: connects, receives, reconnects."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from specgov.client.mailbox import Mailbox
from specgov.client.messages import decision_from_proto
from specgov.client.sender import Counters, Sender
from specgov.client.tls import TlsFiles, open_channel
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

log = logging.getLogger("specgov.client")

_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    # Each attempt makes a channel of its own, and we pace them: a shared connection brings gRPC's own
    # back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 * 1024),
    # A sidecar whose machine is gone, or that stands still, is found out and the connection made anew. gRPC
    # waits for a ping's answer for the second of these limits, and a minute without it.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_FLOOD_WINDOW_S = 1.0
MAX_ERROR_CHARS = 300
"""What a sidecar says when it ends a stream is clipped to this."""
_SENDER_END_S = 1.0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How the stream reconnects and what it accepts.

    The wait before attempt n is uniform in 0..min(``backoff_max_s``, ``backoff_base_s`` * 2^n); after a
    stream that lived for ``backoff_max_s``, n starts again at 0. A decision's life is cut to
    ``max_ttl_steps`` and ``max_ttl_s``. A server that sends more than two decisions a report and
    ``spare_decisions_per_s`` besides is cut off.
    """

    backoff_base_s: float = 0.1
    backoff_max_s: float = 5.0
    max_ttl_steps: int = 1_000
    max_ttl_s: float = 10.0
    spare_decisions_per_s: int = 1_000


class _StreamEndError(Exception):
    """Why a stream ended, for people."""


class Stream:
    """One thread, one stream at a time. Knows the mailbox, not the client, so that one may be collected."""

    def __init__(
        self,
        target: str,
        info: pb.EngineInfo,
        mailbox: Mailbox,
        limits: StreamLimits,
        clock: Callable[[], float],
        rng: random.Random,
        tls: TlsFiles | None = None,
    ) -> None:
        self._target = target
        self._info = pb.EngineMessage(info=info)
        self._tiers = frozenset(info.tiers)
        self._mailbox = mailbox
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._tls = tls
        self._ending = threading.Event()
        # With it a call is either seen by whoever ends the stream or never made. Re-entrant, since a client
        # that is collected ends its stream on whichever thread the collector ran.
        self._lock = threading.RLock()
        self._call: grpc.Call | None = None
        self._sender: Sender | None = None
        self._thread = threading.Thread(target=self._run, name="specgov-client", daemon=True)
        self._connections_at_warning = -1  # so that a sidecar that stays away is told of once
        self._warned_of = ""  # and one that refuses the engine, for the same reason each time, too
        self.counters = Counters()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Send what is queued and end the stream; returns when the server has too, or after ``timeout_s``."""
        with self._lock:
            self._ending.set()
            sender = self._sender
        if sender is not None and self.counters.connected:
            sender.finish()
            self._join(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Cancel the stream and wait for the thread, at most ``timeout_s``. What is queued is lost."""
        with self._lock:
            self._ending.set()
            call = self._call
        if call is not None:
            call.cancel()
        self._join(timeout_s)

    def _join(self, timeout_s: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        attempt = 0
        while not self._ending.is_set():
            started_s, connections = self._clock(), self.counters.connections
            end = self._connect_once()
            if self._clock() - started_s >= self._limits.backoff_max_s:
                attempt = 0
                if self.counters.connections > connections:  # it was no attempt that took long to fail
                    self._warned_of = ""
            self._note_end(end)
            ceiling_s = min(self._limits.backoff_max_s, self._limits.backoff_base_s * 2.0 ** min(attempt, 30))
            attempt += 1
            self._ending.wait(self._rng.uniform(0.0, ceiling_s))

    def _connect_once(self) -> str:
        """One stream from first message to last; returns when it has ended, and why."""
        try:
            with open_channel(self._target, self._tls, _CHANNEL_OPTIONS) as channel:
                self._exchange(pb_grpc.SpeculationControllerStub(channel))
        except _StreamEndError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever gRPC raises, the engine goes on and we try again
            return f"{type(error).__name__}: {error}"
        return "the sidecar ended the stream"

    def _note_end(self, error: str) -> None:
        if self._ending.is_set():
            return
        error = _one_line(error)
        self.counters.last_error = error
        if self.counters.connections != self._connections_at_warning and error != self._warned_of:
            self._connections_at_warning, self._warned_of = self.counters.connections, error
            log.warning("no stream to the sidecar at %s (%s); trying again", self._target, error)

    def _exchange(self, stub: pb_grpc.SpeculationControllerStub) -> None:
        sender = Sender(self._info, self._mailbox, self.counters, self._clock)
        with self._lock:
            if self._ending.is_set():
                return
            call = stub.Control(sender.messages())
            self._call, self._sender = call, sender
        try:
            self._receive(call)
        except grpc.RpcError as error:
            raise _StreamEndError(f"{call.code().name}: {call.details()}") from error
        finally:
            call.cancel()
            sender.end(_SENDER_END_S)
            self.counters.connected = False

    def _receive(self, messages: Iterable[pb.Decision]) -> None:
        counters = self.counters
        window_ends_s = float("-inf")
        allowed = sent_before = 0
        for message in messages:
            received_s = self._clock()
            if received_s >= window_ends_s:
                window_ends_s = received_s + _FLOOD_WINDOW_S
                allowed = counters.decisions + self._limits.spare_decisions_per_s
                sent_before = counters.sent
            counters.decisions += 1
            if counters.decisions > allowed + 2 * (counters.sent - sent_before):
                raise _StreamEndError("the sidecar floods the stream with decisions")
            self._hold(message, received_s)

    def _hold(self, message: pb.Decision, received_s: float) -> None:
        decision = decision_from_proto(message, self._tiers, received_s)
        if decision is None or decision.known_step_id > self.counters.sent_step_id:
            self.counters.decisions_rejected += 1
            return
        self.counters.decided(decision.known_step_id, received_s)
        self._mailbox.hold(decision, self._limits.max_ttl_steps, self._limits.max_ttl_s)


def _one_line(text: str) -> str:
    """What a peer said, so that it can stand in the engine's log: clipped, and without control characters."""
    clipped = text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."
    return clipped if clipped.isprintable() else clipped.encode("unicode_escape").decode("ascii")
