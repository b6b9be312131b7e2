from collections import Counter

import numpy as np
import pytest

from specgov.policies.acceptance import AcceptanceConfig
from specgov.policies.cost import CostConfig
from specgov.policies.greedy import Greedy
from specgov.policies.profile import load_profile
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    PolicyContext,
    PolicyError,
    Reason,
    StepObservation,
)

LLAMA = load_profile("h200-llama-3.1-8b").step_time
MOE = load_profile("h200-qwen3-30b-a3b").step_time
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512


def make(engine: EngineSpec, step_time=LLAMA, **options) -> Greedy:  # type: ignore[no-untyped-def]
    return Greedy(
        PolicyContext(engine, np.random.default_rng(0), lambda: 0.0, step_time), Greedy.Config(**options)
    )


def engine(tiers: tuple[int, ...] = (0, 1, 3, 7), **more) -> EngineSpec:  # type: ignore[no-untyped-def]
    return EngineSpec(tiers, GRAPHS, 256, **more)


def play(
    rule: Greedy,
    tiers: tuple[int, ...],
    acceptance: list[float],
    batch_size: int,
    steps: int,
    truth=LLAMA,  # type: ignore[no-untyped-def]
    first: int = 1,
    seed: int = 0,
) -> list[tuple[int, Choice]]:
    """Steps of one batch whose requests accept with ``acceptance``: the tier of each, the choice after it."""
    rng, used = np.random.default_rng(seed), []
    choice = rule.choose(BatchView(batch_size, batch_size * CONTEXT, CONTEXT))
    for step_id in range(first, first + steps):
        num_steps = choice.num_steps_for(batch_size)
        assert num_steps in tiers
        hits = np.cumprod(rng.random((batch_size, len(acceptance))) < acceptance, axis=1)
        ms = float(truth.step_ms(batch_size, num_steps, float(batch_size * CONTEXT)))
        step = StepObservation(
            step_id,
            batch_size,
            num_steps,
            hits[:, :num_steps].sum(1).astype(np.uint8),
            np.arange(batch_size, dtype=np.uint16),
            np.zeros(batch_size, np.uint8),
            batch_size * CONTEXT,
            CONTEXT,
            step_ms=ms * float(np.exp(0.02 * rng.standard_normal())),
        )
        rule.observe(step)
        choice = rule.choose(BatchView.of(step))
        used.append((num_steps, choice))
    return used


def best_tier(tiers: tuple[int, ...], acceptance: list[float], batch_size: int, truth=LLAMA) -> int:  # type: ignore[no-untyped-def]
    lengths = np.concatenate([[1.0], 1 + np.cumsum(np.cumprod(acceptance))])[list(tiers)]
    ms = truth.step_ms(batch_size, np.array(tiers), float(batch_size * CONTEXT))
    return tiers[int(np.argmax(lengths / ms))]


def test_the_first_choice_by_hand() -> None:
    # Before any step: the server's mean 0.7 for everyone but no spread of its own to speak of, and the
    # profile's times. At batch 1 0.7 gives 1, 1.7, 2.533 and 3.137 tokens (spread lowers them a little) in
    # 5.24, 5.37, 5.91 and 6.95 ms: 0.191, 0.317, 0.429, 0.451 a ms, so 7. At batch 256, in 15.9, 22.5, 35.6
    # and 60.7 ms with context: k = 1.
    choice = make(engine()).choose(BatchView(1, CONTEXT, CONTEXT))
    assert choice.num_steps_for(1) == 7
    assert choice.num_steps_for(256) == 1
    assert choice.reason == Reason.POLICY


@pytest.mark.parametrize("tiers", [(0, 1, 3), (0, 1, 2, 3, 5, 7), (1, 3), (0,), (4,)])
@pytest.mark.parametrize("p", [0.01, 0.9])
@pytest.mark.parametrize("batch_size", [4, 200])
def test_the_rate_optimal_tier_is_found(tiers: tuple[int, ...], p: float, batch_size: int) -> None:
    acceptance = [p] * max(max(tiers), 1)
    used = play(make(engine(tiers)), tiers, acceptance, batch_size, 120)
    assert Counter(num_steps for num_steps, _ in used[60:]).most_common(1)[0][0] == best_tier(
        tiers, acceptance, batch_size
    )


@pytest.mark.parametrize("step_time", [None, MOE], ids=["no profile", "another model's profile"])
def test_the_rate_optimal_tier_is_found_cold(step_time) -> None:  # type: ignore[no-untyped-def]
    tiers, acceptance = (0, 1, 3, 7), [0.8] * 7
    assert best_tier(tiers, acceptance, 128) == 3
    used = play(make(engine(tiers), step_time), tiers, acceptance, 128, 200)
    assert Counter(num_steps for num_steps, _ in used[100:])[3] >= 90


def test_a_choice_says_what_each_tier_would_bring() -> None:
    acceptance = [0.8] * 7
    _, choice = play(make(engine()), (0, 1, 3, 7), acceptance, 16, 100)[-1]
    assert choice.expected_tokens is not None
    assert choice.expected_ms is not None
    # 16 requests: 16, 16 * 1.8 and 16 * (1 + 0.8 + 0.64 + 0.512).
    assert choice.expected_tokens[:3] == pytest.approx([16, 28.8, 47.23], rel=0.03)
    assert choice.expected_ms == pytest.approx(
        LLAMA.step_ms(16, np.array([0, 1, 3, 7]), 16.0 * CONTEXT), rel=0.03
    )
    assert choice.propensity == 1.0


def test_ranges_cover_every_batch_size_once() -> None:
    _, choice = play(make(engine()), (0, 1, 3, 7), [0.7] * 7, 64, 20)[-1]
    assert choice.ranges[0].batch_size_min == 1
    assert choice.ranges[-1].batch_size_max == 256
    for left, right in zip(choice.ranges, choice.ranges[1:], strict=False):
        assert right.batch_size_min == left.batch_size_max + 1
        assert right.num_steps != left.num_steps or choice.reason == Reason.EXPLORATION


def test_a_settled_batch_stays_at_its_tier() -> None:
    used = [num_steps for num_steps, _ in play(make(engine()), (0, 1, 3, 7), [0.8] * 7, 64, 600)]
    switches = np.count_nonzero(np.diff(used[200:]))
    assert switches <= 8


def test_tier_0_is_probed_about_as_rarely_as_its_cost_allows() -> None:
    # Useless drafts at batch 64: k = 1 takes 7 % longer than k = 0 and brings nothing, so that at 0.25 % a
    # probe in 28 steps.
    used = play(make(engine()), (0, 1, 3, 7), [0.0] * 7, 64, 700)[200:]
    probes = sum(num_steps > 0 for num_steps, _ in used)
    assert 500 / 60 <= probes <= 500 / 15
    assert {choice.reason for _, choice in used} >= {Reason.POLICY, Reason.EXPLORATION}


def test_probes_are_rarer_where_the_draft_s_cache_goes_cold() -> None:
    probes = {}
    for warm in (True, False):
        rule = make(engine(draft_kv_stays_warm=warm))
        used = play(rule, (0, 1, 3, 7), [0.0] * 7, 64, 700)[200:]
        probes[warm] = sum(num_steps > 0 for num_steps, _ in used)
    assert 0 < probes[False] < probes[True] / 2


def test_tier_0_is_not_probed_where_that_costs_the_draft_s_cache() -> None:
    # Half of the drafts accepted at batch 128 and nothing known of step times: a warm engine tries tier 0.
    used = {}
    for warm in (True, False):
        rule = make(engine(draft_kv_stays_warm=warm), None)
        used[warm] = {num_steps for num_steps, _ in play(rule, (0, 1, 3, 7), [0.5] * 7, 128, 300)}
    assert 0 in used[True]
    assert 0 not in used[False]


def test_a_draft_that_becomes_useful_is_taken_up_from_tier_0() -> None:
    rule, tiers = make(engine()), (0, 1, 3, 7)
    play(rule, tiers, [0.02] * 7, 32, 300)
    used = [num_steps for num_steps, _ in play(rule, tiers, [0.85] * 7, 32, 200, first=301, seed=1)]
    assert best_tier(tiers, [0.85] * 7, 32) == 7
    assert used[:3].count(0) >= 2
    assert Counter(used[120:]).most_common(1)[0][0] == 7


def test_forget_keeps_the_step_times() -> None:
    rule = make(engine(), None)
    play(rule, (0, 1, 3, 7), [0.2] * 7, 16, 200)
    before = rule.model.cost.predict(CONTEXT).copy()
    rule.forget()
    assert rule.model.cost.predict(CONTEXT) == pytest.approx(before)
    assert rule.estimates()["acceptance_1"] == pytest.approx(0.7)


def test_the_same_steps_give_the_same_choices() -> None:
    runs = [play(make(engine(), None), (0, 1, 3, 7), [0.7] * 7, 24, 80) for _ in range(2)]
    assert [choice.ranges for _, choice in runs[0]] == [choice.ranges for _, choice in runs[1]]


def test_memory_multiplies_the_estimators_own() -> None:
    model = make(engine(), memory=0.5).model
    acceptance, cost = AcceptanceConfig(), CostConfig()
    assert model.acceptance.config.request_memory_steps == acceptance.request_memory_steps / 2
    assert model.acceptance.config.anonymous_memory_steps == acceptance.anonymous_memory_steps / 2
    assert model.acceptance.config.server_memory_steps == acceptance.server_memory_steps / 2
    assert model.cost.config.memory_steps == cost.memory_steps / 2


@pytest.mark.parametrize(
    "bad",
    [
        {"margin": 0.02},
        {"margin": -0.1},
        {"probe_every_steps": 0},
        {"blind_steps": 0},
        {"blind_steps": 500},
        {"horizon_steps": -1.0},
        {"blind_cost": 0.0},
        {"memory": 0.0},
        {"memory": 1000.0},
    ],
)
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(PolicyError):
        Greedy.Config(**bad)  # type: ignore[arg-type]
