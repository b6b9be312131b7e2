"""Sessions without a server: what is learnt, when, and what comes of several reports at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from session_bench import Bench, Make, Recorder, bench_with_recorders

from specgov.controller.config import ServeConfig
from specgov.controller.engine_metrics import MAX_QUEUED
from specgov.controller.engines import Engines
from specgov.controller.session import MAX_WAITING_MESSAGES, NEWEST_REPORTS, Session, SessionEnded
from specgov.policies.types import (
    Choice,
    Reason,
    TierRange,
)
from specgov.proto.v1 import specgov_pb2 as pb


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, make_info: Make, make_report: Make) -> Bench:
    return bench_with_recorders(monkeypatch, make_info, make_report)


def test_several_reports_at_once_make_one_decision(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.report(session, 1, 2, 3)
    bench.report(session, 4, batch_size=9)
    decision = next(decisions)
    assert bench.rule.observed == [1, 2, 3, 4]
    assert (decision.decision_id, decision.known_step_id) == (2, 4)
    assert [view.batch_size for view in bench.rule.asked] == [1, 9]  # at connect, and after all four


def test_reports_before_the_end_are_learnt_from(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.report(session, 1, 2)
    session.read([])  # the engine's side ends
    assert list(decisions) == []
    assert bench.rule.observed == [1, 2]
    assert bench.engine.session is None


def test_warm_up_is_counted_and_not_learnt_from(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.report(session, 1, warm_up=True)
    assert next(decisions).known_step_id == 1
    assert (bench.rule.observed, bench.engine.reports) == ([], 1)


def test_rejected_reports_are_not_learnt_from(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.report(session, 1, num_steps=2)
    bench.report(session, 2)
    bench.report(session, 2, 1)
    next(decisions)
    assert bench.rule.observed == [2]
    assert (bench.engine.reports, bench.engine.reports_rejected) == (1, 3)


@pytest.mark.parametrize(
    ("mode", "reason", "learns"),
    [
        (pb.MODE_ACTIVE, pb.REASON_POLICY, True),
        (pb.MODE_SHADOW, pb.REASON_SHADOW, True),
        (pb.MODE_FROZEN, pb.REASON_FROZEN, False),
    ],
)
def test_modes(bench: Bench, mode: pb.Mode.ValueType, reason: pb.Reason.ValueType, learns: bool) -> None:
    session, decisions = bench.connect()
    bench.engine.mode = mode
    bench.report(session, 1)
    assert next(decisions).reason == reason
    assert bench.rule.observed == ([1] if learns else [])


def test_mode_off_sends_nothing_and_learns(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.engine.mode = pb.MODE_OFF
    bench.report(session, 1)
    session.read([])
    assert list(decisions) == []
    assert bench.rule.observed == [1]


def test_the_rules_own_reason_is_passed_on(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.rule.choice = Choice((TierRange(1, 64, 1),), Reason.EXPLORATION, propensity=0.02)
    bench.report(session, 1)
    decision = next(decisions)
    assert (decision.num_steps, decision.reason) == (1, pb.REASON_EXPLORATION)
    assert decision.propensity == 0.02
    assert bench.engine.tier_switches == 1  # 3 at connect, then 1


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (Choice((TierRange(1, 8, 3), TierRange(9, 64, 4))), "recorder chose [4]"),
        (Choice(()), "recorder chose nothing"),
        (Choice((TierRange(1, 64, 3),), expected_tokens=np.ones(2), expected_ms=np.ones(2)), "ValueError"),
        (None, "AttributeError"),
    ],
    ids=["unknown tier", "no tier", "two estimates for four tiers", "no choice"],
)
def test_a_rule_that_chooses_what_cannot_be_is_set_aside(bench: Bench, choice: Choice, says: str) -> None:
    session, decisions = bench.connect()
    bench.rule.choice = choice
    bench.report(session, 1)
    decision = next(decisions)
    assert (decision.num_steps, decision.reason, decision.policy) == (0, pb.REASON_FALLBACK, "fallback")
    assert (decision.batch_size_min, decision.batch_size_max, decision.known_step_id) == (1, 64, 1)
    assert says in bench.engine.state().policy_failure


@pytest.mark.parametrize("method", ["observe", "choose", "forget"])
def test_a_rule_that_fails_is_set_aside_until_there_is_another(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("of the rule")

    session, decisions = bench.connect()
    with monkeypatch.context() as broken:
        broken.setattr(Recorder, method, fail)
        event = pb.EngineEvent(kind=pb.EngineEvent.KIND_WEIGHTS_UPDATED)
        session.deliver(pb.EngineMessage(event=event))
        bench.report(session, 1, 2)
        assert next(decisions).reason == pb.REASON_FALLBACK
        bench.report(session, 3)
        decision = next(decisions)
    assert (decision.num_steps, decision.reason, decision.known_step_id) == (0, pb.REASON_FALLBACK, 3)
    state = bench.engine.state()
    assert (state.policy, state.policy_failure) == ("fallback", "ArithmeticError: of the rule")
    assert bench.engines.on_fallback == 1
    assert [record.levelname for record in caplog.records if "set aside" in record.getMessage()] == ["ERROR"]
    bench.engine.set_policy("another")
    session.refresh()
    decision = next(decisions)
    assert (decision.num_steps, decision.reason) == (3, pb.REASON_POLICY)
    assert bench.engine.state().policy_failure == ""
    assert bench.engines.on_fallback == 0


def test_a_rule_that_cannot_say_what_it_believes_decides_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Recorder) -> dict[str, float]:
        raise ArithmeticError("of the rule")

    monkeypatch.setattr(Recorder, "estimates", fail)
    session, decisions = bench.connect()
    assert bench.engine.estimates() == {}
    bench.report(session, 1)
    assert next(decisions).reason == pb.REASON_POLICY


def test_ranges_far_from_the_batch_are_left_out(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.rule.choice = Choice(tuple(TierRange(size, size, (1, 3)[size % 2]) for size in range(1, 65)))
    bench.report(session, 1, batch_size=40)
    decision = next(decisions)
    assert (decision.batch_size_min, decision.batch_size_max, decision.num_steps) == (40, 40, 1)
    # 32 ranges on each side of 40: from 8 on, and all the 24 above.
    assert [n.batch_size_min for n in decision.neighbours] == [*range(8, 40), *range(41, 65)]


def test_new_boot_marks_all_requests_as_new(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.report(session, 1)
    next(decisions)
    session, decisions = bench.connect(boot_id="boot-2")
    bench.report(session, 1)
    next(decisions)
    assert bench.rule.observed == [1, 1]
    assert bench.rule.generations == [[1, 1, 2, 1], [102, 102, 103, 102]]
    assert bench.rule.forgot == 0


def test_engine_with_other_tiers_gets_a_fresh_rule(bench: Bench) -> None:
    session, decisions = bench.connect()
    bench.report(session, 1)
    next(decisions)
    bench.connect(boot_id="boot-2", tiers=[0, 3])
    assert bench.rule.engine.tiers == (0, 3)
    assert bench.rule.observed == []


@pytest.mark.parametrize(
    "other",
    [{"model": "another"}, {"draft": "another"}, {"gpu": "another"}, {"tensor_parallel_size": 8}],
    ids=lambda other: next(iter(other)),
)
def test_engine_that_serves_something_else_gets_a_fresh_rule(bench: Bench, other: dict[str, Any]) -> None:
    session, decisions = bench.connect()
    bench.report(session, 1)
    next(decisions)
    bench.connect(boot_id="boot-2", **other)
    assert bench.rule.observed == []


def test_steps_before_the_sidecar_ends_the_stream_are_told_of(bench: Bench) -> None:
    """They were learnt from, so decision log and metrics have them; what comes after is not read."""
    logged: list[tuple[list[int], Any]] = []

    class Log:
        def steps(self, engine_id: str, records: Any, decision: Any, mode: Any) -> None:
            logged.append(([record.step.step_id for record in records], decision))

        def decided(self, *_: Any) -> None: ...

    session, decisions = bench.connect()
    bench.telemetry.metrics.engines.connected(bench.engine)
    bench.telemetry.decision_log = Log()
    bench.report(session, 1, 2)
    session.end(grpc.StatusCode.UNAVAILABLE, "draining")
    bench.report(session, 3)
    with pytest.raises(SessionEnded, match="draining"):
        next(decisions)
    assert bench.rule.observed == [1, 2]
    assert logged == [([1, 2], None)]
    counted = bench.telemetry.metrics.registry.get_sample_value
    assert counted("specgov_steps_total", {"engine": "engine-1", "tier": "3"}) == 2
    assert bench.engine.session is None


def test_superseded_session_observes_nothing_more(bench: Bench) -> None:
    older, decisions = bench.connect()
    newer, _newer_decisions = bench.connect()
    bench.report(older, 1)
    with pytest.raises(SessionEnded) as ended:
        next(decisions)
    assert ended.value.code == grpc.StatusCode.ABORTED
    assert bench.rule.observed == []
    assert bench.engine.session is newer


@pytest.mark.parametrize(("boot_id", "warns"), [("boot-1", False), ("boot-2", True)])
def test_two_engines_of_one_name_are_told_of(
    bench: Bench, caplog: pytest.LogCaptureFixture, boot_id: str, warns: bool
) -> None:
    """The same process may come back over a new connection before the old one is seen to be gone."""
    _older, decisions = bench.connect()
    bench.connect(boot_id=boot_id)
    assert ("another engine took this one's name" in caplog.text) == warns
    with pytest.raises(SessionEnded, match="SPECGOV_ENGINE_ID"):
        next(decisions)


def test_silence_ends_the_stream(bench: Bench) -> None:
    session = Session(bench.engines, bench.telemetry, hello_timeout_s=0.01)
    with pytest.raises(SessionEnded) as ended:
        next(session.run())
    assert ended.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no EngineInfo came within 0.01 s" in ended.value.details


def test_reader_stops_reading_when_the_mailbox_is_full(bench: Bench, eventually: Make) -> None:
    """A stream whose decisions nobody takes keeps a bounded number of messages in memory."""
    session, decisions = bench.connect()
    taken = []

    def messages() -> Iterator[pb.EngineMessage]:
        for step_id in range(1, 3 * MAX_WAITING_MESSAGES):
            taken.append(step_id)
            yield pb.EngineMessage(report=bench.make_report(step_id))

    reader = threading.Thread(target=session.read, args=(messages(),))
    reader.start()
    eventually(lambda: len(taken) == MAX_WAITING_MESSAGES, "reading up to the limit")
    next(decisions)
    eventually(lambda: len(taken) == 2 * MAX_WAITING_MESSAGES, "reading on")
    session.leave()
    reader.join(60)
    assert not reader.is_alive()
    assert bench.rule.observed == list(range(1, MAX_WAITING_MESSAGES + 1))[-NEWEST_REPORTS:]
    assert bench.engine.reports_shed == MAX_WAITING_MESSAGES - NEWEST_REPORTS


def test_engines_that_were_away_longest_are_forgotten(bench: Bench) -> None:
    bench.engines = Engines(ServeConfig(policy="static", max_engines=2), clock=lambda: 0.0)
    for engine_id in ("a", "b", "c"):
        session, _ = bench.connect(engine_id=engine_id)
        session.leave()
    assert [engine.info.engine_id for engine in bench.engines.all()] == ["b", "c"]


def test_what_is_expected_stands_beside_the_baseline(bench: Bench) -> None:
    session, decisions = bench.connect()
    # Tiers 0, 1, 3, 5. The baseline, threshold:32:3, takes 3 for a batch of 4: 10 tokens in 6.25 ms are
    # 1600 tokens/s. Decided is 5: 12 tokens in 10 ms are 1200 tokens/s, when the baseline would bring 16.
    bench.rule.choice = Choice(
        (TierRange(1, 64, 5),),
        expected_tokens=np.array([4.0, 6.0, 10.0, 12.0]),
        expected_ms=np.array([4.0, 5.0, 6.25, 10.0]),
    )
    for step_id in (1, 2):
        bench.report(session, step_id)
        assert next(decisions).num_steps == 5
    last = bench.engine.state().last_step
    assert last.expected_tokens_per_s == pytest.approx(1200.0)
    assert last.baseline_tokens_per_s == pytest.approx(1600.0)

    def counted(name: str) -> float | None:
        return bench.telemetry.metrics.registry.get_sample_value(name, {"engine": "engine-1"})

    assert counted("specgov_expected_output_tokens_total") == pytest.approx(24.0)
    assert counted("specgov_baseline_output_tokens_total") == pytest.approx(32.0)
    # A rule without a model expects nothing, and the figures stay.
    bench.rule.choice = Choice((TierRange(1, 64, 5),))
    bench.report(session, 3)
    next(decisions)
    assert not bench.engine.state().last_step.HasField("expected_tokens_per_s")
    assert counted("specgov_expected_output_tokens_total") == pytest.approx(24.0)


def test_steps_are_counted_a_few_turns_later_without_being_asked_for(bench: Bench) -> None:
    session, decisions = bench.connect()
    for step_id in range(1, 101):
        bench.report(session, step_id)
        next(decisions)
    tally = bench.engine.tally
    assert tally is not None
    # The stream's thread is at the last turn's decision: what it counts then is at most so many turns behind.
    assert tally.by_tier[3].steps >= 100 - MAX_QUEUED
    decisions.close()  # type: ignore[attr-defined]  # it is a generator: the stream is cut
    assert (
        bench.telemetry.metrics.registry.get_sample_value(
            "specgov_steps_total", {"engine": "engine-1", "tier": "3"}
        )
        == 100
    )
