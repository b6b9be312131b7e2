"""A network sees in service what it saw in training: through the sidecar the same steps look the same."""

from __future__ import annotations

import time
from typing import ClassVar

import numpy as np
import pytest

from specgov.client.messages import report_to_proto
from specgov.controller.config import ServeConfig
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.seat import Held
from specgov.controller.session import Session
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import check_info
from specgov.env.emulated_reports import engine_info, observation_of, report_of
from specgov.env.simulation import ServingSimulation
from specgov.policies.features import Features, summarise
from specgov.policies.profile import load_profile
from specgov.policies.types import Choice, TierRange
from specgov.proto.v1 import specgov_pb2 as pb


class Recorder:
    """A rule that keeps the observation after every step that the sidecar shows it."""

    name: ClassVar[str] = "recorder"
    version: ClassVar[str] = "1"

    def __init__(self, features):
        self.features = features
        self.observations = []

    def observe(self, step):
        self.features.update(summarise(step))
        self.observations.append(self.features.observation()[0])

    def choose(self, batch):
        return Choice((TierRange(1, 65_535, 0),))

    def forget(self):
        pass

    def estimates(self):
        return {}


@pytest.mark.parametrize("scenario", ["agentic_bursts", "long_context", "moe"])
def test_observations_are_equal_through_client_protocol_and_session(scenario):
    simulation = ServingSimulation(scenario, seed=3)
    info = engine_info(
        simulation.server, engine_id="e", boot_id="b", profile=simulation.scenario.profile.name
    )
    engines = Engines(ServeConfig.model_validate({"guard": {"enabled": False}}), time.monotonic)
    session = Session(engines, Telemetry(Metrics()))
    session.deliver(pb.EngineMessage(info=info))
    recorder = Recorder(Features(check_info(info), load_profile(info.profile).step_time))
    decisions = session.run()
    next(decisions)  # the first one, made before any step
    engines.get("e").seat.resume(Held("recorder", recorder))
    expected = []
    rng = np.random.default_rng(0)
    for _ in range(300):
        outcome = simulation.step(rng.integers(0, len(simulation.tiers), 1))
        expected.append(outcome.observation[0])
        report = report_of(observation_of(outcome.step, simulation.server.config.engine), decision_id=0)
        wire = report_to_proto(report, reports_dropped=0).SerializeToString()
        session.deliver(pb.EngineMessage(report=pb.StepReport.FromString(wire)))
        assert next(decisions).known_step_id == report.step_id  # as an engine does: none waits behind others

    assert len(recorder.observations) == 300
    np.testing.assert_array_equal(recorder.observations, expected)
