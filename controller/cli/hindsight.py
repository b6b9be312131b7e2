"""What fixed rules would have made of the same requests: every one of them in one simulated server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specgov.controller.cli.demo_report import StepTrace
from specgov.env.scenario import Scenario
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, EngineSpec, PolicyContext


def static_rules(engine: EngineSpec) -> list[str]:
    """One for each tier."""
    return [f"static:{tier}" for tier in engine.tiers]


def threshold_rules(engine: EngineSpec) -> list[str]:
    """Speculation below each power of two, at each tier that speculates."""
    sizes = [2**power for power in range(1, engine.largest_batch_size.bit_length())]
    return [f"threshold:{size}:{tier}" for tier in engine.tiers if tier > 0 for size in sizes]


def play_fixed_rules(
    scenario: Scenario,
    rules: Sequence[str],
    seed: int,
    duration_s: float,
    advance: Callable[[float], None] = lambda _: None,
) -> list[StepTrace]:
    """Play rules that depend on the batch size alone, each in its own environment, all on the same seed.

    Args:
        scenario: server and load.
        rules: as the registry reads them.
        seed: the environments' one.
        duration_s: simulated time; steps that end later are left out.
        advance: called with the simulated time that every environment has reached.

    """
    server = scenario.build(len(rules), seed)
    for env in range(len(rules)):
        server.reset(np.array([env]), seed=seed - env)  # environment e has the key of the seed + e
    tiers = _tier_tables(rules, scenario.engine)
    every = np.arange(len(rules))
    columns: list[tuple[NDArray[np.int64], ...]] = []
    reached_s = 0.0
    while reached_s < duration_s and not server.exhausted.all():
        result = server.step(tiers[every, server.batch_size])
        columns.append((result.time_ns, result.batch_size, result.num_steps, result.output_tokens))
        reached_s = float(result.time_ns.min()) * 1e-9
        advance(min(reached_s, duration_s))
    end_ns, batch_size, num_steps, tokens = (np.stack(column) for column in zip(*columns, strict=True))
    end_s = end_ns * 1e-9
    traces = []
    for env, rule in enumerate(rules):
        kept = (end_s[:, env] <= duration_s) & (batch_size[:, env] > 0)
        steps = (column[kept, env] for column in (end_s, batch_size, num_steps, tokens))
        traces.append(StepTrace(rule, *steps))
    return traces


def _tier_tables(rules: Sequence[str], engine: EngineSpec) -> NDArray[np.int64]:
    """num_steps by rule and batch size, shape (rules, largest batch size + 1)."""
    context = PolicyContext(engine, np.random.default_rng(0), lambda: 0.0)
    sizes = range(engine.largest_batch_size + 1)
    choices = [make_policy(rule, context).choose(BatchView(1)) for rule in rules]
    return np.array([[choice.num_steps_for(size) for size in sizes] for choice in choices])
