"""An engine without a GPU: the simulated server, played to a rule in this process or to a sidecar.

Against a sidecar it uses the real client and real gRPC, in real time or as fast as possible. In lockstep it
waits for the decision on each report, so that a run is exactly reproducible and equals `run_in_process`
with the same rule, seed and lag; otherwise it never waits, as a real engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specgov.client import Decision, StreamClient
from specgov.env.decision_lag import DecisionLag
from specgov.env.emulated_reports import engine_info, observation_of, report_of
from specgov.env.server import Server, SimulationError, StepResult
from specgov.policies.types import BatchView, Choice, EngineSpec, Policy, StepObservation

__all__ = [
    "BelowBatchSize",
    "EmulatedEngine",
    "EmulationError",
    "EngineStep",
    "Pace",
    "engine_info",
    "run_in_process",
]

LOCKSTEP_TIMEOUT_S = 10.0

EngineRule: TypeAlias = Callable[[int], int]
"""The engine's own rule, for when there is no decision: from the batch size to a tier."""

_Followed: TypeAlias = Choice | Decision | None


class EmulationError(RuntimeError):
    """The sidecar did not answer in lockstep; the message says on which step and what to do."""


@dataclass(frozen=True, slots=True)
class BelowBatchSize:
    """An engine's own rule: up to ``num_steps`` below ``batch_size`` requests, else the smallest tier."""

    engine: EngineSpec
    batch_size: int = 32
    num_steps: int = 3

    def __call__(self, batch_size: int) -> int:
        """The tier for ``batch_size`` requests."""
        tiers = self.engine.tiers
        if batch_size >= self.batch_size:
            return tiers[0]
        return max((tier for tier in tiers if tier <= self.num_steps), default=tiers[0])


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A step: what the engine reports, what it followed, and everything that the simulation knows of it.

    ``followed`` is None where the step followed the engine's own rule; ``result`` is of one environment.
    """

    observation: StepObservation
    followed: Choice | Decision | None
    result: StepResult


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an emulated engine runs.

    Attributes:
        lockstep: wait for the decision on each report.
        speed: simulated seconds a second; None = as fast as possible.
        clock: seconds, monotonic.
        sleep: waits for the given number of seconds.

    """

    lockstep: bool = False
    speed: float | None = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        if self.speed is not None and not self.speed > 0:
            raise SimulationError(f"speed is {self.speed}: it must be above 0, or None for no pacing")


def run_in_process(
    policy: Policy, server: Server, *, engine_rule: EngineRule | None = None
) -> Iterator[EngineStep]:
    """Play ``server`` to a rule in this process, step by step until its workload ends.

    A decision that knows step s applies to step s + ``decision_lag_steps`` of the server's engine. The
    first steps follow what the rule chooses before it has seen any.

    Args:
        policy: the rule; it keeps what it learns.
        server: one environment, fresh or reset.
        engine_rule: for parity with `EmulatedEngine`; a rule in this process always decides.

    """
    engine = server.config.engine

    def decide(step: EngineStep) -> Choice:
        policy.observe(step.observation)
        return policy.choose(BatchView.of(step.observation))

    first = policy.choose(BatchView(batch_size=1))
    return _play(server, engine_rule or BelowBatchSize(engine), first, decide)


class EmulatedEngine:
    """Plays a server to a sidecar.

    Args:
        server: one environment, fresh or reset.
        client: made with `engine_info`; the caller starts and closes it.
        engine_rule: what the engine does without a decision.
        pace: real time by default.

    """

    def __init__(
        self,
        server: Server,
        client: StreamClient,
        *,
        engine_rule: EngineRule | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._server = server
        self._client = client
        self._pace = pace or Pace()
        self._rule = engine_rule or BelowBatchSize(server.config.engine)
        self._lag_steps = server.config.engine.decision_lag_steps
        self._start_s = 0.0

    def run(self) -> Iterator[EngineStep]:
        """Steps until the workload ends, each one yielded when its report is sent and its time is over.

        Raises:
            EmulationError: in lockstep, when the sidecar does not answer.

        """
        first = self._await_decision(0) if self._pace.lockstep else self._client.current(1)
        self._start_s = self._pace.clock() - self._paced_s(self._server.time_ns)
        return _play(self._server, self._rule, first, self._report_and_read)

    def _report_and_read(self, step: EngineStep) -> Decision | None:
        self._wait_until(self._start_s + self._paced_s(step.result.time_ns))
        decision_id = step.followed.decision_id if isinstance(step.followed, Decision) else 0
        self._client.submit(report_of(step.observation, decision_id))
        step_id = step.observation.step_id
        if self._pace.lockstep:
            return self._await_decision(step_id)
        return self._client.current(step_id + self._lag_steps)

    def _await_decision(self, step_id: int) -> Decision:
        decision = self._client.wait_for_step(step_id, LOCKSTEP_TIMEOUT_S)
        if decision is None:
            raise EmulationError(
                f"no decision that knows step {step_id} came within {LOCKSTEP_TIMEOUT_S:g} s (client: "
                f"{self._client.stats().last_error or 'none'}): is the sidecar running and its mode "
                "active? Without lockstep the engine goes on with its own rule"
            )
        return decision

    def _paced_s(self, time_ns: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
        return 0.0 if self._pace.speed is None else float(time_ns[0]) * 1e-9 / self._pace.speed

    def _wait_until(self, due_s: float) -> None:
        left_s = due_s - self._pace.clock()
        if self._pace.speed is not None and left_s > 0:
            self._pace.sleep(left_s)


def _play(
    server: Server, rule: EngineRule, first: _Followed, decide: Callable[[EngineStep], _Followed]
) -> Iterator[EngineStep]:
    """The engine's loop: what is due decides the step, and ``decide`` says what follows from its result."""
    if server.n_envs != 1:
        raise SimulationError(f"an emulated engine plays one environment, and the server has {server.n_envs}")
    lag: DecisionLag[_Followed] = DecisionLag(server.config.engine.decision_lag_steps, first)
    return _steps(server, rule, lag, decide)


def _steps(
    server: Server,
    rule: EngineRule,
    lag: DecisionLag[_Followed],
    decide: Callable[[EngineStep], _Followed],
) -> Iterator[EngineStep]:
    while not server.exhausted[0]:
        batch_size = int(server.batch_size[0])
        followed = lag.due
        num_steps = None if followed is None else followed.num_steps_for(batch_size)
        if num_steps is None:
            followed, num_steps = None, rule(batch_size)
        result = server.step(np.array([num_steps]))
        step = EngineStep(observation_of(result, server.config.engine), followed, result)
        lag.push(decide(step))
        yield step
