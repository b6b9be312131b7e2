"""One engine's stream: messages in, observed in order; one decision out for all that had come in.

Two threads share a session. The reader puts messages into the mailbox; the stream's own thread takes all that
wait, observes them, decides once, and sends. So a slow reader or a burst costs decisions, which the newest
replaces anyway, and no queue of them grows. Streams take turns (``turns.py``), so that as load grows each
decision is on more reports. Where more wait than are of use, the oldest are shed: they would only make the
decision old. When the mailbox is full the reader stops reading, and the engine's client drops and counts its
oldest reports. Of more messages than an engine may send the oldest are rejected; a stream that goes far
beyond is ended.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from specgov.controller.engine_metrics import Handled
from specgov.controller.limits import MAX_MESSAGES_PER_S, MessagePace
from specgov.controller.liveness import Waits
from specgov.controller.logs import get_logger
from specgov.controller.telemetry import Telemetry
from specgov.controller.turns import Pace
from specgov.controller.validation import Cause, RejectedMessage, check_info
from specgov.policies.types import PolicyError
from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.engine import Engine
    from specgov.controller.engines import Engines
    from specgov.controller.step_record import StepRecord

MAX_WAITING_MESSAGES = 1024
NEWEST_REPORTS = 64
"""Of the reports that wait so many are taken in, the newest; those before them are shed."""
HELLO_TIMEOUT_S = 10.0
ROOM_CHECK_S = 0.01
"""How often a reader that waits for room in the mailbox looks again."""


class SessionEnded(Exception):  # noqa: N818 it names the event
    """The stream ends with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class TooManyStreams(RuntimeError):  # noqa: N818 it names the state, not the act
    """As many engines are connected as the configuration allows."""


@dataclass(frozen=True, slots=True)
class _Refresh:
    """Decide anew: the mode or the policy changed."""


class _InputEnded:
    """The engine closed its side, or the connection is gone."""


_SUPERSEDED = (
    "superseded: a newer stream of the same engine took over; "
    "if that is another engine, give each a name of its own (SPECGOV_ENGINE_ID)"
)
_EVENT_NAMES = {number: name.removeprefix("KIND_").lower() for name, number in pb.EngineEvent.Kind.items()}

_FROM_ENGINE = frozenset((pb.EngineMessage, RejectedMessage))
_Mail = pb.EngineMessage | RejectedMessage | SessionEnded | _Refresh | _InputEnded


class Session:
    """One ``Control`` stream, from its first message to its end.

    ``cut_off`` ends the stream also where its thread waits for a peer that reads nothing. ``moves`` and
    ``waits_for`` are for the watchdog.
    """

    def __init__(
        self,
        engines: Engines,
        telemetry: Telemetry,
        max_messages_per_s: int = MAX_MESSAGES_PER_S,
        cut_off: Callable[[], object] = lambda: None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self.cut_off = cut_off
        self.boot_id = ""  # the engine's, once it has said who it is
        self.moves = 0
        self._is_busy = self._is_sending = False
        self._turns_pace = Pace()
        self._pace = MessagePace(max_messages_per_s, telemetry.timer())
        self._engines = engines
        self._telemetry = telemetry
        self._hello_timeout_s = hello_timeout_s
        self._mailbox: queue.SimpleQueue[_Mail] = queue.SimpleQueue()
        self._over = threading.Event()
        self._engine: Engine | None = None
        self._input_ended = False
        self._end: SessionEnded | None = None
        self._rejections: Counter[Cause] = Counter()
        self._times_shed = 0

    # Called from other threads.

    def deliver(self, message: pb.EngineMessage | RejectedMessage) -> None:
        """Put a message into the mailbox."""
        self._mailbox.put(message)

    def read(self, messages: Iterable[pb.EngineMessage | RejectedMessage]) -> None:
        """Deliver the stream's messages until the stream ends; runs on the reader's thread."""
        try:
            for message in messages:
                self.deliver(message)
                while self._mailbox.qsize() >= MAX_WAITING_MESSAGES and not self._over.wait(ROOM_CHECK_S):
                    pass
        except grpc.RpcError:
            pass  # the stream was cancelled or reset; it ends like any other
        self._mailbox.put(_InputEnded())

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """End the stream with a status."""
        self._mailbox.put(SessionEnded(code, details))

    def refresh(self) -> None:
        """Send a new decision, since what it rests on was changed."""
        self._mailbox.put(_Refresh())

    @property
    def waits_for(self) -> Waits:
        """What the stream waits for now."""
        if self._is_sending:
            return Waits.PEER
        return Waits.SIDECAR if self._is_busy or self._mailbox.qsize() else Waits.NOTHING

    @property
    def name(self) -> str:
        """The engine's id; empty before it is known."""
        return "" if self._engine is None else self._engine.info.engine_id

    # The stream's own thread.

    def run(self) -> Iterator[pb.Decision]:
        """The decisions to send, until the engine ends its side.

        Raises:
            SessionEnded: the stream is to end with a status.

        """
        try:
            engine = self._engine = self._greet()
            mail: list[_Mail] = [_Refresh()]
            while True:
                self._is_busy = True
                records: list[StepRecord] = []
                decision = self._take_turn(engine, mail, records)
                self._is_busy = False
                self.moves += 1
                try:
                    if decision is not None:
                        self._is_sending = True
                        yield decision
                        self._is_sending = False
                        self.moves += 1
                finally:
                    self._telemetry.sent(engine, records)
                if self._end is not None:
                    raise self._end
                if self._input_ended:
                    return
                mail = [self._mailbox.get()]
        finally:
            self.leave()

    def leave(self) -> None:
        """Let go of the engine; may be called more than once, from any thread."""
        self._over.set()
        if self._engine is not None and self._engines.disconnect(self._engine, self):
            self._telemetry.disconnected(self._engine)

    def _greet(self) -> Engine:
        """Wait for the first message, which must say who the engine is, and take the engine over."""
        try:
            first = self._mailbox.get(timeout=self._hello_timeout_s)
        except queue.Empty:
            raise SessionEnded(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no EngineInfo came within {self._hello_timeout_s:g} s"
            ) from None
        if isinstance(first, SessionEnded):
            raise first
        if isinstance(first, RejectedMessage):
            self._telemetry.refused("", first.cause.value, str(first))
            self._telemetry.rejected(first.cause)
            raise SessionEnded(grpc.StatusCode.INVALID_ARGUMENT, str(first))
        if not isinstance(first, pb.EngineMessage) or first.WhichOneof("message") != "info":
            self._telemetry.rejected(Cause.MISSING_INFO)
            raise SessionEnded(
                grpc.StatusCode.FAILED_PRECONDITION, "the first message of a stream must be EngineInfo"
            )
        return self._connect(first.info)

    def _connect(self, info: pb.EngineInfo) -> Engine:
        self._is_busy = True
        self.boot_id = info.boot_id
        try:
            engine, older = self._engines.connect(self, info, check_info(info))
        except RejectedMessage as error:
            self._telemetry.refused(info.engine_id, error.cause.value, str(error))
            self._telemetry.rejected(error.cause)
            raise SessionEnded(grpc.StatusCode.INVALID_ARGUMENT, f"EngineInfo: {error}") from error
        except PolicyError as error:
            self._telemetry.refused(info.engine_id, "policy", str(error))
            raise SessionEnded(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        except TooManyStreams as error:
            self._telemetry.refused(info.engine_id, "too_many_engines", str(error))
            raise SessionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        if older is not None:
            older.end(grpc.StatusCode.ABORTED, _SUPERSEDED)
            if older.boot_id != info.boot_id:  # an engine that starts anew leaves no open stream behind
                get_logger().warning(
                    "another engine took this one's name: give each its own (SPECGOV_ENGINE_ID)",
                    engine_id=info.engine_id,
                    boot_id=info.boot_id,
                    boot_id_before=older.boot_id,
                )
        self._telemetry.connected(engine, superseded=older is not None)
        return engine

    def _gather(self, mail: list[_Mail]) -> None:
        """Add all that waits to the mail."""
        while not self._mailbox.empty() and len(mail) < MAX_WAITING_MESSAGES:
            mail.append(self._mailbox.get_nowait())  # nobody else takes from it

    def _take_turn(self, engine: Engine, mail: list[_Mail], records: list[StepRecord]) -> pb.Decision | None:
        """Handle ``mail`` and what has come behind it, when it is this stream's turn."""
        turn = self._engines.turns.begin(self._turns_pace)
        begun_s = self._telemetry.timer()
        try:
            if self.moves:  # the first decision knows of no step
                self._gather(mail)
            return self._handle(engine, mail, records)
        finally:
            turn.release()
            self._engines.turns.took(self._turns_pace, self._telemetry.timer() - begun_s)

    def _handle(self, engine: Engine, mail: Sequence[_Mail], records: list[StepRecord]) -> pb.Decision | None:
        """Take in all of ``mail`` in order, then decide once if anything in it calls for a decision.

        ``records`` gets the steps that were reported: also those before the stream's end are told of.
        """
        started_s = self._telemetry.timer()
        with engine.lock:
            if engine.session is not self:
                raise SessionEnded(grpc.StatusCode.ABORTED, _SUPERSEDED)
            switches = engine.tier_switches
            sent = sum(map(_FROM_ENGINE.__contains__, map(type, mail)))
            surplus = self._pace.surplus(sent, started_s)
            if surplus:
                mail = self._reject_oldest(engine, mail, surplus)
            if len(mail) > NEWEST_REPORTS:
                mail = self._shed(engine, mail)
            wanted = False
            for piece in mail:
                wanted |= self._take_in(engine, piece, records)
                if self._end is not None:
                    break
            decision = engine.decide() if wanted and not self._is_ending else None
            self._telemetry.log(engine, records, decision)
            switched, outlook = engine.tier_switches > switches, engine.outlook
        seconds = self._telemetry.timer() - started_s
        self._telemetry.handled(engine, Handled(records, decision, outlook, switched, seconds))
        return decision

    def _shed(self, engine: Engine, mail: Sequence[_Mail]) -> Sequence[_Mail]:
        """Leave out all reports but the newest ones; the rest of the mail stays, in its order."""
        surplus = sum(_carries(piece, "report") for piece in mail) - NEWEST_REPORTS
        if surplus <= 0:
            return mail
        kept: list[_Mail] = []
        left = surplus
        for piece in mail:
            if left and isinstance(piece, pb.EngineMessage) and piece.HasField("report"):
                engine.shed(piece.report)
                left -= 1
            else:
                kept.append(piece)
        self._times_shed += 1
        if _is_told(self._times_shed):
            get_logger().warning(
                "the oldest reports were left out, since newer ones waited: more come than can be taken in",
                engine_id=engine.info.engine_id,
                reports=surplus,
                reports_in_all=engine.reports_shed,
                times=self._times_shed,
            )
        return kept

    def _reject_oldest(self, engine: Engine, mail: Sequence[_Mail], surplus: int) -> Sequence[_Mail]:
        """Reject the ``surplus`` oldest of the engine's messages, since it sent more than it may.

        Events come rarely and mean much: they are rejected where nothing else is left to be.

        Raises:
            SessionEnded: it sends far more, and for long.

        """
        limit = f"the limit of {self._pace.per_s} messages/s (max_reports_per_s)"
        if self._pace.is_hopeless:
            raise SessionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, f"far beyond {limit}, for long")
        error = RejectedMessage(Cause.TOO_MANY, f"beyond {limit}: the oldest are left out")
        sent = [at for at, piece in enumerate(mail) if type(piece) in _FROM_ENGINE]
        rejected = frozenset(sorted(sent, key=lambda at: _carries(mail[at], "event"))[:surplus])
        for at in rejected:
            if isinstance(piece := mail[at], pb.EngineMessage) and piece.HasField("report"):
                engine.reject(piece.report)
            self._reject(engine, error)
        return [piece for at, piece in enumerate(mail) if at not in rejected]

    def _take_in(self, engine: Engine, mail: _Mail, records: list[StepRecord]) -> bool:
        """Take one piece of mail in; whether it calls for a new decision."""
        try:
            if isinstance(mail, pb.EngineMessage):
                if mail.HasField("report"):
                    records.append(engine.observe(mail.report))
                    return True
                return _take_in_other(engine, mail)
            if isinstance(mail, RejectedMessage):
                raise mail
        except RejectedMessage as error:
            self._reject(engine, error)
            return False
        if isinstance(mail, SessionEnded):
            self._end = mail
        self._input_ended |= isinstance(mail, _InputEnded)
        return isinstance(mail, _Refresh)

    @property
    def _is_ending(self) -> bool:
        """Whether nobody waits for a decision any more."""
        return self._input_ended or self._end is not None

    def _reject(self, engine: Engine, error: RejectedMessage) -> None:
        """Count a bad message; not each of its cause is told."""
        self._rejections[error.cause] += 1
        count = self._rejections[error.cause]
        self._telemetry.rejected(error.cause)
        if _is_told(count):
            get_logger().warning(
                "message rejected",
                engine_id=engine.info.engine_id,
                cause=error.cause.value,
                problem=str(error),
                times=count,
            )


def _carries(piece: _Mail, kind: str) -> bool:
    return isinstance(piece, pb.EngineMessage) and piece.WhichOneof("message") == kind


def _is_told(times: int) -> bool:
    """Whether to log what happened that many times: the first, the second, the fourth and so on."""
    return times & (times - 1) == 0


def _take_in_other(engine: Engine, message: pb.EngineMessage) -> bool:
    """Take in what is no report; whether it calls for a new decision.

    Raises:
        RejectedMessage: it comes only at a stream's start.

    """
    if message.HasField("info"):
        raise RejectedMessage(Cause.REPEATED_INFO, "EngineInfo comes once, as a stream's first message")
    # What is no event either is a kind of message that only a newer protocol knows.
    return message.HasField("event") and _apply_event(engine, message.event)


def _apply_event(engine: Engine, event: pb.EngineEvent) -> bool:
    """Do what an engine's event asks for; whether it calls for a new decision."""
    get_logger().info(
        "engine event",
        engine_id=engine.info.engine_id,
        kind=_EVENT_NAMES.get(event.kind, str(event.kind)),
        step_id=event.step_id,
    )
    if event.kind == pb.EngineEvent.KIND_WEIGHTS_UPDATED:
        engine.forget()
        return True
    return event.kind == pb.EngineEvent.KIND_RESUMED
