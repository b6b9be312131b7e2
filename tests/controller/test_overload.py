"""More reports than can be taken in: the oldest are shed, decisions stay fresh, and everything is counted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.controller import session as session_module
from specgov.controller.config import ServeConfig
from specgov.controller.doors import LOOKAHEAD_BYTES
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.session import NEWEST_REPORTS, Session, SessionEnded
from specgov.controller.step_record import StepRecord
from specgov.controller.telemetry import Telemetry
from specgov.controller.turns import TURNS_ASIDE, Turns
from specgov.controller.validation import Cause, RejectedMessage
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]
EVENTS = {
    "paused": pb.EngineEvent.KIND_PAUSED,
    "resumed": pb.EngineEvent.KIND_RESUMED,
    "weights": pb.EngineEvent.KIND_WEIGHTS_UPDATED,
    "down": pb.EngineEvent.KIND_SHUTTING_DOWN,
}


class Trace:
    """In place of the decision log: the steps as they are told of."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def steps(self, _engine_id: str, records: list[StepRecord], _decision: object, _mode: object) -> None:
        self.records += records

    def decided(self, *_: object) -> None: ...

    def stream(self, *_: object) -> None: ...


class Bench:
    """Sessions whose mailboxes a test fills, one turn after the other."""

    def __init__(self, make_info: Make, make_report: Make) -> None:
        self.make_info, self.make_report = make_info, make_report
        self.engines = Engines(ServeConfig(policy="static:3"), clock=lambda: 0.0)
        self.engines.turns = Turns(patience_s=60.0)
        self.trace = Trace()
        self.telemetry = Telemetry(Metrics(), self.trace, timer=lambda: 0.0)  # type: ignore[arg-type]

    def connect(self, engine_id: str = "engine-1") -> tuple[Session, Iterator[pb.Decision]]:
        session = Session(self.engines, self.telemetry)
        session.deliver(pb.EngineMessage(info=self.make_info(engine_id=engine_id)))
        decisions = session.run()
        next(decisions)
        return session, decisions

    def report(self, session: Session, *step_ids: int, **changes: Any) -> None:
        for step_id in step_ids:
            session.deliver(pb.EngineMessage(report=self.make_report(step_id, **changes)))

    def engine(self, engine_id: str = "engine-1") -> Engine:
        engine = self.engines.get(engine_id)
        assert engine is not None
        return engine

    def counted(self, name: str) -> float | None:
        return self.telemetry.metrics.registry.get_sample_value(name, {"engine": "engine-1"})


@pytest.fixture
def bench(make_info: Make, make_report: Make) -> Bench:
    return Bench(make_info, make_report)


def test_of_a_burst_the_newest_are_taken_in_and_decided_on_once(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.report(session, *range(1, NEWEST_REPORTS + 11))
    bench.report(session, NEWEST_REPORTS + 11, batch_size=9)
    decision = next(decisions)
    assert (decision.decision_id, decision.known_step_id) == (2, NEWEST_REPORTS + 11)
    assert [record.step.step_id for record in bench.trace.records] == list(range(12, NEWEST_REPORTS + 12))
    assert (bench.engine().reports, bench.engine().reports_shed) == (NEWEST_REPORTS, 11)


def test_the_first_decision_waits_for_no_report(bench: Bench) -> None:
    session = Session(bench.engines, bench.telemetry)
    session.deliver(pb.EngineMessage(info=bench.make_info()))
    bench.report(session, 1)
    assert [(one.decision_id, one.known_step_id) for one in itertools.islice(session.run(), 2)] == [
        (1, 0),
        (2, 1),
    ]


def test_as_many_as_are_taken_in_are_all_taken_in(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.report(session, *range(1, NEWEST_REPORTS + 1))
    session.deliver(pb.EngineMessage(event=pb.EngineEvent(kind=pb.EngineEvent.KIND_RESUMED)))
    assert next(decisions).known_step_id == NEWEST_REPORTS
    assert bench.engine().reports_shed == 0


def test_what_was_shed_is_a_gap_before_the_next_report_and_shown_beside_what_the_engine_dropped(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    session, decisions = bench.connect()
    bench.report(session, 1)
    next(decisions)
    bench.report(session, 2, 3, reports_dropped=4)  # these two are shed, and what they say is lost is kept
    bench.report(session, *range(4, NEWEST_REPORTS + 4))
    next(decisions)
    first, after, *others = bench.trace.records
    assert (first.reports_dropped, first.reports_shed, first.reports_lost) == (0, 0, 0)
    assert (after.step.step_id, after.reports_dropped, after.reports_shed, after.reports_lost) == (
        4,
        8,
        2,
        10,
    )
    assert {record.reports_lost for record in others} == {0}
    state = bench.engine().state()
    assert (state.reports, state.reports_dropped, state.reports_shed) == (NEWEST_REPORTS + 1, 8, 2)
    assert bench.counted("specgov_reports_shed_total") == 2
    assert bench.counted("specgov_reports_dropped_total") == 8
    (told,) = [
        record for record in caplog.records if "the oldest reports were left out" in record.getMessage()
    ]
    assert told.levelname == "WARNING"


@pytest.mark.parametrize(("shed", "alarms"), [(49, 0), (50, 1)])
def test_a_long_gap_is_an_alarm_whoever_made_it(bench: Bench, shed: int, alarms: int) -> None:
    """As of reports that the engine dropped (``guard.stale_steps``, 50): what holds now is not known."""
    session, decisions = bench.connect()
    bench.report(session, 1)
    next(decisions)
    bench.report(session, *range(2, NEWEST_REPORTS + shed + 2))
    next(decisions)
    counts = bench.engine().state().guard.alarms
    assert sum(count.times for count in counts if count.cause == pb.GUARD_CAUSE_REPORTS_STOPPED) == alarms


@pytest.mark.parametrize("cause", ["too many", "bad"])
def test_what_a_rejected_report_says_was_dropped_is_told_of_by_the_next(bench: Bench, cause: str) -> None:
    """So that each report of the engine's is found as taken in, shed, rejected or dropped."""
    session = Session(bench.engines, bench.telemetry, max_messages_per_s=2)
    session.deliver(pb.EngineMessage(info=bench.make_info()))
    decisions = session.run()
    next(decisions)
    if cause == "bad":
        bench.report(session, 1, 2, reports_dropped=3, num_steps=2)  # no tier of the engine's
    else:
        bench.report(session, 1, 2, reports_dropped=3)  # four may come at once
        bench.report(session, 3, 4)
    bench.report(session, 5, 6)
    next(decisions)
    engine = bench.engine()
    assert (engine.reports_rejected, engine.reports_dropped) == (2, 6)
    assert [record.reports_dropped for record in bench.trace.records][:2] == [6, 0]
    assert bench.counted("specgov_reports_dropped_total") == 6


def test_long_overload_is_told_of_a_few_times(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    session, decisions = bench.connect()
    for turn in range(20):
        bench.report(session, *range(100 * turn + 1, 100 * turn + 101))
        next(decisions)
    told = [record.getMessage() for record in caplog.records if "were left out" in record.getMessage()]
    assert len(told) == 5  # of the turns 1, 2, 4, 8 and 16
    assert bench.engine().reports_shed == 20 * (100 - NEWEST_REPORTS)


PIECES = st.sampled_from([*["report"] * 6, "bad", "unreadable", "refresh", *EVENTS])


@settings(deadline=None)
@given(turns=st.lists(st.lists(PIECES, max_size=14), max_size=6))
def test_all_is_taken_in_or_counted_and_what_is_taken_in_keeps_its_order(
    make_info: Make, make_report: Make, turns: list[list[str]]
) -> None:
    """Three reports of a turn at most: the last ones. Of everything else nothing is missing."""
    seen: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module, "NEWEST_REPORTS", 3)
        observe, apply = Engine.observe, session_module._apply_event

        def noting_observe(engine: Engine, report: pb.StepReport) -> StepRecord:
            seen.append(("report", report.step_id))
            return observe(engine, report)

        def noting_apply(engine: Engine, event: pb.EngineEvent) -> bool:
            seen.append(("event", event.step_id))
            return apply(engine, event)

        patch.setattr(Engine, "observe", noting_observe)
        patch.setattr(session_module, "_apply_event", noting_apply)
        bench = Bench(make_info, make_report)
        session, decisions = bench.connect()
        wanted: list[tuple[str, int]] = []
        number = reports = bad = unreadable = 0
        for turn in turns:
            mail: list[tuple[str, int]] = []
            for piece in turn:
                number += 1
                if piece in ("report", "bad"):
                    bench.report(session, number, num_steps=3 if piece == "report" else 2)
                    mail.append(("report", number))
                    reports, bad = reports + 1, bad + (piece == "bad")
                elif piece == "unreadable":
                    session.deliver(RejectedMessage(Cause.UNREADABLE, "no message"))
                    unreadable += 1
                elif piece == "refresh":
                    session.refresh()
                else:
                    event = pb.EngineEvent(kind=EVENTS[piece], step_id=number)  # type: ignore[arg-type]
                    session.deliver(pb.EngineMessage(event=event))
                    mail.append(("event", number))
            newest = [at for at, (kind, _) in enumerate(mail) if kind == "report"][-3:]
            wanted += [one for at, one in enumerate(mail) if one[0] == "event" or at in newest]
            session.refresh()
            next(decisions)
        # One more, so that what was shed last has a report after it.
        bench.report(session, number + 1)
        next(decisions)
    assert seen == [*wanted, ("report", number + 1)]
    engine = bench.engine()
    assert reports + 1 == engine.reports + engine.reports_rejected + engine.reports_shed
    assert sum(record.reports_shed for record in bench.trace.records) == engine.reports_shed
    rejected = bench.telemetry.metrics.registry.get_sample_value(
        "specgov_messages_rejected_total", {"cause": "unreadable"}
    )
    assert (rejected or 0) == unreadable


def test_what_comes_while_a_stream_waits_for_its_turn_is_decided_on_with_the_rest(
    bench: Bench, eventually: Make
) -> None:
    session, decisions = bench.connect()
    turn = bench.engines.turns.begin()
    bench.report(session, 1)
    found: list[pb.Decision] = []
    stream = threading.Thread(target=lambda: found.append(next(decisions)))
    stream.start()
    eventually(lambda: session._mailbox.empty(), "taking the first report")
    bench.report(session, 2, 3)
    turn.release()
    stream.join(60)
    assert [(one.decision_id, one.known_step_id) for one in found] == [(2, 3)]


def test_a_stream_whose_policy_hangs_holds_no_other_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.engines.turns = Turns(patience_s=0.01)
    hanging, hanging_decisions = bench.connect("hangs")
    session, decisions = bench.connect()
    inside, may_end = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        inside.set()
        assert may_end.wait(60)

    monkeypatch.setattr(bench.engine("hangs").guard, "admit", hang)
    bench.report(hanging, 1)
    stream = threading.Thread(target=lambda: next(hanging_decisions))
    stream.start()
    assert inside.wait(60)
    bench.report(session, 1)
    assert next(decisions).known_step_id == 1
    may_end.set()
    stream.join(60)
    assert not stream.is_alive()


def test_a_stream_whose_turns_are_long_takes_them_beside_the_others(bench: Bench) -> None:
    """Its timer stands still for the others; the slow one's policy takes 20 ms by it, or no time."""
    now_s, takes_s = 0.0, 0.02
    bench.telemetry.timer = lambda: now_s
    slow, slow_decisions = bench.connect("slow")
    observe = bench.engine("slow").guard.admit

    def take_long(*arguments: Any, **named: Any) -> bool:
        nonlocal now_s
        now_s += takes_s
        return observe(*arguments, **named)

    bench.engine("slow").guard.admit = take_long  # type: ignore[method-assign]
    bench.report(slow, 1)
    next(slow_decisions)
    takes_s = 0.0
    turn = bench.engines.turns.begin()  # another stream's, for as long as this one's next turns last
    for step_id in range(2, TURNS_ASIDE + 2):
        bench.report(slow, step_id)
        assert next(slow_decisions).known_step_id == step_id
    assert slow._turns_pace.aside == 0  # none of those was long
    bench.report(slow, TURNS_ASIDE + 2)
    stream = threading.Thread(target=next, args=(slow_decisions,))
    stream.start()
    turn.release()
    stream.join(60)
    assert not stream.is_alive()


def test_the_turn_ends_with_a_stream_that_is_ended(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.connect()  # takes the engine over
    bench.report(session, 1)
    with pytest.raises(SessionEnded):
        next(decisions)
    bench.engines.turns.begin().release()


@pytest.mark.parametrize("requests", [1, LOOKAHEAD_BYTES, 65_535])
def test_reports_larger_than_what_is_read_ahead_come_through(
    start: Make, make_report: Make, requests: int
) -> None:
    stream = start().stream(max_running_requests=65_535)
    for step_id in range(1, 6):
        report = make_report(
            step_id,
            batch_size=requests,
            accepted_drafts=bytes(requests),
            slots_u16le=b"".join(slot.to_bytes(2, "little") for slot in range(requests)),
            slot_generations_u8=bytes(requests),
            sum_seq_len_tokens=requests,
            max_seq_len_tokens=1,
        )
        stream.send(report)
        assert stream.decision_that_knows(step_id).known_step_id == step_id
    stream.close()
    assert stream.end()[0] == grpc.StatusCode.OK
