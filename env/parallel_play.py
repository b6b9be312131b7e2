"""Many decision rules on the same requests at once: one simulated server each, all of the same seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgov.env.decision_lag import DecisionLag
from specgov.env.scenario import Scenario
from specgov.env.server import Server, StepResult
from specgov.policies.types import BatchView, Choice, EngineSpec, Policy, StepObservation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NO_SLOTS, _NO_GENERATIONS = np.zeros(0, np.uint16), np.zeros(0, np.uint8)

Decide: TypeAlias = Callable[[Server], Ints]
"""num_steps of every environment's coming step."""
Learn: TypeAlias = Callable[[StepResult], None]


@dataclass(frozen=True, slots=True)
class Played:
    """What rules brought in a given simulated time, shape (N,), and by batch size, shape (N, B + 1).

    ``request_s`` is the time that requests spent in the system, summed over requests; ``tokens_by_batch``
    and ``ms_by_batch`` are the decode steps' alone.
    """

    output_tokens: Floats
    request_s: Floats
    tokens_by_batch: Floats
    ms_by_batch: Floats

    @property
    def score(self) -> Floats:
        """Output tokens a second of a request's time in the system, waiting included, shape (N,).

        With a fixed number of clients that is the output rate over that number; where requests come at
        their own pace, and so bring the same tokens under every rule, it is one over the mean time per
        token.
        """
        return np.asarray(self.output_tokens / np.maximum(self.request_s, 1e-9))


def play_tables(scenario: Scenario, tables: Ints, seed: int, duration_s: float) -> Played:
    """Play rules that depend on the batch size alone.

    Args:
        scenario: server and load.
        tables: num_steps by rule and batch size, shape (N, largest batch size + 1).
        seed: of every environment.
        duration_s: simulated time.

    """
    every = np.arange(len(tables))
    return _play(
        scenario, len(tables), seed, duration_s, lambda server: tables[every, server.batch_size], None
    )


def play_policies(scenario: Scenario, policies: Sequence[Policy], seed: int, duration_s: float) -> Played:
    """Play rules that learn from batch size, tier and accepted drafts, with the engine's decision lag.

    Requests are not told apart and contexts are left out of what the rules see: enough for a rule that
    averages. Rules that need more are played one by one, with `run_in_process`.
    """
    engine = scenario.engine
    first = [policy.choose(BatchView(1)) for policy in policies]
    lag: DecisionLag[list[Choice]] = DecisionLag(engine.decision_lag_steps, first)

    def decide(server: Server) -> Ints:
        sizes = server.batch_size.tolist()
        return np.array([c.num_steps_for(b) for c, b in zip(lag.due, sizes, strict=True)], dtype=np.int64)

    def learn(result: StepResult) -> None:
        newest = list(lag.held())[-1].copy()
        for env, step in enumerate(_observations(result)):
            if step is not None:
                policies[env].observe(step)
                newest[env] = policies[env].choose(BatchView.of(step))
        lag.push(newest)

    return _play(scenario, len(policies), seed, duration_s, decide, learn)


def tier_table(choice: Choice, engine: EngineSpec) -> Ints:
    """num_steps by batch size, shape (largest batch size + 1,); entry 0 is that of batch size 1."""
    table = np.zeros(engine.largest_batch_size + 1, np.int64)
    for tier_range in choice.ranges:
        table[tier_range.batch_size_min : tier_range.batch_size_max + 1] = tier_range.num_steps
    table[0] = table[1]
    return table


def _play(
    scenario: Scenario, count: int, seed: int, duration_s: float, decide: Decide, learn: Learn | None
) -> Played:
    server = scenario.build(count, seed)
    for env in range(count):
        server.reset(np.array([env]), seed=seed - env)  # environment e has the key of the seed + e
    every, end_ns = np.arange(count), duration_s * 1e9
    tokens, request_ns = np.zeros(count), np.zeros(count)
    by_batch = np.zeros((2, count, scenario.engine.largest_batch_size + 1))
    playing = server.time_ns < end_ns
    while playing.any():
        result = server.step(decide(server))
        if learn is not None:
            learn(result)
        gained = np.where(playing, result.output_tokens, 0)
        tokens += gained
        by_batch[0, every, result.batch_size] += gained
        by_batch[1, every, result.batch_size] += np.where(playing, result.step_ms, 0.0)
        request_ns = np.where(playing, server.request_ns, request_ns)
        playing &= (server.time_ns < end_ns) & ~server.exhausted
    return Played(tokens, request_ns * 1e-9, by_batch[0], by_batch[1])


def _observations(result: StepResult) -> list[StepObservation | None]:
    """Each environment's step, None where it made none."""
    bounds = np.searchsorted(result.live.env, np.arange(len(result.batch_size) + 1))
    sizes, tiers, ids = result.batch_size.tolist(), result.num_steps.tolist(), result.step_id.tolist()
    return [
        StepObservation(
            step_id=ids[env],
            batch_size=size,
            num_steps=tiers[env],
            accepted=result.live.accepted[bounds[env] : bounds[env + 1]],
            slots=_NO_SLOTS,
            generations=_NO_GENERATIONS,
            sum_seq_len_tokens=0,
            max_seq_len_tokens=0,
        )
        if size
        else None
        for env, size in enumerate(sizes)
    ]
