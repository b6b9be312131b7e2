"""A rule behind the members that SGLang calls, without SGLang; tests/sglang has the real caller."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from specgov.policies.registry import make_policy
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    Policy,
    PolicyContext,
    PolicyError,
    StepObservation,
    TierRange,
)
from specgov.sglang_plugin.adaptive_policy import AdaptivePolicy


class Recorder:
    """A rule that keeps what it is shown and answers with the tiers that a test gives it."""

    name = "recorder"
    version = "1"

    def __init__(self, answers: list[int] | None = None) -> None:
        self.answers = answers or [3]
        self.steps: list[StepObservation] = []

    def observe(self, step: StepObservation) -> None:
        self.steps.append(step)

    def choose(self, batch: BatchView) -> Choice:
        num_steps = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Choice((TierRange(1, 100, num_steps),))

    def forget(self) -> None:
        pass

    def estimates(self) -> dict[str, float]:
        return {}


class Broken(Recorder):
    def observe(self, step: StepObservation) -> None:
        raise RuntimeError("observe")

    def choose(self, batch: BatchView) -> Choice:
        if batch.batch_size == 2:
            raise RuntimeError("choose")
        return super().choose(batch)


def rule(text: str, engine: EngineSpec) -> Policy:
    return make_policy(text, PolicyContext(engine, np.random.default_rng(0), lambda: 0.0))


def test_the_rule_is_made_with_what_the_server_says() -> None:
    made: list[EngineSpec] = []

    def make(engine: EngineSpec) -> Policy:
        made.append(engine)
        return Recorder()

    policy = AdaptivePolicy(3, [3, 0, 1, 3], make, decision_lag_steps=1, max_running_requests=48)
    assert policy.candidate_steps == [0, 1, 3]
    assert policy.cuda_graph_bs_for_step(3) is None
    policy.set_cuda_graph_bs([8, 1, 4])
    assert made == [EngineSpec((0, 1, 3), (1, 4, 8), 48, decision_lag_steps=1)]
    assert policy.cuda_graph_bs_for_step(3) == [1, 4, 8]


def test_without_cuda_graphs() -> None:
    policy = AdaptivePolicy(3, [0, 3], lambda engine: rule("threshold:4:3", engine))
    policy.set_cuda_graph_bs(None)
    assert policy.cuda_graph_bs_for_step(0) is None
    assert [policy.get_steps_for_batch(batch_size) for batch_size in (0, 1, 3, 4, 500)] == [3, 3, 3, 0, 0]


def test_the_initial_tier_holds_before_the_rule_is_made() -> None:
    policy = AdaptivePolicy(1, [0, 1, 3], lambda engine: rule("static:3", engine))
    assert policy.get_steps_for_batch(1) == 1
    assert policy.on_verify_complete([1], 1) is None


def test_the_server_does_not_start_with_a_rule_that_does_not_fit() -> None:
    policy = AdaptivePolicy(1, [0, 1], lambda engine: rule("static:3", engine))
    with pytest.raises(PolicyError, match="this engine has no tier 3"):
        policy.set_cuda_graph_bs(None)
    with pytest.raises(ValueError, match=r"the server starts with num_steps 5, which is not among \[0, 1\]"):
        AdaptivePolicy(5, [0, 1], lambda engine: rule("static", engine))


@pytest.mark.parametrize("lag", [1, 2])
def test_a_result_is_credited_to_the_tier_that_made_it(lag: int) -> None:
    recorder = Recorder([0, 1, 3, 1])
    policy = AdaptivePolicy(3, [0, 1, 3], lambda engine: recorder, decision_lag_steps=lag)
    policy.set_cuda_graph_bs(None)
    # Overlap: step 2 is launched before the result of step 1 is there.
    for _ in range(lag - 1):
        policy.get_steps_for_batch(2)
    for _ in range(3):
        policy.get_steps_for_batch(2)
        assert policy.on_verify_complete([1, 0], 2) is None
    assert [step.num_steps for step in recorder.steps] == [0, 1, 3]
    assert [step.step_id for step in recorder.steps] == [1, 2, 3]
    assert [list(step.accepted) for step in recorder.steps] == [[1, 0]] * 3
    assert {step.batch_size for step in recorder.steps} == {2}


def test_a_launch_without_a_result_is_soon_forgotten() -> None:
    recorder = Recorder([0, 1, 3, 1])
    policy = AdaptivePolicy(3, [0, 1, 3], lambda engine: recorder, decision_lag_steps=1)
    policy.set_cuda_graph_bs(None)
    policy.get_steps_for_batch(1)  # 0, lost
    policy.get_steps_for_batch(1)
    policy.on_verify_complete([1], 1)
    assert [step.num_steps for step in recorder.steps] == [1]


def test_a_tier_that_was_not_prepared_is_never_applied() -> None:
    policy = AdaptivePolicy(1, [0, 1], lambda engine: Recorder([7]))
    policy.set_cuda_graph_bs(None)
    assert policy.get_steps_for_batch(1) == 1


def test_a_rule_that_fails_is_left_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    for fail in ("choose", "observe"):
        caplog.clear()
        policy = AdaptivePolicy(1, [0, 1, 3], lambda engine: Broken([3]))
        policy.set_cuda_graph_bs(None)
        assert policy.get_steps_for_batch(1) == 3
        if fail == "choose":
            assert policy.get_steps_for_batch(2) == 1
        for _ in range(3):
            assert policy.on_verify_complete([1], 1) is None
        assert policy.get_steps_for_batch(1) == 1
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert [record.getMessage() for record in errors] == [
            "The rule failed; from now on num_steps stays at 1."
        ]
        assert fail in str(errors[0].exc_info)
