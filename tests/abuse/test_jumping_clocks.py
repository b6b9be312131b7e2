"""Clocks that jump forward and back: the policies' and guard's (monotonic), and the log's (wall clock)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decision_check import StreamCheck
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.controller.config import DecisionLogConfig, ServeConfig
from specgov.controller.decision_log import DecisionLog
from specgov.controller.engine import Engine
from specgov.controller.validation import check_info
from specgov.env.logged_rows import read_rows
from specgov.proto.v1 import specgov_pb2 as pb

TIERS = (0, 1, 3, 5)
INFO = pb.EngineInfo(engine_id="e", boot_id="b", tiers=TIERS, max_running_requests=64)
CLEAR_STEPS = 64
"""Sound reports after which an alarm ends, by default."""

JUMPS_S = st.floats(-1e9, 1e9) | st.sampled_from([-1e-6, 0.0, 3600.0, -3600.0, 86_400.0 * 365])


class Clock:
    """Seconds that go on by 5 ms, and jump when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def step_under(engine: Engine, clock: Clock, step_id: int) -> pb.Decision:
    clock.now_s += 0.005
    engine.observe(
        pb.StepReport(
            step_id=step_id, batch_size=2, num_steps=3, accepted_drafts=bytes([1, 3]), decision_id=step_id,
            step_time_us=5000, step_time_valid=True,
        )
    )  # fmt: skip
    decision = engine.decide()
    assert decision is not None
    return decision


@pytest.mark.parametrize("policy", ["greedy", "thompson", "nightjar", "threshold:32:3"])
@settings(max_examples=20, derandomize=True, deadline=None)
@given(jumps_s=st.lists(JUMPS_S, max_size=6), early=st.booleans())
def test_whatever_the_clock_does_decisions_hold_and_alarms_end(
    policy: str, jumps_s: list[float], early: bool
) -> None:
    clock, check = Clock(), StreamCheck(TIERS)
    engine = Engine(INFO, check_info(INFO), ServeConfig(policy=policy), clock=clock)
    step_id = 0
    for jump_s in jumps_s:
        for _ in range(1 if early else 40):
            step_id += 1
            assert check.problems(step_under(engine, clock, step_id), step_id) == []
        clock.now_s += jump_s
        decision = engine.decide()  # between the jump and the next report, as a changed mode asks for one
        assert decision is not None
        assert check.problems(decision, step_id) == []
    for _ in range(CLEAR_STEPS + 2):
        step_id += 1
        assert check.problems(step_under(engine, clock, step_id), step_id) == []
    state = engine.state()
    assert state.reports == step_id
    assert state.reports_rejected == 0
    assert state.guard.learning  # no alarm stands


def test_a_clock_that_goes_back_is_an_alarm_and_is_over_after_sound_reports() -> None:
    clock = Clock()
    engine = Engine(INFO, check_info(INFO), ServeConfig(), clock=clock)
    step_under(engine, clock, 1)
    clock.now_s -= 3600.0
    assert step_under(engine, clock, 2).guard_cause == pb.GUARD_CAUSE_CLOCK_STEPPED
    causes = [step_under(engine, clock, step_id).guard_cause for step_id in range(3, 3 + CLEAR_STEPS)]
    assert causes[:-1] == [pb.GUARD_CAUSE_CLOCK_STEPPED] * (CLEAR_STEPS - 1)
    assert causes[-1] == pb.GUARD_CAUSE_UNSPECIFIED


WALL_S = st.floats(0.0, 4e9) | st.sampled_from([0.0, 1.0, 2.0**31, 2.0**32])


@settings(max_examples=30, derandomize=True, deadline=None)
@given(times_s=st.lists(WALL_S, min_size=1, max_size=12), is_parquet=st.booleans())
def test_a_wall_clock_that_jumps_loses_no_row(
    tmp_path_factory: pytest.TempPathFactory, times_s: list[float], is_parquet: bool
) -> None:
    folder = tmp_path_factory.mktemp("log")
    clock = Clock()
    path = folder / ("log.parquet" if is_parquet else "log.jsonl")
    config = DecisionLogConfig(keep_files=100, part_rows=2)
    log = DecisionLog(path, config, wall_clock=clock)
    for number, time_s in enumerate(times_s, start=1):
        clock.now_s = time_s
        log.decided("e", pb.Decision(decision_id=number), pb.MODE_ACTIVE)
        log.flush()
    log.flush(final=True)
    assert log.rows_dropped == 0
    assert rows_in(folder) == list(range(1, len(times_s) + 1))


def rows_in(folder: Path) -> list[int]:
    """The ids of the decisions in all files of a log, or in a folder of parts."""
    files = list(folder.iterdir())
    return sorted(row["decision"]["decision_id"] for _, row in read_rows(files) if row["kind"] == "decision")


def test_a_file_from_the_future_is_not_held_open_for_ever(tmp_path: Path) -> None:
    """The clock stood in 2038 when the file was begun, and was set right: its age can never be reached."""
    clock = Clock()
    clock.now_s = 2.0**31
    log = DecisionLog(tmp_path / "log.jsonl", DecisionLogConfig(rotate_s=100.0), wall_clock=clock)
    log.decided("e", pb.Decision(decision_id=1), pb.MODE_ACTIVE)
    log.flush()
    clock.now_s = 1e9
    log.decided("e", pb.Decision(decision_id=2), pb.MODE_ACTIVE)
    log.flush(final=True)
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert first["time_s"] == 1e9
    assert (tmp_path / "log.jsonl.1").exists()
