"""Every rule decides the same behind the real sidecar, client and gRPC as in this process.

In lockstep an engine sends a report and waits for the decision that knows it, so that two runs of one seed
see the same reports as long as the decisions are the same; a first difference shows as such.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from specgov.client import Decision, StreamClient
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.guard import Guard
from specgov.controller.guard.guarded import Guarded
from specgov.env.emulated import EmulatedEngine, EngineStep, Pace, engine_info, run_in_process
from specgov.env.scenario import Scenario, load_scenario
from specgov.policies.registry import make_policy, policy_names
from specgov.policies.types import Choice, Policy, PolicyContext

STEPS = 150
SEED = 5
ENGINE_ID = "engine-of-every-rule"
RANDOMISED = ("thompson", "nightjar", "exp3")


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """Bursts of requests: batches of one to dozens within the steps of the test."""
    return load_scenario("agentic_bursts")


def in_process(
    rule: str, scenario: Scenario, seed: int = SEED, config: GuardConfig | None = None
) -> list[EngineStep]:
    """The steps under ``rule`` in this process, with the generator that a sidecar of ``seed`` makes.

    With ``config`` behind a guard.
    """
    server = scenario.build(1, SEED)
    context = PolicyContext(
        engine=server.config.engine,
        rng=np.random.default_rng([seed, zlib.crc32(ENGINE_ID.encode())]),
        clock=lambda: 0.0,
        step_time=scenario.profile.step_time.with_graph_batch_sizes(server.config.engine.graph_batch_sizes),
    )
    policy: Policy = make_policy(rule, context)
    if config is not None:
        # The sidecar adds the round trip to the lag that the engine names; the simulated server's has it.
        spec = replace(context.engine, decision_lag_steps=context.engine.decision_lag_steps + 1)
        policy = Guarded(policy, Guard(config, ENGINE_ID, replace(context, engine=spec)))
    return list(islice(run_in_process(policy, server), STEPS))


def through_sidecar(target: str, scenario: Scenario) -> list[EngineStep]:
    """The steps of an engine that asks the sidecar at ``target``."""
    server = scenario.build(1, SEED)
    info = engine_info(server, engine_id=ENGINE_ID, boot_id="b", profile=scenario.profile.name)
    client = StreamClient(target, info)
    client.start()
    try:
        engine = EmulatedEngine(server, client, pace=Pace(lockstep=True, speed=None))
        return list(islice(engine.run(), STEPS))
    finally:
        client.close()


def said(followed: Choice | Decision | None) -> tuple[object, ...]:
    """The whole decision, in one form: ranges of batch sizes with their tiers, reason, propensity."""
    assert followed is not None, "a step followed the engine's own rule"
    if isinstance(followed, Choice):
        ranges = [(part.batch_size_min, part.batch_size_max, part.num_steps) for part in followed.ranges]
    else:
        own = (followed.batch_size_min, followed.batch_size_max, followed.num_steps)
        ranges = sorted([own, *(tuple(part) for part in followed.neighbours)])
    return ranges, int(followed.reason), followed.propensity


def applied(steps: list[EngineStep]) -> list[int]:
    return [step.observation.num_steps for step in steps]


@pytest.mark.parametrize("rule", policy_names())
def test_the_same_decisions(rule: str, scenario: Scenario, start: Callable) -> None:
    # Without the guard, which rightly refuses what some of them do here; the next test has it.
    running = start(policy=rule, seed=SEED, ttl_ms=60_000, guard=GuardConfig(enabled=False))
    remote = through_sidecar(running.sidecar.target, scenario)
    local = in_process(rule, scenario)
    state = running.state(ENGINE_ID)
    assert (state.policy, state.policy_failure) == (rule, "")
    assert len(local) == STEPS
    assert applied(remote) == applied(local)
    for there, here in zip(remote, local, strict=True):
        assert said(there.followed) == said(here.followed)
    assert len({step.observation.batch_size for step in local}) > 10
    assert rule == "static" or len(set(applied(local))) > 1


@pytest.mark.parametrize(("rule", "steps_in"), [("greedy", False), ("static:0", True)])
def test_the_same_decisions_behind_the_guard(
    rule: str, steps_in: bool, scenario: Scenario, start: Callable
) -> None:
    """A small allowance, so that the guard refuses a rule that loses."""
    config = GuardConfig(allowance_tokens=200.0)
    running = start(policy=rule, seed=SEED, ttl_ms=60_000, guard=config)
    remote = through_sidecar(running.sidecar.target, scenario)
    local = in_process(rule, scenario, config=config)
    assert applied(remote) == applied(local)
    assert bool(running.state(ENGINE_ID).guard.interventions) is steps_in


@pytest.mark.parametrize("rule", RANDOMISED)
def test_another_seed_decides_otherwise(rule: str, scenario: Scenario) -> None:
    assert applied(in_process(rule, scenario)) != applied(in_process(rule, scenario, SEED + 1))
