"""Playing a condition: the same whoever else plays, an oracle that no fixed tier beats, figures by hand."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from specgov.env.contenders import (
    Contender,
    ContenderError,
    PerturbedStepTime,
    known_step_time,
    make_contender,
    other_profile,
)
from specgov.env.emulated import run_in_process
from specgov.env.evaluation import Entry, play
from specgov.env.evaluation_tally import recoveries
from specgov.env.oracle import oracle_num_steps
from specgov.env.suite import Condition, SuiteError, faster, load_suite, parse_suite, suite_names
from specgov.policies.profile import profile_names
from specgov.policies.types import BatchView

SUITE = """
[mine]
about = "Small."
seeds = 2
train_scenarios = ["mixed_classes"]
rules = ["oracle", "static:3"]

[[mine.grids]]
name = "closed"
scenarios = ["mixed_classes"]
time_scale = 0.02
"""


def condition(**fields: object) -> Condition:
    """2.4 s of mixed_classes, some 120 steps."""
    only = parse_suite(SUITE, "suite.toml").conditions[0]
    return dataclasses.replace(only, **fields)


def entries(*rules: str, seeds: int = 1) -> list[Entry]:
    return [Entry(Contender(rule), seed) for rule, seed in itertools.product(rules, range(seeds))]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return play(condition(), entries("oracle", "greedy", "exp3", "static:0", "static:3", "static:7", seeds=2))


def test_a_row_depends_on_its_own_rule_and_seed_alone(rows) -> None:
    alone = play(condition(), [Entry(Contender("exp3"), 1)])
    assert alone == [row for row in rows if (row["rule"], row["seed"]) == ("exp3", 1)]


def test_what_is_counted_is_what_a_run_in_process_brings(rows) -> None:
    """The vectorised play against the emulated engine's own loop, step by step, for a rule that learns."""
    chosen = condition()
    scenario = chosen.scenario
    server = scenario.build(1, 1)
    policy = make_contender(Contender("greedy"), scenario, 1, lambda: float(server.time_ns[0]) * 1e-9)
    tokens, steps, tiers, ttft_ms = 0, 0, [], []
    for step in run_in_process(policy, server):
        tokens += int(step.result.output_tokens[0])
        steps += 1
        tiers.append(step.observation.num_steps)
        done = step.result.finished
        ttft_ms += ((done.first_token_ns - done.arrival_ns) * 1e-6).tolist()
        if server.time_ns[0] >= scenario.duration_s * 1e9:
            break
    row = next(row for row in rows if (row["rule"], row["seed"]) == ("greedy", 1))
    assert (row["output_tokens"], row["steps"], row["finished"]) == (tokens, steps, len(ttft_ms))
    assert row["switches"] == sum(a != b for a, b in itertools.pairwise(tiers))
    assert row["tier_steps"] == {str(tier): tiers.count(tier) for tier in scenario.engine.tiers}
    assert row["ttft_ms"] == pytest.approx(np.mean(ttft_ms), rel=1e-6)
    assert row["output_rate"] == pytest.approx(tokens / row["simulated_s"], rel=1e-6)


def test_the_oracle_decides_by_the_truth_of_the_very_step(rows) -> None:
    server = condition().scenario.build(1, 0)
    tokens = 0
    while server.time_ns[0] < condition().scenario.duration_s * 1e9:
        tokens += int(server.step(oracle_num_steps(server)).output_tokens[0])
    assert next(row for row in rows if row["rule"] == "oracle")["output_tokens"] == tokens


def test_no_static_tier_beats_the_oracle_on_a_stationary_load(rows) -> None:
    """Step by step exactly; in output rate but for chance, which the same requests leave very little of."""
    for row in rows:
        oracle = next(r for r in rows if r["rule"] == "oracle" and r["seed"] == row["seed"])
        assert oracle["efficiency"] == 1.0
        assert row["efficiency"] <= 1.0
        if row["rule"].startswith("static"):
            assert row["output_rate"] <= oracle["output_rate"] * 1.002


def test_learnt_estimates_are_those_of_another_episode() -> None:
    """No profile and few steps: the rule that has been through an episode explores less."""
    cold, learnt, again = play(condition(), entries("greedy@none", "greedy@learnt")) + play(
        condition(), entries("greedy@learnt")
    )
    assert learnt == again
    assert learnt["efficiency"] > cold["efficiency"]


def test_recovery_by_hand() -> None:
    """Windows of 0.25 s. A jump at 1 s; seconds from the window at 1.5 s on are good: 0.5 s. One at 3 s that
    is not recovered from before the end at 4 s: 1 s, and no recovery.
    """
    efficiency = np.array([1.0] * 4 + [0.9] * 2 + [0.99] * 6 + [0.5] * 4)
    assert recoveries((1.0, 3.0), efficiency) == [(0.5, True), (1.0, False)]
    assert recoveries((), efficiency) == []


def test_hindsight_is_tuned_on_the_condition() -> None:
    engine = condition().scenario.table.engine.model_copy(update={"tiers": (0, 1)})
    scenario = condition().scenario
    scenario = dataclasses.replace(scenario, table=scenario.table.model_copy(update={"engine": engine}))
    threshold, *statics = play(
        condition(scenario=scenario), entries("threshold_hindsight", "static:0", "static:1")
    )
    assert threshold["tokens_per_request_s"] >= max(row["tokens_per_request_s"] for row in statics)


def test_tuned_rules_are_those_of_the_profile_or_of_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their tiers at batch size 4: llama's schedule has 1 there, qwen's 3, and so has each's ema."""
    tuned = {
        "h200-llama-3.1-8b": {"schedule": "schedule:1=1", "ema": {"1": {"candidate_steps": [1]}}},
        "h200-qwen3-30b-a3b": {"schedule": "schedule:1=3", "ema": {"1": {"candidate_steps": [3]}}},
    }
    monkeypatch.setattr("specgov.env.contenders.tuned_parameters", lambda profile: tuned[profile])
    for kind in ("schedule", "ema"):
        for suffix, tier in (("tuned", 1), ("moved", 3)):
            contender = Contender(f"{kind}_{suffix}")
            policy = make_contender(contender, condition().scenario, 0, lambda: 0.0)
            assert policy.choose(BatchView(4)).num_steps_for(4) == tier


def test_what_contenders_know() -> None:
    scenario = condition().scenario
    right = scenario.profile.step_time
    assert known_step_time(Contender("greedy"), scenario, 0) is right
    assert known_step_time(Contender("greedy@none"), scenario, 0) is None
    other = known_step_time(Contender("greedy@other"), scenario, 0)
    assert other is not None
    assert other.step_ms(32, 3, 9000) != right.step_ms(32, 3, 9000)
    assert {other_profile(name) for name in profile_names()} == set(profile_names())


def test_cost_errors_are_constant_by_tier_and_as_large_as_they_say() -> None:
    scenario = condition().scenario
    off = known_step_time(Contender("greedy@err20"), scenario, 3)
    assert isinstance(off, PerturbedStepTime)
    ratio = off.step_ms(np.array([1, 8, 200]), 3, 900.0) / scenario.profile.step_time.step_ms(
        np.array([1, 8, 200]), 3, 900.0
    )
    assert ratio == pytest.approx(ratio[0])
    # The relative standard deviation over 2,000 seeds; its standard error is about 0.003.
    ratios = [
        known_step_time(Contender("greedy@err20"), scenario, seed).step_ms(8, 3, 900.0)  # type: ignore[union-attr]
        for seed in range(2000)
    ]
    assert np.std(ratios) / np.mean(ratios) == pytest.approx(0.2, abs=0.015)


@pytest.mark.parametrize("text", ["greedy@never", "nobody", "oracle@none", "ema_hindsight", "static:x"])
def test_contenders_that_there_are_not(text: str) -> None:
    with pytest.raises(ContenderError):
        Contender(text)


def test_a_grid_crosses_its_lists() -> None:
    text = SUITE + 'profiles = ["h200-qwen3-30b-a3b"]\nlag_steps = [1, 20]\ntiers = [[0, 3], [0, 1, 7]]\n'
    text += "switch_ms = 5\nhiccups_per_s = 3\nnoise_scale = [0.0]\ndraft_kv_stays_warm = false\n"
    suite = parse_suite(text, "suite.toml")
    engines = [c.scenario.engine for c in suite.conditions]
    assert [(e.decision_lag_steps, e.tiers) for e in engines] == [
        (1, (0, 3)), (20, (0, 3)), (1, (0, 1, 7)), (20, (0, 1, 7)),
    ]  # fmt: skip
    first = suite.conditions[0]
    assert first.name.endswith(
        "/tiers=0-3,lag_steps=1,switch_ms=5,draft_kv_stays_warm=0,hiccups_per_s=3,noise_scale=0"
    )
    assert first.scenario.server_config().switch_ms == 5
    assert first.scenario.server_config().noise.sigma == 0
    assert first.scenario.server_config().hiccups.per_s == 3
    assert not first.scenario.engine.draft_kv_stays_warm
    assert first.is_training
    assert first.is_closed_loop


def test_a_hurried_script_by_hand() -> None:
    """drift_after_weight_update: shifts at 60 s and, over 60 s, at 90 s of 180; in a tenth of the time."""
    suite = parse_suite(SUITE.replace('["mixed_classes"]', '"drift_after_weight_update"'), "suite.toml")
    full = suite.conditions[0].scenario.table
    table = faster(full, 50 * 0.1)  # the suite has 0.02 already
    assert table.duration_s == pytest.approx(18)
    assert [(s.at_s, s.ramp_s) for s in table.acceptance.shifts] == [
        pytest.approx((6.0, 0.0)), pytest.approx((9.0, 6.0)),
    ]  # fmt: skip
    assert table.classes == full.classes


def test_jumps_of_a_script() -> None:
    """code_by_day_creative_by_night jumps each 60 s of 240 s; both scripts at once, and each counts once."""
    text = SUITE.replace('["mixed_classes"]', '"code_by_day_creative_by_night"')
    assert parse_suite(text, "suite.toml").conditions[0].changes_s == pytest.approx((1.2, 2.4, 3.6))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds = 2", "seeds = 0", "suite.toml:4: mine.seeds"),
        ("time_scale = 0.02", "speed = 2", "suite.toml:11: mine.grids.0.speed"),
        ("[mine]", "[mine", "not TOML"),
        ("time_scale = 0.02", '[[mine.grids]]\nname="closed"\nscenarios="mixed_classes"', "two conditions"),
    ],
)
def test_errors_name_line_and_field(old: str, new: str, said: str) -> None:
    with pytest.raises(SuiteError, match=said):
        parse_suite(SUITE.replace(old, new), "suite.toml")


def test_bundled_suites_are_whole() -> None:
    assert suite_names() == ["quick", "standard"]
    for name in suite_names():
        suite = load_suite(name)
        assert all(any(rule.is_oracle for rule in c.rules) for c in suite.conditions)
        assert {c.is_training for c in suite.conditions} == {True, False}
    assert load_suite("quick").hash != load_suite("standard").hash


def test_a_hash_tells_suites_apart() -> None:
    suite = parse_suite(SUITE, "suite.toml")
    assert suite.hash == parse_suite(SUITE, "other.toml").hash
    assert suite.hash == suite.with_rules(["oracle"]).hash
    assert suite.hash != parse_suite(SUITE + "lag_steps = 9\n", "suite.toml").hash
