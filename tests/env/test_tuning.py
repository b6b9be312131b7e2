"""Tuning finds what must be best where that is plain, and never less than what it began with."""

import numpy as np
import pytest

from specgov.env.emulated import run_in_process
from specgov.env.parallel_play import play_policies, play_tables, tier_table
from specgov.env.scenario import Scenario, load_scenario, parse_scenario
from specgov.env.tuning import Tuner, TuningError
from specgov.policies.ema import Ema
from specgov.policies.ema_config import EmaConfig
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, PolicyContext

TEXT = """
[plain]
tests = "One kind of request, four clients."
duration_s = 1
engine = {{ max_running_requests = 8, tiers = [0, 1, 3] }}
arrivals = {{ kind = "closed", concurrency = 4 }}
[[plain.classes]]
conditional_acceptance = [{0}, {0}, {0}]
prompt = {{ median_tokens = 100, sigma = 0.1, max_tokens = 200 }}
output = {{ median_tokens = 200, sigma = 0.1, max_tokens = 400 }}
"""


def plain(acceptance: float) -> Scenario:
    return parse_scenario(TEXT.format(acceptance), "a test")


def context(scenario: Scenario) -> PolicyContext:
    return PolicyContext(scenario.engine, np.random.default_rng(0), lambda: 0.0)


def test_drafts_that_are_never_accepted_are_not_made() -> None:
    tuner = Tuner([plain(0.001)])
    assert tuner.threshold().parameters == "threshold:1"
    assert tuner.schedule().parameters == "schedule:1=0"
    document = tuner.ema().parameters  # SGLang's rule probes a positive tier wherever a slot has one
    assert document["3"] == {"candidate_steps": [0]}  # four clients: the slot of batches 3 and 4


def test_drafts_that_are_always_accepted_are_made_to_the_full() -> None:
    tuner = Tuner([plain(0.999)])
    assert tuner.threshold().parameters == "threshold:6:3"  # B: above four clients, the first of equals
    assert tuner.schedule().parameters == "schedule:1=3"


def test_a_schedule_is_at_least_as_good_as_any_static_tier_and_the_ema_as_the_schedule() -> None:
    tuner = Tuner([load_scenario("moe")], 3, 2.0)
    schedule, ema = tuner.schedule(), tuner.ema()
    assert schedule.score >= tuner.scores([f"static:{tier}" for tier in tuner.engine.tiers]).max()
    assert schedule.score == pytest.approx(float(tuner.scores([schedule.parameters])[0]), abs=1e-12)
    assert ema.score == pytest.approx(float(tuner.ema_scores([ema.parameters])[0]), abs=1e-12)
    assert tuner.schedule() == schedule


def test_what_cannot_be_tuned_on() -> None:
    with pytest.raises(TuningError, match="no scenario"):
        Tuner([])
    with pytest.raises(TuningError, match="different tiers"):
        Tuner([plain(0.5), load_scenario("moe")])
    text = TEXT.replace("[0, 1, 3]", "[1, 3]").format(0.5)
    with pytest.raises(TuningError, match="needs tier 0"):
        Tuner([parse_scenario(text, "a test")]).threshold()


def test_rules_played_together_fare_as_each_alone() -> None:
    scenario = load_scenario("drift_after_weight_update")
    together = play_policies(scenario, [Ema(context(scenario), EmaConfig()) for _ in range(2)], 4, 1.0)
    tokens = 0
    for step in run_in_process(Ema(context(scenario), EmaConfig()), scenario.build(1, 4)):
        tokens += int(step.result.output_tokens[0])
        if step.result.time_ns[0] >= 1e9:
            break
    # A step counts if the time before it, prefill included, had not reached the end.
    last = int(step.result.output_tokens[0])
    assert together.output_tokens.tolist() in ([tokens] * 2, [tokens - last] * 2)


def test_with_a_fixed_number_of_clients_the_score_is_the_output_rate_over_it() -> None:
    scenario = plain(0.5)
    table = tier_table(make_policy("static:1", context(scenario)).choose(BatchView(1)), scenario.engine)
    played = play_tables(scenario, table[None], 0, 1.0)
    server = scenario.build(1, 0)
    while server.time_ns[0] < 1e9:
        server.step(np.array([1]))
    assert played.request_s[0] == pytest.approx(4 * server.time_ns[0] * 1e-9)
    assert played.ms_by_batch[0].sum() <= server.time_ns[0] * 1e-6
    assert played.tokens_by_batch[0].sum() == played.output_tokens[0]


def test_sglangs_options_come_out_of_a_document() -> None:
    document = {"1": {"candidate_steps": [1, 3], "up_hysteresis": 0.25}, "ema_alpha": 0.05}
    (slot,) = EmaConfig.from_document(document).table
    assert (slot.tiers, slot.up_hysteresis, slot.ema_alpha) == ((1, 3), 0.25, 0.05)
