"""A canary on an engine, and over the wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from fixed_rule import Fixed

from specgov.controller import seat as seat_module
from specgov.controller.config import ServeConfig
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.guard import Verdict
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import check_info
from specgov.policies.types import BatchView, Choice, Policy, PolicyContext, PolicyError, TierRange
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


class Bench:
    """An engine whose policies are ``Fixed``: the policy ``k`` chooses tier k."""

    def __init__(self, make_info: Make, make_report: Make) -> None:
        self.made: list[Fixed] = []
        self.make_info, self.make_report = make_info, make_report
        config = ServeConfig.model_validate({"policy": "static:0", "guard": {"enabled": False}})
        self.engines = Engines(config, clock=lambda: 0.0)
        self.engine = self.connect()
        self.step_id = 0

    def connect(self, **changes: Any) -> Engine:
        session = Session(self.engines, Telemetry(Metrics(), timer=lambda: 0.0))
        info = self.make_info(**changes)
        return self.engines.connect(session, info, check_info(info))[0]

    def step(self, follows: int = 0) -> pb.Decision:
        self.step_id += 1
        self.engine.observe(self.make_report(self.step_id, decision_id=follows))
        decision = self.engine.decide()
        assert decision is not None
        return decision


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, make_info: Make, make_report: Make) -> Bench:
    def make_fixed(text: str, context: PolicyContext, *, files: bool) -> Fixed:
        if text == "none":
            raise PolicyError("unknown policy 'none'")
        return Fixed(int(text.rpartition(":")[2]))

    monkeypatch.setattr(seat_module, "make_policy", make_fixed)
    return Bench(make_info, make_report)


def test_decisions_say_who_made_them_and_how_likely(bench: Bench) -> None:
    bench.engine.start_canary("fixed:3", 0.25, 1)
    decisions = [bench.step() for _ in range(200)]
    assert {(d.num_steps, d.by_candidate, d.propensity) for d in decisions} == {
        (0, False, 0.75),
        (3, True, 0.25),
    }
    bench.engine.seat.stop_canary("stopped on request")
    after = bench.step()
    assert (after.num_steps, after.by_candidate, after.propensity) == (0, False, 1.0)
    assert bench.engine.state().canary.ended == "stopped on request"


@pytest.mark.parametrize(
    ("cause", "propensity"),
    [
        (GuardCause.NONE, {0.5}),
        (GuardCause.BUDGET, {None}),
        (GuardCause.THRASHING, {None}),
        (GuardCause.STALE, {1.0}),  # neither was asked: the baseline decides for certain
    ],
)
def test_what_the_guard_refused_has_no_known_propensity(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, cause: GuardCause, propensity: set[float | None]
) -> None:
    bench.engine.start_canary("fixed:3", 0.5, 1)
    baseline = Choice((TierRange(1, 64, 1),), propensity=1.0)

    def decide(policy: Policy, batch: BatchView) -> Verdict:
        choice = policy.choose(batch)
        return Verdict(baseline if cause else choice, cause)

    monkeypatch.setattr(bench.engine.guard, "decide", decide)
    decisions = [bench.step() for _ in range(20)]
    assert {d.propensity if d.HasField("propensity") else None for d in decisions} == propensity


def test_what_followed_the_decisions_is_compared(bench: Bench) -> None:
    bench.engine.start_canary("fixed:3", 0.5, 2)
    decision = bench.step()
    for _ in range(200):
        decision = bench.step(follows=decision.decision_id)
    canary = bench.engine.state().canary
    # Every step is the same here: 10 tokens in 6.5 ms, whoever decided.
    assert canary.candidate_tokens_per_s == pytest.approx(10 / 0.0065)
    assert canary.difference == pytest.approx(0.0, abs=1e-9)
    assert canary.candidate_blocks + canary.active_blocks in (100, 101)
    assert (canary.policy, canary.share, canary.block_steps) == ("fixed:3", 0.5, 2)


def test_a_new_stream_counts_decisions_anew(bench: Bench) -> None:
    bench.engine.start_canary("fixed:3", 0.5, 64)
    for _ in range(5):
        bench.step()
    bench.connect()
    bench.step(follows=5)  # of the stream before: nobody's
    canary = bench.engine.state().canary
    assert (canary.candidate_blocks, canary.active_blocks) == (0, 0)


def test_the_engines_policy_failing_ends_the_canary(bench: Bench) -> None:
    bench.engine.start_canary("fixed:3", 0.5, 1)
    rule = bench.engine.policy
    assert isinstance(rule, Fixed)
    rule.fails.add("choose")
    assert bench.step().reason == pb.REASON_FALLBACK
    state = bench.engine.state()
    assert state.canary.ended == "the engine's policy was replaced"
    with pytest.raises(PolicyError, match="the engine's own policy failed"):
        bench.engine.start_canary("fixed:3", 0.5, 1)


def test_a_candidate_that_is_promoted_keeps_what_it_learnt(bench: Bench) -> None:
    bench.engine.start_canary("fixed:3", 0.5, 1)
    for _ in range(7):
        bench.step()
    bench.engine.change_policy("fixed:3")
    rule = bench.engine.policy
    assert isinstance(rule, Fixed)
    assert (rule.num_steps, rule.observed) == (3, 7)
    assert bench.engine.state().previous_policy_text == "static:0"


@pytest.mark.parametrize("mode", [pb.MODE_SHADOW, pb.MODE_FROZEN])
def test_in_other_modes_blocks_go_on_and_reasons_stay(bench: Bench, mode: pb.Mode.ValueType) -> None:
    bench.engine.start_canary("fixed:3", 0.5, 1)
    bench.engine.mode = mode
    decisions = [bench.step() for _ in range(50)]
    assert {d.by_candidate for d in decisions} == {True, False}
    assert {d.reason for d in decisions} == {pb.REASON_SHADOW if mode == pb.MODE_SHADOW else pb.REASON_FROZEN}
    assert bench.engine.state().canary.candidate_blocks == 0  # no step followed them


def test_over_the_wire(start: Make) -> None:
    running = start(policy="static:0")
    stream = running.stream()
    admin = running.admin

    def ask(**fields: Any) -> pb.CanaryState:
        request = pb.SetCanaryRequest(**{"engine_id": "engine-1", **fields})
        return admin.SetCanary(request, timeout=60).engine.canary

    began = ask(policy="static:3", share=0.1)
    assert (began.policy, began.share, began.block_steps, began.ended) == ("static:3", 0.1, 64, "")
    assert stream.decision().propensity in (pytest.approx(0.1), pytest.approx(0.9))  # at once
    assert ask().ended == "stopped on request"
    for wrong in (
        {"policy": "static:3", "share": 0.0},
        {"policy": "static:3", "share": 1.0},
        {"policy": "static:3", "share": math.nan},
        {"policy": "static:3", "share": 0.5, "block_steps": 2_000_000},
        {"policy": "static:4", "share": 0.5},
        {"policy": "ppo:/etc", "share": 0.5},
    ):
        with pytest.raises(grpc.RpcError) as raised:
            ask(**wrong)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as raised:
        ask(engine_id="x")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
