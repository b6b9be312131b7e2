"""What was learnt, taken out as plain data and put into a new rule: the rule goes on as if nothing had been.

Some of the steps are at tiers that the rule did not choose; requests come, go, change slots and stay away.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.policies.learnt import Learnt, LearntError, capture, restore
from specgov.policies.profile import load_profile
from specgov.policies.registry import make_policy, policy_names
from specgov.policies.types import BatchView, Choice, EngineSpec, Policy, PolicyContext, StepObservation

ENGINES = (
    EngineSpec((0, 1, 3, 7), (1, 2, 4, 8, 16, 32, 64), max_running_requests=64),
    EngineSpec((0, 2, 5), max_running_requests=300, draft_kv_stays_warm=False),
)
LEARN_NOTHING = {"static", "threshold", "schedule"}
OPTIONS = {"sliding_ucb": "sliding_ucb:window_steps=20", "nightjar": "nightjar:bin_steps=2"}
"""Rules whose default is too long for what they forget or draw to be met in a short test."""


def rule(name: str, engine: EngineSpec, seed: int, profile: bool) -> Policy:
    step_time = load_profile("h200-llama-3.1-8b").step_time if profile else None
    context = PolicyContext(engine, np.random.default_rng(seed), lambda: 0.0, step_time)
    return make_policy(OPTIONS.get(name, name), context)


class Server:
    """Steps of a batch whose requests and size change: every few steps and wildly, or seldom and little."""

    def __init__(self, engine: EngineSpec, seed: int, calm: bool) -> None:
        self._engine, self._rng, self._calm = engine, np.random.default_rng(seed), calm
        self._generations = np.zeros(400, np.uint8)
        self._slots = np.arange(4, dtype=np.uint16)
        self._step_id, self._context = 0, 300
        self._likes_drafts = bool(seed % 2)

    def step(self, choice: Choice) -> StepObservation:
        rng, calm = self._rng, self._calm
        if rng.random() < (0.02 if calm else 0.2):
            size = int(rng.integers(1, min(self._engine.largest_batch_size, 300) + 1))
            self._slots = rng.permutation(400)[:size].astype(np.uint16)
            self._generations[self._slots[: size // 4]] += 1
        live = self._slots[: len(self._slots) if calm or rng.random() < 0.8 else len(self._slots) // 2]
        chosen = choice.num_steps_for(len(self._slots))
        num_steps = chosen if rng.random() < (0.97 if calm else 0.6) else int(rng.choice(self._engine.tiers))
        named = calm or rng.random() < 0.9
        self._step_id += 1 if calm or rng.random() < 0.98 else int(rng.integers(2, 1500))
        self._context = self._context + 1 if calm else int(rng.integers(1, 500))
        noise = rng.normal(2.0 + 0.1 * num_steps, 0.02 if calm else 0.4)
        return StepObservation(
            step_id=self._step_id,
            batch_size=len(self._slots),
            num_steps=num_steps,
            accepted=rng.binomial(num_steps, 0.8 if self._likes_drafts else 0.05, len(live)).astype(np.uint8),
            slots=live if named else live[:0],
            generations=self._generations[live] if named else self._generations[:0],
            sum_seq_len_tokens=self._context * len(self._slots),
            max_seq_len_tokens=500,
            step_ms=None if rng.random() < 0.1 else float(np.exp(noise)),
        )


def play(
    policy: Policy, server: Server, steps: int, choice: Choice | None = None
) -> Iterator[tuple[StepObservation, Choice]]:
    """Steps that follow the rule, from its ``choice`` on, and its choice after each."""
    choice = choice or policy.choose(BatchView(1))
    for _ in range(steps):
        step = server.step(choice)
        policy.observe(step)
        choice = policy.choose(BatchView.of(step))
        yield step, choice


def through_json(captured: Any) -> Any:
    """Arrays stay; all else goes through JSON, as in a file."""
    if isinstance(captured, np.ndarray):
        return captured
    if isinstance(captured, dict):
        return {name: through_json(value) for name, value in captured.items()}
    if isinstance(captured, list) and captured and isinstance(captured[0], dict | list | np.ndarray):
        return [through_json(value) for value in captured]
    return json.loads(json.dumps(captured, allow_nan=False))


def said(choice: Choice) -> tuple[object, ...]:
    estimates = (choice.expected_tokens, choice.expected_ms)
    return (
        choice.ranges,
        choice.reason,
        choice.propensity,
        *(None if values is None else values.tolist() for values in estimates),
    )


@pytest.mark.parametrize("name", policy_names())
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    steps_before=st.integers(1, 120),
    engine=st.sampled_from(ENGINES),
    profile=st.booleans(),
    calm=st.booleans(),
)
def test_a_restored_rule_goes_on_like_the_uninterrupted_one(
    name: str, seed: int, steps_before: int, engine: EngineSpec, profile: bool, calm: bool
) -> None:
    uninterrupted, server = rule(name, engine, seed, profile), Server(engine, seed, calm)
    *_, (_, last) = play(uninterrupted, server, steps_before)
    restored = rule(name, engine, seed + 1, profile)
    if name in LEARN_NOTHING:
        assert not isinstance(uninterrupted, Learnt)
    else:
        assert isinstance(uninterrupted, Learnt)
        assert isinstance(restored, Learnt)
        restore(restored, through_json(capture(uninterrupted)))
    for step, choice in play(uninterrupted, server, 60, last):
        restored.observe(step)
        assert said(restored.choose(BatchView.of(step))) == said(choice)
    assert restored.estimates() == uninterrupted.estimates()
    uninterrupted.forget()
    restored.forget()
    assert said(restored.choose(BatchView(9))) == said(uninterrupted.choose(BatchView(9)))


@pytest.mark.parametrize("name", sorted(set(policy_names()) - LEARN_NOTHING))
def test_what_was_captured_shares_nothing_with_the_rule(name: str) -> None:
    learner = rule(name, ENGINES[0], 1, profile=True)
    server = Server(ENGINES[0], 1, calm=False)
    list(play(learner, server, 30))
    captured = capture(learner)
    before = json.dumps(captured, default=lambda array: array.tolist())
    list(play(learner, server, 60))
    restored = rule(name, ENGINES[0], 2, profile=True)
    restore(restored, captured)
    list(play(restored, server, 60))
    assert json.dumps(captured, default=lambda array: array.tolist()) == before


def damaged(captured: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(captured, default=lambda a: {"a": a.tolist(), "d": str(a.dtype)}))
    copy = json.loads(json.dumps(copy), object_hook=lambda d: np.array(d["a"], d["d"]) if "a" in d else d)
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("_settled",), "x", "Greedy._settled: no int"),
        (("_settled",), True, "Greedy._settled: no int"),
        (("_settled",), None, "Greedy._settled: no int"),
        (("surprise",), 1, "Greedy: other attributes"),
        (("model", "cost", "_mean"), np.zeros(3), r"_mean: shape \(3,\), not"),
        (("model", "cost", "_mean"), [0.0], "_mean: no float64s"),
        (("model", "cost", "_detector"), None, "_detector: other attributes"),
        (("model", "cost", "_pool"), {"cell": [1, 2]}, "_pool: other fields"),
        (("model", "acceptance", "_requests", "_names"), "abc", "_names: no bytes"),
        (("model", "_asked"), [1, 2], "_asked: 2 elements"),
        (("model", "_asked"), 5, "_asked: no sequence"),
        (("_choice", "reason"), 99, "99 is not a valid Reason"),
        (("_choice", "ranges"), [{"batch_size_min": 1}], "ranges: other fields"),
    ],
)
def test_what_does_not_fit_is_refused(path: tuple[str, ...], value: Any, message: str) -> None:
    learner = rule("greedy", ENGINES[0], 1, profile=True)
    list(play(learner, Server(ENGINES[0], 1, calm=False), 10))
    with pytest.raises(LearntError, match=message):
        restore(rule("greedy", ENGINES[0], 1, profile=True), damaged(capture(learner), path, value))


def test_another_engines_or_another_rules_state_is_refused() -> None:
    captured = capture(rule("greedy", ENGINES[0], 1, profile=True))
    for other in (rule("greedy", ENGINES[1], 1, profile=True), rule("thompson", ENGINES[0], 1, profile=True)):
        with pytest.raises(LearntError):
            restore(other, captured)


def test_a_generators_state_must_be_one() -> None:
    captured = capture(rule("thompson", ENGINES[0], 1, profile=True))
    captured["_rng"] = {"bit_generator": "MT19937", "state": {}}
    with pytest.raises(LearntError, match="not the state of this generator"):
        restore(rule("thompson", ENGINES[0], 1, profile=True), captured)


def test_what_cannot_be_captured_is_an_error_of_the_rule() -> None:
    class Odd(Learnt):
        attribute: object

    odd = Odd()
    odd.attribute = object()
    with pytest.raises(TypeError, match="object cannot be captured"):
        capture(odd)
