"""An engine that sends more than it may: what is left out, and when its stream ends."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from session_bench import Bench, Make, bench_with_recorders

from specgov.controller.session import Session, SessionEnded
from specgov.controller.validation import Cause, RejectedMessage
from specgov.proto.v1 import specgov_pb2 as pb


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, make_info: Make, make_report: Make) -> Bench:
    return bench_with_recorders(monkeypatch, make_info, make_report)


class Ticks:
    """A timer that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def limited_session(bench: Bench, per_s: int) -> tuple[Session, Iterator[pb.Decision], Ticks]:
    ticks = Ticks()
    bench.telemetry.timer = ticks
    session = Session(bench.engines, bench.telemetry, per_s)
    session.deliver(pb.EngineMessage(info=bench.make_info()))
    decisions = session.run()
    next(decisions)
    return session, decisions, ticks


def test_beyond_the_limit_the_oldest_are_left_out_and_the_decision_knows_the_newest(bench: Bench) -> None:
    session, decisions, ticks = limited_session(bench, per_s=10)
    bench.report(session, *range(1, 26))  # 20 may come at once
    assert next(decisions).known_step_id == 25
    assert bench.rule.observed == list(range(6, 26))
    assert (bench.engine.reports, bench.engine.reports_rejected) == (20, 5)
    rejected = bench.telemetry.metrics.registry.get_sample_value(
        "specgov_messages_rejected_total", {"cause": "too_many"}
    )
    assert rejected == 5
    ticks.now_s = 1.0  # brings room for ten
    bench.report(session, *range(26, 36))
    assert next(decisions).known_step_id == 35
    assert bench.engine.reports == 30


WEIGHTS = pb.EngineMessage(event=pb.EngineEvent(kind=pb.EngineEvent.KIND_WEIGHTS_UPDATED))


def test_bad_messages_and_events_count_too(bench: Bench) -> None:
    """Else a stream of them would be the way around the limit."""
    session, decisions, _ = limited_session(bench, per_s=5)
    for _ in range(10):
        session.deliver(RejectedMessage(Cause.UNREADABLE, "no message"))
        session.deliver(WEIGHTS)
    session.deliver(WEIGHTS)
    next(decisions)
    assert bench.rule.forgot == 10  # of 21 messages ten are taken: an event of the eleven is not


@pytest.mark.parametrize("filler", ["report", "unreadable"])
def test_beyond_the_limit_events_are_left_out_last(bench: Bench, filler: str) -> None:
    session, decisions, _ = limited_session(bench, per_s=5)
    for step_id in range(1, 17):
        if step_id in (2, 9):
            session.deliver(WEIGHTS)
        if filler == "report":
            bench.report(session, step_id)
        else:
            session.deliver(RejectedMessage(Cause.UNREADABLE, "no message"))
    next(decisions)
    assert bench.rule.forgot == 2  # both: the eight that are too many of 18 are the oldest of the others
    if filler == "report":
        assert bench.rule.observed == list(range(9, 17))
    assert bench.engine.reports_rejected == (8 if filler == "report" else 0)


def test_a_flood_ends_the_stream_with_a_status(bench: Bench) -> None:
    session, decisions, _ = limited_session(bench, per_s=2)
    bench.report(session, *range(1, 26))  # 4 are taken, 21 are more than ten seconds' worth
    with pytest.raises(
        SessionEnded, match=r"far beyond the limit of 2 messages/s \(max_reports_per_s\)"
    ) as ended:
        next(decisions)
    assert ended.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert bench.engine.session is None


def test_what_the_sidecar_itself_puts_into_the_mailbox_is_not_limited(bench: Bench) -> None:
    session, decisions, _ = limited_session(bench, per_s=1)
    for _ in range(100):
        session.refresh()
        next(decisions)
    assert bench.engine.reports_rejected == 0
