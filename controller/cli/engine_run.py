"""An emulated engine on a scenario, played to a sidecar, and what came of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specgov.client import ClientStats, Report, StreamClient
from specgov.controller.cli import remote
from specgov.controller.cli.demo_report import StepTrace
from specgov.env.emulated import EmulatedEngine, EngineStep, Pace, engine_info
from specgov.env.scenario import Scenario
from specgov.proto.v1 import specgov_pb2

CONNECT_S = 5.0
"""How long the engine waits for the first decision before it starts."""


@dataclass
class EngineRun:
    """A run so far: one entry a step, ``end_s`` in simulated seconds.

    ``own_rule_steps`` counts the steps that followed the engine's own rule: no decision was fresh, or it
    was one in mode shadow.
    """

    end_s: list[float] = field(default_factory=list)
    batch_size: list[int] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    round_trips_ms: list[float] = field(default_factory=list)
    own_rule_steps: int = 0
    stats: ClientStats | None = None

    def add(self, step: EngineStep) -> None:
        """Take in one more step."""
        self.end_s.append(float(step.result.time_ns[0]) * 1e-9)
        self.batch_size.append(step.observation.batch_size)
        self.num_steps.append(step.observation.num_steps)
        self.output_tokens.append(int(step.result.output_tokens[0]))
        self.own_rule_steps += step.followed is None

    @property
    def switches(self) -> int:
        """Steps whose tier differs from that of the step before."""
        return int(np.count_nonzero(np.diff(self.num_steps)))

    def recent_rate(self, window_s: float) -> float:
        """Output tokens per second over the last ``window_s`` of simulated time."""
        if not self.end_s:
            return 0.0
        now_s = self.end_s[-1]
        first = int(np.searchsorted(self.end_s, now_s - window_s, side="right"))
        return sum(self.output_tokens[first:]) / min(window_s, now_s)

    def round_trip_ms(self, quantile: float) -> float:
        """Of the time from a report to the decision that knows it; NaN where none was seen."""
        return float(np.quantile(self.round_trips_ms, quantile)) if self.round_trips_ms else float("nan")

    def trace(self, name: str) -> StepTrace:
        """The steps as arrays."""
        columns = (self.batch_size, self.num_steps, self.output_tokens)
        return StepTrace(
            name, np.array(self.end_s), *(np.array(column, dtype=np.int64) for column in columns)
        )


class TimingClient(StreamClient):
    """A client that notes how long it takes from a report to the decision that knows it."""

    round_trips_ms: list[float]
    _last: tuple[int, float] | None = None

    def submit(self, report: Report) -> None:
        """As `StreamClient.submit`."""
        self._note()
        self._last = (report.step_id, time.monotonic())
        super().submit(report)

    def _note(self) -> None:
        """If the newest decision answers the last report, its arrival ends a round trip."""
        decision = self.newest()
        if self._last is None or decision is None or decision.known_step_id != self._last[0]:
            return
        self.round_trips_ms.append(1000.0 * (decision.received_s - self._last[1]))


def run_engine(
    scenario: Scenario,
    target: str,
    pace: Pace,
    *,
    engine_id: str,
    seed: int,
    duration_s: float,
    on_step: Callable[[EngineRun], None],
) -> EngineRun:
    """Play ``duration_s`` of simulated time, or until the load ends.

    Args:
        scenario: server and load.
        target: of a sidecar that serves.
        pace: real time or as fast as possible.
        engine_id: the engine's name at the sidecar.
        seed: of all that chance decides.
        duration_s: simulated time.
        on_step: called after every step.

    """
    server = scenario.build(1, seed)
    info = engine_info(server, engine_id=engine_id, boot_id=uuid.uuid4().hex, profile=scenario.profile.name)
    _describe(info, scenario)
    run = EngineRun()
    client = TimingClient(target, info, tls=remote.tls_files())
    client.round_trips_ms = run.round_trips_ms
    client.start()
    try:
        client.wait_for_step(0, CONNECT_S)  # without a decision the engine begins with its own rule
        for step in EmulatedEngine(server, client, pace=pace).run():
            run.add(step)
            on_step(run)
            if run.end_s[-1] >= duration_s:
                break
    finally:
        client.close()
        run.stats = client.stats()
    return run


def _describe(info: specgov_pb2.EngineInfo, scenario: Scenario) -> None:
    profile = scenario.profile
    info.model, info.draft, info.gpu = profile.model, profile.draft, profile.hardware
    info.tensor_parallel_size = profile.tensor_parallel_size
