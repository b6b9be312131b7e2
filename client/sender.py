"""The sending half of a stream: turns what the engine queued into messages, on a thread of gRPC's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specgov.client.mailbox import Mailbox
from specgov.client.messages import report_to_proto
from specgov.proto.v1 import specgov_pb2 as pb

log = logging.getLogger("specgov.client")

MAX_ROUND_TRIP_S = 10.0
"""A decision that comes later is no answer to the report: none was sent for a while, as in mode off."""


@dataclass(slots=True)
class Counters:
    """What the stream's threads have done since the client was made; each field has one writer at a time."""

    connected: bool = False
    connections: int = 0
    taken: int = 0  # reports taken from the queue
    taken_number: int = 0  # the newest of them, by its number in the queue
    sent: int = 0
    sent_number: int = 0
    sent_step_id: int = 0
    reports_rejected: int = 0
    decisions: int = 0
    decisions_rejected: int = 0
    last_error: str = ""
    timed_step_id: int = 0  # of the report whose decision is awaited, to time the round trip; 0 = none is
    timed_at_s: float = 0.0
    round_trip_us: int | None = None  # measured, and not yet told of

    def decided(self, known_step_id: int, now_s: float) -> None:
        """Note a decision: one that knows the awaited step ends its round trip."""
        if 0 < self.timed_step_id <= known_step_id:
            passed_s = now_s - self.timed_at_s
            self.round_trip_us = round(1e6 * passed_s) if 0 <= passed_s <= MAX_ROUND_TRIP_S else None
            self.timed_step_id = 0


class Sender:
    """Feeds one call. ``end`` must be called when the call is over, before the next one's sender starts."""

    def __init__(
        self, info: pb.EngineMessage, mailbox: Mailbox, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._info = info
        self._mailbox = mailbox
        self._counters = counters
        self._clock = clock
        self._ended = False
        self._finishing = False
        self._started = False
        self._done = threading.Event()

    def messages(self) -> Iterator[pb.EngineMessage]:
        """EngineInfo, then reports and events in the order of queueing, until ``end`` or ``finish``."""
        self._started = True
        self._counters.timed_step_id = 0  # a report that an earlier stream sent may never be answered
        try:
            yield self._info
            # gRPC asks for a second message once the transport has taken the first: only now is there a
            # connection.
            self._counters.connected = True
            self._counters.connections += 1
            while not self._ended:
                finishing = (
                    self._finishing
                )  # read first: what was queued before ``finish`` is then still sent
                yield from self._queued()
                if finishing:
                    return
                self._mailbox.wait_for_signal()
        finally:
            self._done.set()

    def finish(self) -> None:
        """End the stream from our side once the queue is empty."""
        self._finishing = True
        self._mailbox.signal()

    def end(self, timeout_s: float) -> None:
        """Stop taking from the queue; returns when that is so, or after ``timeout_s``."""
        self._ended = True
        self._mailbox.signal()
        if self._started:
            self._done.wait(timeout_s)

    def _queued(self) -> Iterator[pb.EngineMessage]:
        counters, reports = self._counters, self._mailbox.reports
        while not self._ended and (reports or self._mailbox.events):
            try:
                number, report = reports.popleft()
            except IndexError:
                # Every report up to the last one taken is gone, and the events up to there are due.
                yield from self._events(counters.taken_number)
                continue
            counters.taken += 1
            counters.taken_number = number
            yield from self._events(number - 1)
            try:
                message = report_to_proto(report, number - counters.sent_number - 1)
            except (AttributeError, TypeError, ValueError) as error:
                counters.reports_rejected += 1
                counters.last_error = f"report {report!r:.200} cannot be sent: {error}"
                log.warning(counters.last_error)
                continue
            counters.sent += 1
            counters.sent_number = number
            counters.sent_step_id = report.step_id
            self._time(message)
            yield pb.EngineMessage(report=message)

    def _time(self, message: pb.StepReport) -> None:
        """Tell of the last round trip, and begin to time the next one unless one is under way."""
        counters = self._counters
        if counters.round_trip_us is not None:
            message.round_trip_us, counters.round_trip_us = counters.round_trip_us, None
        if not counters.timed_step_id:
            counters.timed_at_s = self._clock()  # before the step: the receiving thread reads it after
            counters.timed_step_id = message.step_id

    def _events(self, number: int) -> Iterator[pb.EngineMessage]:
        """The events that came before report ``number`` + 1."""
        events = self._mailbox.events
        while events and events[0][0] <= number:
            _, kind, step_id = events.popleft()
            yield pb.EngineMessage(event=pb.EngineEvent(kind=kind, step_id=step_id))
