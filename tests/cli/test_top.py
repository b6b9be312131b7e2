"""top: what a row says, that it fits its terminal, and that a sidecar may go away and come back."""

from __future__ import annotations

import io
import re
import threading
from typing import Any

import grpc
import pytest
from rich.console import Console

from specgov.controller.cli.top import follow
from specgov.controller.cli.top_state import Row, TopState
from specgov.controller.cli.top_view import plain_lines, screen, short_names
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def engine(engine_id: str, reports: int = 0, **changes: Any) -> pb.EngineState:
    fields: dict[str, Any] = {
        "connected": True,
        "mode": pb.MODE_ACTIVE,
        "policy": "greedy",
        "policy_version": "1",
    }
    info = pb.EngineInfo(engine_id=engine_id, model="m")
    return pb.EngineState(info=info, reports=reports, **{**fields, **changes})


def step(engine_id: str = "e", **changes: Any) -> pb.StepSummary:
    fields: dict[str, Any] = {"step_id": 1, "batch_size": 4, "num_steps": 3, "reason": pb.REASON_POLICY}
    return pb.StepSummary(engine_id=engine_id, **{**fields, **changes})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> TopState:
    return TopState(window_s=10.0, clock=clock)


def only_row(state: TopState) -> Row:
    (row,) = state.rows()
    return row


def test_means_are_over_the_window(state: TopState, clock: Clock) -> None:
    state.listed([engine("e", reports=1000, decision_lag_steps_p50=3.0, reports_dropped=7)])
    state.stepped(step(accept_length=1.0, num_steps=7))  # will be too old
    clock.now_s = 111.0
    # 100 tokens/s for 20 ms and 700 for 10 ms: 2 + 7 tokens in 30 ms are 300 tokens/s.
    state.stepped(step(accept_length=2.0, step_ms=20.0, output_tokens_per_s=100.0, round_trip_ms=0.5))
    state.stepped(step(accept_length=3.0, step_ms=10.0, output_tokens_per_s=700.0, round_trip_ms=1.5))
    state.stepped(step(accept_length=1.0, num_steps=0, batch_size=9, reason=pb.REASON_EXPLORATION))
    state.listed([engine("e", reports=1550, decision_lag_steps_p50=3.0, reports_dropped=7)])
    row = only_row(state)
    assert (row.batch_size, row.num_steps) == (9, 0)
    assert (
        row.accept_length == 2.5
    )  # of the steps that speculate: an accept length of 1 at tier 0 says nothing
    assert (row.step_ms, row.output_tokens_per_s) == (15.0, 300.0)
    assert row.steps_per_s == 50.0  # 550 reports in 11 s
    assert row.round_trip_ms == 1.0
    assert (row.lag_steps, row.reports_lost) == (3.0, 7)
    assert row.tier_shares == ((0, pytest.approx(1 / 3)), (3, pytest.approx(2 / 3)))
    assert row.reason_shares == (("policy", pytest.approx(2 / 3)), ("exploration", pytest.approx(1 / 3)))
    assert row.gain is None


def test_the_gain_is_of_what_the_model_expects(state: TopState) -> None:
    state.listed([engine("e")])
    state.stepped(step(expected_tokens_per_s=110.0, baseline_tokens_per_s=100.0))
    state.stepped(step(expected_tokens_per_s=340.0, baseline_tokens_per_s=300.0))
    state.stepped(step())  # under a rule without a model
    assert only_row(state).gain == pytest.approx(450 / 400 - 1)


def test_a_sidecar_that_was_restarted_counts_from_0(state: TopState, clock: Clock) -> None:
    state.listed([engine("e", reports=5000)])
    clock.now_s += 1
    state.listed([engine("e", reports=10)])
    assert only_row(state).steps_per_s is None
    clock.now_s += 2
    state.listed([engine("e", reports=110)])
    assert only_row(state).steps_per_s == 50.0


def test_engines_that_need_an_eye_come_first_and_forgotten_ones_go(state: TopState) -> None:
    state.stepped(step("a"))
    state.listed([engine("a"), engine("b", connected=False), engine("c", policy_failure="broke")])
    assert [row.engine_id for row in state.rows()] == ["c", "a", "b"]
    state.listed([engine("b")])
    assert [row.engine_id for row in state.rows()] == ["b"]
    state.listed([engine("a")])
    assert only_row(state).batch_size is None  # what was seen of the forgotten one is forgotten too


def full(state: TopState) -> TopState:
    """Engines with every figure at its longest."""
    state.listed(
        [
            engine(f"engine-with-a-long-name-{number}", reports=10, reports_dropped=12345)
            for number in range(3)
        ]
    )
    for number in range(3):
        for reason in (pb.REASON_EXPLORATION, pb.REASON_POLICY, pb.REASON_HOLD, pb.REASON_FALLBACK):
            state.stepped(
                step(
                    f"engine-with-a-long-name-{number}",
                    batch_size=65535,
                    num_steps=32,
                    accept_length=33.0,
                    step_ms=1234.5,
                    output_tokens_per_s=123456.0,
                    expected_tokens_per_s=300.0,
                    baseline_tokens_per_s=100.0,
                    waiting_requests=99999,
                    kv_use_ratio=1.0,
                    reason=reason,
                    round_trip_ms=99.99,
                )
            )
    return state


def drawn(state: TopState, columns: int, lines: int | None = None) -> list[str]:
    """The screen's lines, as a terminal of that size shows them."""
    console = Console(file=io.StringIO(), width=columns, height=50, force_terminal=False)
    console.print(screen(state, "unix:///run/user/1000/specgov/specgov.sock", "12:34:56", columns, lines))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("columns", [80, 81, 100, 110, 123, 124, 130, 150, 179, 180, 200, 300])
def test_each_engine_has_one_line_that_fits(state: TopState, columns: int) -> None:
    lines = drawn(full(state), columns)
    assert len(lines) == 5  # heading, head, three engines: nothing is wrapped
    assert max(map(len, lines)) <= columns
    for shown in ("65535", "32", "33.00", "123456", "+200%", "99.99"):
        assert shown in lines[2], f"{shown} at {columns} columns"


@pytest.mark.parametrize("columns", [80, 110, 124, 150, 180])
def test_there_is_room_to_say_why(state: TopState, columns: int) -> None:
    full(state)
    assert "explore 25" in drawn(state, columns)[2]


def test_long_names_are_told_apart() -> None:
    assert short_names(["short", "names"], 8) == ["short", "names"]
    # Host and port: the end tells them apart.
    assert short_names(["sglang-host0-30000", "sglang-host1-30000", "b"], 12) == [
        "~host0-30000",
        "~host1-30000",
        "b",
    ]
    # The same ends: both ends are shown.
    assert short_names(["eu-sglang-host-30000", "us-sglang-host-30000"], 12) == [
        "eu-sgl~30000",
        "us-sgl~30000",
    ]


def test_80_columns_to_the_letter(state: TopState) -> None:
    state.listed([engine("llama-a", reports=10, decision_lag_steps_p50=3.0)])
    for reason in (*[pb.REASON_POLICY] * 19, pb.REASON_EXPLORATION):
        state.stepped(
            step(
                "llama-a",
                accept_length=2.5,
                step_ms=8.0,
                output_tokens_per_s=1250.0,
                expected_tokens_per_s=107.5,
                baseline_tokens_per_s=100.0,
                round_trip_ms=0.875,
                reason=reason,
            )
        )
    assert drawn(state, 80) == [
        "specgov unix:///run/user/1000/spe~  1/1 engines  1250 tok/s  last 10 s  12:34:56",
        "engine       mode   batch  k accept  tok/s  gain~  lag rt ms reasons, %",
        "llama-a      active     4  3   2.50   1250  +7.5%    3  0.88 policy 95 explore 5",
    ]


def test_more_engines_than_lines(state: TopState) -> None:
    state.listed([engine(f"e{number:02}") for number in range(30)])
    lines = drawn(state, 80, lines=24)
    assert len(lines) <= 24
    assert lines[-1].startswith("and 11 more engines")
    assert sum(line.startswith("e") for line in lines[2:]) == 19


def test_what_is_wrong_is_said(state: TopState, clock: Clock) -> None:
    state.listed(
        [engine("bad\x1b[2J\nname", policy_failure="ArithmeticError: x"), engine("z", connected=False)]
    )
    text = "\n".join(drawn(state, 80))
    assert "bad?[2J?name: policy failed: ArithmeticError: x" in text
    assert "FAILED" in text
    assert "gone" in text
    assert "\x1b[2J" not in text
    state.lost("no sidecar answers at s")
    clock.now_s += 12
    state.lost("no sidecar answers at s")
    assert "no answer for 12 s, trying again: no sidecar answers at s" in "\n".join(drawn(state, 80))
    state.listed([])
    assert "no engine has connected yet" in "\n".join(drawn(state, 80))


def test_a_guard_that_does_not_ask_the_policy_is_said(state: TopState) -> None:
    standing = pb.GuardState(standing_cause=pb.GUARD_CAUSE_ZERO_ACCEPTANCE, clears_after_steps=12)
    idle = pb.GuardState(standing_cause=pb.GUARD_CAUSE_STALE)
    state.listed([engine("a", guard=idle), engine("b", guard=standing)])
    lines = drawn(state, 80)
    assert [line.split()[:2] for line in lines[2:4]] == [["b", "GUARD"], ["a", "active"]]
    assert lines[4:] == ["b: the guard does not ask the policy: zero_acceptance, for 12 steps at least"]
    assert plain_lines(state, "1")[1] == (
        "1  b  the guard does not ask the policy: zero_acceptance, for 12 steps at least"
    )


def test_an_engine_whose_reports_do_not_grow_is_idle(state: TopState, clock: Clock) -> None:
    state.listed([engine("e", reports=5)])
    state.stepped(step())
    for reports, looks_idle in (
        (5, False),
        (5, False),
        (5, True),
        (6, False),
        (6, False),
        (6, False),
        (6, True),
    ):
        clock.now_s += 1.0
        state.listed([engine("e", reports=reports)])
        assert ("idle" in drawn(state, 80)[2]) == looks_idle
    state.lost("gone")  # now nobody knows
    assert "idle" not in drawn(state, 80)[2]


def test_plain_lines(state: TopState) -> None:
    assert plain_lines(state, "12:34:56") == ["12:34:56  no engine has connected yet"]
    (line,) = plain_lines(with_one(state), "12:34:56")
    assert line.startswith("12:34:56  e  model m  policy greedy 1  mode active  batch 4  ")
    assert line.endswith("reasons, % policy 100")


def with_one(state: TopState) -> TopState:
    state.listed([engine("e")])
    state.stepped(step())
    return state


class Sidecar(pb_grpc.ControllerAdminServicer):
    """Lists one engine and shows steps until it is told to end."""

    def __init__(self, watch_limit: bool = False) -> None:
        self.ended = threading.Event()
        self.watch_limit = watch_limit

    def ListEngines(self, request, context):  # noqa: N802
        return pb.ListEnginesResponse(engines=[engine("e1", reports=3)])

    def Watch(self, request, context):  # noqa: N802
        assert request.every_steps == 4
        if self.watch_limit:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "8 watch streams are open")
        context.add_callback(self.ended.set)
        yield step("e1", accept_length=2.5)
        self.ended.wait(60.0)


def test_once_prints_a_table_and_ends(run, serve) -> None:
    ran = run("top", "--once", "--interval-s", "0.2", "--every-steps", "4", "--target", serve(Sidecar()))
    assert (ran.code, ran.err) == (0, "")
    assert re.search(r"^e1 +greedy 1 +active", ran.out, re.MULTILINE)


def test_once_without_a_sidecar_is_exit_code_3(run, tmp_path) -> None:
    ran = run("top", "--once", "--target", f"unix://{tmp_path}/none.sock")
    assert ran.code == 3
    assert "no sidecar answers" in ran.err


@pytest.mark.parametrize(
    "wrong", [("--interval-s", "0"), ("--window-s", "0.5"), ("--every-steps", "-1"), ("--interval-s", "nan")]
)
def test_wrong_options_are_exit_code_2(run, wrong: tuple[str, str]) -> None:
    assert run("top", *wrong).code == 2


class Enough(Exception):  # noqa: N818 it names the event
    """Ends ``follow``, which otherwise goes on for ever."""


def test_a_sidecar_that_goes_away_is_waited_for(serve, tmp_path) -> None:
    state = TopState(10.0, Clock())
    servers: list[grpc.Server] = []
    target = f"unix://{tmp_path}/s.sock"
    seen: list[tuple[str, int]] = []

    def start() -> None:
        from concurrent import futures

        server = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_ControllerAdminServicer_to_server(Sidecar(), server)
        server.add_insecure_port(target)
        server.start()
        servers.append(server)

    def wait() -> None:
        looks = len(seen)
        if looks == 1:
            start()
        elif looks == 3:
            servers.pop().stop(None).wait()
        elif looks >= 5 and not servers:
            start()
        elif looks >= 5 and not state.problem:
            raise Enough
        assert looks < 1000

    def show(shown: TopState) -> None:
        seen.append((shown.problem, len(shown.rows())))

    with pytest.raises(Enough):
        follow(state, target, pb.WatchRequest(every_steps=4), show, wait)
    servers.pop().stop(None).wait()
    problems = [bool(problem) for problem, _ in seen]
    assert problems[0], "there was none at first"
    assert False in problems[1:4], "then there was one"
    assert True in problems[3:], "it went away"
    assert seen[-1] == ("", 1), "and came back"
    assert {rows for _, rows in seen[3:]} == {1}, "what was known stays on the screen"


def test_engines_are_listed_though_steps_cannot_be_followed(serve) -> None:
    state = TopState(10.0, Clock())
    target = serve(Sidecar(watch_limit=True))

    def wait() -> None:
        if state.watch_problem:
            raise Enough

    with pytest.raises(Enough):
        follow(state, target, pb.WatchRequest(every_steps=4), lambda _: None, wait)
    assert state.watch_problem == "8 watch streams are open (RESOURCE_EXHAUSTED)"
    assert "steps cannot be followed, trying again: 8 watch streams" in "\n".join(drawn(state, 80))
