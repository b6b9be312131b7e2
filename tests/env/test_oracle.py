"""The oracle plays the truth of the step that comes."""

import numpy as np

from specgov.env.emulated import run_in_process
from specgov.env.oracle import oracle_num_steps, truth_of
from specgov.env.scenario import load_scenario
from specgov.policies.oracle import Oracle
from specgov.policies.types import PolicyContext


def test_it_takes_the_best_ratio_of_the_servers_truth() -> None:
    server = load_scenario("moe").build(3, seed=1)
    tiers = np.array(server.config.engine.tiers)
    for _ in range(20):
        truth, chosen = server.truth(), oracle_num_steps(server)
        rates = truth.expected_tokens / truth.expected_ms
        assert np.array_equal(rates.max(axis=1), rates[np.arange(3), np.searchsorted(tiers, chosen)])
        server.step(chosen)


def test_as_a_rule_its_decision_is_of_the_batch_formed_when_it_was_made() -> None:
    server = load_scenario("moe").build(1, seed=1)
    context = PolicyContext(server.config.engine, np.random.default_rng(0), float)
    steps = run_in_process(Oracle(context, truth_of(server)), server)
    told = [int(oracle_num_steps(server)[0])] * server.config.engine.decision_lag_steps
    for _ in range(30):
        step = next(steps)
        assert step.observation.num_steps == told.pop(0)
        told.append(int(oracle_num_steps(server)[0]))
