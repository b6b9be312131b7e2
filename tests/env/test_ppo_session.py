"""The rule ``ppo`` decides the same through messages, protocol and the sidecar's session as in process."""

from __future__ import annotations

import time

import numpy as np
import pytest

from specgov.client.messages import report_to_proto
from specgov.controller.config import ServeConfig
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import check_info
from specgov.env.emulated_reports import engine_info, observation_of, report_of
from specgov.env.simulation import ServingSimulation
from specgov.policies.profile import load_profile
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, PolicyContext
from specgov.proto.v1 import specgov_pb2 as pb


@pytest.mark.parametrize("scenario", ["agentic_bursts", "moe"])
def test_decisions_are_those_in_process(scenario):
    """Random tiers are played, so that the estimates move; after every report both decide."""
    simulation = ServingSimulation(scenario, seed=5)
    name = simulation.scenario.profile.name
    info = engine_info(simulation.server, engine_id="e", boot_id="b", profile=name)
    step_time = load_profile(name).step_time
    rule = make_policy(
        "ppo", PolicyContext(check_info(info), np.random.default_rng(0), lambda: 0.0, step_time)
    )
    engines = Engines(ServeConfig.model_validate({"policy": "ppo"}), time.monotonic)
    session = Session(engines, Telemetry(Metrics()))
    session.deliver(pb.EngineMessage(info=info))
    decisions = session.run()
    next(decisions)  # the first one, made before any step
    rng = np.random.default_rng(0)
    tiers = set()
    for _ in range(150):
        outcome = simulation.step(rng.integers(0, len(simulation.tiers), 1))
        step = observation_of(outcome.step, simulation.server.config.engine)
        wire = report_to_proto(report_of(step, decision_id=0), reports_dropped=0).SerializeToString()
        session.deliver(pb.EngineMessage(report=pb.StepReport.FromString(wire)))
        decision = next(decisions)
        rule.observe(step)
        choice = rule.choose(BatchView.of(step))
        assert decision.known_step_id == step.step_id
        assert decision.policy == "ppo"
        for size in {1, step.batch_size, 2 * step.batch_size, 256}:
            ranges = [(r.batch_size_min, r.batch_size_max, r.num_steps) for r in decision.neighbours]
            ranges.append((decision.batch_size_min, decision.batch_size_max, decision.num_steps))
            told = [tier for first, last, tier in ranges if first <= size <= last]
            assert told == [choice.num_steps_for(size)]
        tiers.add(decision.num_steps)
    assert len(tiers) > 1
