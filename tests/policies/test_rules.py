"""The rules that do not learn, and what every rule promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.policies.registry import make_policy
from specgov.policies.types import (
    MAX_BATCH_SIZE,
    BatchView,
    EngineSpec,
    Policy,
    PolicyContext,
    Reason,
    StepObservation,
)

NO_SLOTS = np.zeros(0, np.uint16)
NO_GENERATIONS = np.zeros(0, np.uint8)
RULES = ("static", "threshold", "schedule", "ema")


def make(text: str, engine: EngineSpec) -> Policy:
    return make_policy(text, PolicyContext(engine, np.random.default_rng(0), lambda: 0.0))


def result(step_id: int, batch_size: int, num_steps: int, accepted: list[int]) -> StepObservation:
    counts = np.array(accepted, np.uint8)
    return StepObservation(step_id, batch_size, num_steps, counts, NO_SLOTS, NO_GENERATIONS, 0, 0)


def ranges(policy: Policy, batch_size: int = 1) -> list[tuple[int, int, int]]:
    found = policy.choose(BatchView(batch_size)).ranges
    return [(r.batch_size_min, r.batch_size_max, r.num_steps) for r in found]


def test_static_is_one_range() -> None:
    assert ranges(make("static:3", EngineSpec((0, 3, 7), max_running_requests=256))) == [(1, 256, 3)]
    assert ranges(make("static", EngineSpec((0, 3, 7)))) == [(1, MAX_BATCH_SIZE, 7)]


def test_threshold_is_two_ranges() -> None:
    engine = EngineSpec((0, 3, 7), max_running_requests=256)
    assert ranges(make("threshold:32:3", engine)) == [(1, 31, 3), (32, 256, 0)]
    assert ranges(make("threshold:32", engine)) == [(1, 31, 7), (32, 256, 0)]
    assert ranges(make("threshold:1:3", engine)) == [(1, 256, 0)]
    assert ranges(make("threshold:256:3", engine)) == [(1, 255, 3), (256, 256, 0)]
    assert ranges(make("threshold:257:3", engine)) == [(1, 256, 3)]
    assert ranges(make("threshold:32:0", engine)) == [(1, 256, 0)]


def test_schedule_joins_equal_neighbours_and_ends_at_the_largest_batch() -> None:
    engine = EngineSpec((0, 1, 3, 7), max_running_requests=100)
    assert ranges(make("schedule:1=7:9=3:65=0", engine)) == [(1, 8, 7), (9, 64, 3), (65, 100, 0)]
    assert ranges(make("schedule:1=7:5=7:9=3:10=7:101=0", engine)) == [(1, 8, 7), (9, 9, 3), (10, 100, 7)]


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        # 1=7:8=3:32=1:64=0, each the nearest tier at or below, else the smallest
        ((0, 1, 3, 7), [(1, 7, 7), (8, 31, 3), (32, 63, 1), (64, 100, 0)]),
        ((0, 2, 4), [(1, 7, 4), (8, 31, 2), (32, 100, 0)]),
        ((2, 5), [(1, 7, 5), (8, 100, 2)]),
    ],
)
def test_the_default_schedule_fits_the_engine(
    tiers: tuple[int, ...], expected: list[tuple[int, int, int]]
) -> None:
    assert ranges(make("schedule", EngineSpec(tiers, max_running_requests=100))) == expected


@pytest.mark.parametrize("name", ["static", "threshold", "schedule"])
def test_rules_that_do_not_learn_are_moved_by_nothing(name: str) -> None:
    policy = make(name, EngineSpec((0, 1, 3)))
    before = policy.choose(BatchView(4))
    for step_id in range(50):
        policy.observe(result(step_id, 4, 3, [0, 0, 0, 0]))
    policy.forget()
    assert policy.choose(BatchView(4)) == before
    assert (before.reason, before.propensity) == (Reason.POLICY, 1.0)
    assert policy.estimates() == {}


engines = st.builds(
    lambda tiers, graphs, largest: EngineSpec((0, *sorted(tiers)), tuple(sorted(graphs)), largest),
    st.sets(st.integers(1, 16), max_size=5),
    st.sets(st.integers(1, 300), max_size=8),
    st.one_of(st.just(0), st.integers(1, 400)),
)
steps = st.lists(st.tuples(st.integers(1, 400), st.lists(st.integers(0, 16), max_size=6)), max_size=60)


@settings(deadline=None)
@given(engines, steps, st.sampled_from(RULES), st.integers(1, 500))
def test_ranges_cover_every_batch_size_once_with_the_engines_tiers(
    engine: EngineSpec, steps: list[tuple[int, list[int]]], name: str, batch_size: int
) -> None:
    fast = ":warmup_batches=0:update_interval=1" if name == "ema" else ""
    policy = make(name + fast, engine)
    for step_id, (size, accepted) in enumerate(steps):
        policy.observe(result(step_id, size, 16, accepted[:size]))
    choice = policy.choose(BatchView(batch_size))
    assert choice.ranges[0].batch_size_min == 1
    assert choice.ranges[-1].batch_size_max == engine.largest_batch_size
    for before, after in zip(choice.ranges, choice.ranges[1:], strict=False):
        assert after.batch_size_min == before.batch_size_max + 1
        assert after.num_steps != before.num_steps
    assert all(r.batch_size_min <= r.batch_size_max for r in choice.ranges)
    assert {r.num_steps for r in choice.ranges} <= set(engine.tiers)
    assert policy.choose(BatchView(batch_size)) == choice
