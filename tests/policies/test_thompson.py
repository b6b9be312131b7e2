from collections import Counter

import numpy as np
import pytest

from specgov.policies.profile import load_profile
from specgov.policies.thompson import Thompson
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
GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TIERS = (0, 1, 3, 7)
CONTEXT = 512


def make(
    seed: int = 0, warm: bool = True, tiers: tuple[int, ...] = TIERS, step_time=LLAMA, **options
) -> Thompson:  # type: ignore[no-untyped-def]
    engine = EngineSpec(tiers, GRAPHS, 256, draft_kv_stays_warm=warm)
    context = PolicyContext(engine, np.random.default_rng(seed), lambda: 0.0, step_time)
    return Thompson(context, Thompson.Config(**options))


def play(
    rule: Thompson, acceptance: float, batch_size: int, steps: int, first: int = 1
) -> list[tuple[int, Choice]]:
    """Steps of one batch whose requests accept with ``acceptance``: the tier of each, the choice after it."""
    rng, used = np.random.default_rng(first), []
    choice = rule.choose(BatchView(batch_size, batch_size * CONTEXT, CONTEXT))
    for step_id in range(first, first + steps):
        num_steps = choice.num_steps_for(batch_size)
        hits = np.cumprod(rng.random((batch_size, 7)) < acceptance, axis=1)
        ms = float(LLAMA.step_ms(batch_size, num_steps, float(batch_size * CONTEXT)))
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


def test_a_tier_is_held_for_an_epoch() -> None:
    # Epochs of 4, 8 and then 16 steps, or of 4 that explore: all ends are multiples of 4.
    played = play(make(), 0.7, 16, 300)
    used = [num_steps for num_steps, _ in played]
    assert set((np.flatnonzero(np.diff(used)) + 1).tolist()) <= set(range(4, 300, 4))
    # What is best by the mean is held for 16 once the first epochs are over: an epoch begins with POLICY or
    # EXPLORATION.
    begins = [step for step, (_, choice) in enumerate(played, 1) if choice.reason != Reason.HOLD]
    lengths = dict(zip(begins, np.diff([*begins, 300]).tolist(), strict=True))
    for step, length in lengths.items():
        explores = played[step - 1][1].reason == Reason.EXPLORATION
        if 28 <= step < 280:
            assert length == (4 if explores else 16)


def test_at_temperature_0_it_follows_the_posterior_mean() -> None:
    # At batch 1 and 0.9 the tiers give 1, 1.9, 3.439 and 5.695 tokens in 5.2, 5.4, 5.9 and 6.9 ms: the
    # largest is best.
    used = play(make(acceptance_temperature=0.0, cost_temperature=0.0), 0.9, 1, 100)
    assert [num_steps for num_steps, _ in used] == [7] * 100
    assert all(choice.reason != Reason.EXPLORATION for _, choice in used)


def test_exploration_falls_as_uncertainty_does() -> None:
    # Over many seeds, the tiers that the first choice takes are more diverse than those after 200 steps.
    first, late = Counter(), Counter()  # type: ignore[var-annotated]
    for seed in range(20):
        rule = make(seed, step_time=None)
        first[rule.choose(BatchView(64, 64 * CONTEXT, CONTEXT)).num_steps_for(64)] += 1
        late[play(rule, 0.8, 64, 200)[-1][0]] += 1
    assert max(late.values()) > max(first.values())
    assert max(late.values()) >= 16


def test_a_useful_draft_is_found_again_from_tier_0() -> None:
    rule = make()
    before = [num_steps for num_steps, _ in play(rule, 0.0, 64, 300)]
    after = [num_steps for num_steps, _ in play(rule, 0.9, 64, 400, first=301)]
    assert Counter(before[150:]).most_common(1)[0][0] == 0
    assert Counter(after[300:]).most_common(1)[0][0] > 0


def test_peeks_from_tier_0_are_single_steps() -> None:
    # Blind for 60 steps, then one step; over 600 steps at most ten, each alone unless an epoch draws the
    # tier.
    used = np.array(
        [
            num_steps
            for num_steps, _ in play(make(acceptance_temperature=0.0, cost_temperature=0.0), 0.0, 64, 700)
        ][100:]
    )
    positive = np.flatnonzero(used > 0)
    assert 5 <= len(positive) <= 10
    assert np.all(np.diff(positive) > 1)


def test_tier_0_is_not_explored_where_that_costs_the_draft_s_cache() -> None:
    # Nothing known of step times, over ten seeds: some draw says tier 0, the mean never does.
    used = {
        warm: {k for seed in range(10) for k, _ in play(make(seed, warm, step_time=None), 0.6, 128, 60)}
        for warm in (True, False)
    }
    assert 0 in used[True]
    assert 0 not in used[False]


def test_the_generator_given_decides() -> None:
    runs = [
        [num_steps for num_steps, _ in play(make(seed, step_time=None), 0.6, 32, 150)] for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_forget_starts_short_epochs_again() -> None:
    rule = make()
    play(rule, 0.7, 16, 200)
    rule.forget()
    assert rule.estimates()["acceptance_1"] == pytest.approx(0.7)
    assert rule.choose(BatchView(16, 16 * CONTEXT, CONTEXT)).reason in (Reason.POLICY, Reason.EXPLORATION)


@pytest.mark.parametrize("tiers", [(0,), (4,), (1, 3)])
def test_engines_with_few_tiers_are_served(tiers: tuple[int, ...]) -> None:
    used = play(make(tiers=tiers), 0.5, 8, 100)
    assert {num_steps for num_steps, _ in used} <= set(tiers)


@pytest.mark.parametrize(
    "bad",
    [
        {"epoch_steps": 2},
        {"first_epoch_steps": 0},
        {"cost_temperature": -1.0},
        {"margin": -0.1},
        {"blind_steps": 0},
    ],
)
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(PolicyError):
        Thompson.Config(**bad)  # type: ignore[arg-type]
