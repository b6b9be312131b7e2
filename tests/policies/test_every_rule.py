"""What every rule in the registry promises, whatever the engine reports."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.policies.profile import load_profile
from specgov.policies.registry import make_policy, policy_names
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    Policy,
    PolicyContext,
    PolicyError,
    StepObservation,
)

STEPS = 60
ENGINES = (
    EngineSpec((0, 1, 3, 7), (1, 2, 4, 8, 16, 32, 64), max_running_requests=256, kv_capacity_tokens=10_000),
    EngineSpec((0, 3), max_running_requests=48, draft_kv_stays_warm=False),
    EngineSpec((1, 2, 5), (8, 16), decision_lag_steps=1),
    EngineSpec((0,), max_running_requests=1),
    EngineSpec((4,), max_running_requests=7),
)


def rule_on(name: str, engine: EngineSpec, seed: int, profile: bool = False) -> Policy:
    step_time = load_profile("h200-llama-3.1-8b").step_time if profile else None
    context = PolicyContext(engine, np.random.default_rng(seed), lambda: 0.0, step_time)
    try:
        return make_policy(name, context)
    except PolicyError as error:
        pytest.skip(f"not for this engine: {error}")


def random_step(
    rng: np.random.Generator, step_id: int, engine: EngineSpec, num_steps: int
) -> StepObservation:
    """Anything that the sidecar's validation lets through."""
    batch_size = int(rng.integers(1, min(engine.largest_batch_size, 300) + 1))
    live = int(rng.integers(0, batch_size + 1))
    known = rng.random() < 0.7
    use_all = rng.random() < 0.2
    return StepObservation(
        step_id=step_id,
        batch_size=batch_size,
        num_steps=num_steps,
        accepted=np.full(live, num_steps, np.uint8)
        if use_all
        else rng.integers(0, num_steps + 1, live).astype(np.uint8),
        slots=np.arange(live, dtype=np.uint16) if known else np.zeros(0, np.uint16),
        generations=rng.integers(0, 3, live).astype(np.uint8) if known else np.zeros(0, np.uint8),
        sum_seq_len_tokens=int(rng.integers(0, 100_000)),
        max_seq_len_tokens=int(rng.integers(0, 100_000)),
        padded_batch_size=int(rng.choice([0, batch_size])),
        cuda_graph_ran=[None, False, True][rng.integers(3)],
        waiting_requests=int(rng.integers(0, 50)),
        kv_use_ratio=None if rng.random() < 0.5 else float(rng.random()),
        step_ms=None if rng.random() < 0.3 else float(np.exp(rng.normal(2.5, 1.5))),
        after_prefill=bool(rng.random() < 0.1),
        after_idle=bool(rng.random() < 0.1),
    )


def check(choice: Choice, engine: EngineSpec) -> None:
    ranges = choice.ranges
    assert ranges[0].batch_size_min == 1
    assert ranges[-1].batch_size_max == engine.largest_batch_size
    assert all(a.batch_size_max + 1 == b.batch_size_min for a, b in pairwise(ranges))
    assert all(r.batch_size_min <= r.batch_size_max for r in ranges)
    assert {r.num_steps for r in ranges} <= set(engine.tiers)
    assert choice.propensity is None or 0 < choice.propensity <= 1
    for estimate in (choice.expected_tokens, choice.expected_ms):
        assert estimate is None or (estimate.shape == (len(engine.tiers),) and np.isfinite(estimate).all())


def play(policy: Policy, engine: EngineSpec, seed: int) -> list[Choice]:
    """Random steps; half of them at the tier that the rule chose, the others at any."""
    rng = np.random.default_rng(seed)
    choices = [policy.choose(BatchView(1))]
    for step_id in range(1, STEPS + 1):
        step = random_step(rng, step_id, engine, int(rng.choice(engine.tiers)))
        if rng.random() < 0.5:
            num_steps = choices[-1].num_steps_for(step.batch_size)
            step = random_step(rng, step_id, engine, num_steps)
        policy.observe(step)
        choices.append(policy.choose(BatchView.of(step)))
        if rng.random() < 0.02:
            policy.forget()
    return choices


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: "-".join(map(str, engine.tiers)))
@pytest.mark.parametrize("name", policy_names())
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_choices_are_valid_on_any_sequence(name: str, engine: EngineSpec, seed: int) -> None:
    policy = rule_on(name, engine, seed)
    for choice in play(policy, engine, seed):
        check(choice, engine)
    assert all(np.isfinite(value) for value in policy.estimates().values())


@pytest.mark.parametrize("name", policy_names())
def test_the_same_seed_gives_the_same_choices(name: str) -> None:
    engine = ENGINES[0]
    first, second = (play(rule_on(name, engine, 5, profile=True), engine, 5) for _ in range(2))
    assert [c.ranges for c in first] == [c.ranges for c in second]
    assert [(c.reason, c.propensity) for c in first] == [(c.reason, c.propensity) for c in second]


@pytest.mark.parametrize("name", policy_names())
def test_a_batch_of_nothing_is_no_error(name: str) -> None:
    engine = ENGINES[0]
    policy = rule_on(name, engine, 0)
    check(policy.choose(BatchView(0)), engine)
    check(policy.choose(BatchView(100_000, 10**9, 10**6)), engine)
