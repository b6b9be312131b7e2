"""Canaries: who decides, with which probability, what is compared, and what ends them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest

from specgov.controller import seat as seat_module
from specgov.controller.canary import Arm, Block, Canary, difference, student_975
from specgov.controller.config import ServeConfig
from specgov.controller.decision import DecisionBuilder
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.guard import Verdict
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import check_info
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    Policy,
    PolicyContext,
    PolicyError,
    Reason,
    StepObservation,
    TierRange,
)
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]
ENGINE = EngineSpec((0, 1, 3, 5), max_running_requests=64)


@dataclass
class Fixed:
    """A rule that chooses one tier with a stated probability, and counts what it sees."""

    name: ClassVar[str] = "fixed"
    version: ClassVar[str] = "1"

    num_steps: int
    propensity: float | None = 1.0
    observed: int = 0
    forgot: int = 0
    fails: set[str] = field(default_factory=set)

    def observe(self, step: StepObservation) -> None:
        if "observe" in self.fails:
            raise ArithmeticError("seen")
        self.observed += 1

    def choose(self, batch: BatchView) -> Choice:
        if "choose" in self.fails:
            raise ArithmeticError("chosen")
        return Choice((TierRange(1, 64, self.num_steps),), Reason.POLICY, self.propensity)

    def forget(self) -> None:
        if "forget" in self.fails:
            raise ArithmeticError("forgotten")
        self.forgot += 1

    def estimates(self) -> dict[str, float]:
        return {"k": float(self.num_steps)}


class Draws:
    """A generator that draws the given numbers, the last one for ever."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]


def make_canary(
    policy: Fixed, candidate: Fixed, share: float = 0.25, block_steps: int = 2, draws: Any = None
) -> Canary:
    builder = DecisionBuilder(ENGINE, candidate, 50, 1000)
    return Canary("candidate", candidate, policy, builder, share, block_steps, draws or Draws(0.9))


def step(tokens: int = 4, ms: float | None = 10.0) -> StepObservation:
    accepted = np.zeros(tokens, np.uint8)
    return StepObservation(1, tokens, 0, accepted, accepted[:0], accepted[:0], 100, 100, step_ms=ms)


NOT_THEIRS, THEIRS = 0.9, 0.1


def test_blocks_are_drawn_and_last() -> None:
    canary = make_canary(Fixed(0), Fixed(3), draws=Draws(NOT_THEIRS, THEIRS, NOT_THEIRS))
    seen = []
    for _ in range(6):
        seen.append(canary.choose(BatchView(4)).num_steps_for(4))
        canary.measure(step(), 0)
    assert seen == [0, 0, 3, 3, 0, 0]


def test_the_share_is_that_of_the_blocks() -> None:
    # Binomial(4000, 0.25): standard deviation 27; the generator is seeded.
    canary = make_canary(Fixed(0), Fixed(3), block_steps=1, draws=np.random.default_rng(1))
    theirs = 0
    for _ in range(4000):
        theirs += canary.by_candidate
        canary.measure(step(), 0)
    assert abs(theirs - 1000) < 3 * 27


@pytest.mark.parametrize(
    ("policy", "candidate", "whose", "expected"),
    [
        (Fixed(0), Fixed(3), NOT_THEIRS, 0.75),
        (Fixed(0), Fixed(3), THEIRS, 0.25),
        (Fixed(3), Fixed(3), NOT_THEIRS, 1.0),
        (Fixed(3), Fixed(3), THEIRS, 1.0),
        (Fixed(3, 0.4), Fixed(3), NOT_THEIRS, 0.75 * 0.4 + 0.25),
        (Fixed(3, 0.4), Fixed(3), THEIRS, 0.75 * 0.4 + 0.25),
        (Fixed(3, 0.4), Fixed(5), NOT_THEIRS, 0.75 * 0.4),
        # The policy might have drawn 5 too, with a probability that it does not tell.
        (Fixed(3, 0.4), Fixed(5), THEIRS, None),
        (Fixed(3, None), Fixed(5), NOT_THEIRS, None),
        (Fixed(3, None), Fixed(3), THEIRS, None),
        (Fixed(3), Fixed(3, None), NOT_THEIRS, None),
    ],
)
def test_propensity(policy: Fixed, candidate: Fixed, whose: float, expected: float | None) -> None:
    found = make_canary(policy, candidate, draws=Draws(whose)).choose(BatchView(4)).propensity
    assert found == (expected if expected is None else pytest.approx(expected))


def test_propensities_are_frequencies() -> None:
    """Over many canaries the chosen tier comes up as often as its propensity says."""
    rng = np.random.default_rng(3)
    chosen = [make_canary(Fixed(0), Fixed(3), share=0.3, draws=rng).choose(BatchView(4)) for _ in range(4000)]
    for tier, expected in ((0, 0.7), (3, 0.3)):
        of_tier = [choice.propensity for choice in chosen if choice.num_steps_for(4) == tier]
        assert of_tier == pytest.approx([expected] * len(of_tier))
        assert abs(len(of_tier) / 4000 - expected) < 3 * math.sqrt(0.21 / 4000)


def test_both_see_every_step_and_forget() -> None:
    policy, candidate = Fixed(0), Fixed(3)
    canary = make_canary(policy, candidate)
    canary.observe(step())
    canary.forget()
    assert (policy.observed, candidate.observed, policy.forgot, candidate.forgot) == (1, 1, 1, 1)
    assert canary.estimates() == {"k": 0.0}


@pytest.mark.parametrize("where", ["observe", "choose", "forget"])
def test_a_candidate_that_fails_ends_the_canary_and_nothing_else(where: str) -> None:
    policy, candidate = Fixed(0), Fixed(3, fails={where})
    canary = make_canary(policy, candidate, draws=Draws(THEIRS))
    canary.observe(step())
    choice = canary.choose(BatchView(4))
    canary.forget()
    assert canary.ended.startswith("the candidate failed: ArithmeticError: ")
    assert (policy.observed, policy.forgot) == (1, 1)
    if where == "choose":
        assert choice.num_steps_for(4) == 0


def test_a_candidate_that_chooses_what_the_engine_lacks_ends_the_canary() -> None:
    canary = make_canary(Fixed(0), Fixed(4), draws=Draws(NOT_THEIRS))
    assert canary.choose(BatchView(4)).num_steps_for(4) == 0
    assert "chose [4]" in canary.ended


def test_a_step_counts_for_the_block_whose_decision_it_followed() -> None:
    canary = make_canary(Fixed(0), Fixed(3), draws=Draws(THEIRS, NOT_THEIRS))
    canary.decided(1)
    canary.measure(step(), 0)  # the engine's own rule
    canary.measure(step(), 1)  # 4 tokens in 10 ms; the next block begins
    canary.decided(2)
    canary.measure(step(tokens=6), 1)  # still follows the first block's decision
    canary.measure(step(tokens=2), 2)
    canary.measure(step(ms=None), 2)  # not timed
    canary.measure(step(), 99)  # not remembered
    state = canary.state()
    assert (state.candidate_blocks, state.active_blocks) == (1, 1)
    assert state.candidate_tokens_per_s == pytest.approx(10 / 0.020)
    assert state.active_tokens_per_s == pytest.approx(2 / 0.010)
    assert not state.HasField("difference")


def arm(*blocks: tuple[float, float]) -> Arm:
    """Blocks of 10 ms with (tokens, batch size before), each after one of rate 1."""
    found = Arm()
    for tokens, batch_size in blocks:
        found.add(Block(False, (0.0, math.log(batch_size)), tokens, 10.0))
    return found


def test_difference_and_interval_by_hand() -> None:
    # All blocks began alike, so that the least squares are means. Candidate: 10 blocks with log rates of
    # log 1.2 -+ 0.1 by turns: residual sum of squares 0.1, over 10 - 3 degrees of freedom and 10 blocks a
    # variance of 0.1 / 7 / 10. Policy: 10 blocks at rate 1, no variance.
    spread = math.exp(0.1)
    candidate = arm(*[(12.0 / spread, 4.0), (12.0 * spread, 4.0)] * 5)
    policy = arm(*[(10.0, 4.0)] * 10)
    half = 2.36462 * math.sqrt(0.1 / 7 / 10)  # 97.5 % quantile of t with 7 degrees of freedom, from tables
    found = difference(candidate, policy)
    assert found is not None
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(1.2 * math.exp(-half) - 1, abs=1e-3)
    assert found.high == pytest.approx(1.2 * math.exp(half) - 1, abs=1e-3)
    assert difference(candidate, arm(*[(10.0, 4.0)] * 9)) is None


def test_the_load_before_a_block_is_no_merit_of_its_policy() -> None:
    # Output goes with the root of the batch size, and the candidate happened to get the larger batches; at
    # each size it is 5 % better.
    candidate = arm(*[(10.5 * math.sqrt(size), size) for size in (16.0, 32.0, 64.0, 128.0)] * 5)
    policy = arm(*[(10.0 * math.sqrt(size), size) for size in (1.0, 2.0, 4.0, 16.0)] * 5)
    found = difference(candidate, policy)
    assert found is not None
    assert found.value == pytest.approx(0.05)
    assert found.high - found.low < 1e-5


@pytest.mark.parametrize(
    ("freedom", "tabulated"), [(7, 2.36462), (10, 2.22814), (30, 2.04227), (120, 1.97993)]
)
def test_students_quantiles(freedom: int, tabulated: float) -> None:
    assert student_975(freedom) == pytest.approx(tabulated, rel=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_interval_covers_the_truth_as_often_as_it_says(share: float) -> None:
    """Loads drift by a factor of ten; the true difference of 3 % lies in 95 % of the intervals."""
    rng, covered, widths, runs = np.random.default_rng(5), 0, [], 400
    for _ in range(runs):
        arms = {True: Arm(), False: Arm()}
        load = np.sin(np.linspace(0, 9, 400)) + np.cumsum(rng.normal(0, 0.05, 400))
        theirs = rng.random(400) < share
        noise = rng.normal(0, 0.1, 400)
        log_rate = load + np.where(theirs, math.log(1.03), 0.0) + noise
        batch = load + rng.normal(0, 0.1, 400)
        ms = 600 * rng.uniform(0.5, 1.5, 400)
        for b in range(1, 400):
            before = (float(log_rate[b - 1]), float(batch[b]))
            block = Block(bool(theirs[b]), before, float(np.exp(log_rate[b]) * ms[b]), float(ms[b]))
            arms[block.by_candidate].add(block)
        found = difference(arms[True], arms[False])
        assert found is not None
        covered += found.low <= 0.03 <= found.high
        widths.append(found.high - found.low)
    assert 0.92 <= covered / runs <= 0.98  # 0.95 within three standard deviations of 400 draws
    # Plain rates scatter by a factor of two or so, which 40 blocks of one arm would average to some 30 %.
    assert np.median(widths) < 0.1


# -- on an engine ----------------------------------------------------------------------------------


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
