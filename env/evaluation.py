"""One condition of a suite, played to all its contenders and seeds at once.

Every (contender, seed) has an environment of its own in one simulated server. Environments with the same
seed get the same requests, arrivals and step noise whoever decides, and an environment's course does not
depend on the others: what one contender brings is the same alone as among many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgov.env.contenders import Contender, Hindsight, make_contender
from specgov.env.decision_lag import DecisionLag
from specgov.env.emulated_reports import padded_batch_size
from specgov.env.evaluation_tally import Tally
from specgov.env.scenario import Scenario
from specgov.env.server import Server, StepResult
from specgov.env.suite import Condition
from specgov.env.tuning import Tuner
from specgov.policies.oracle import best_tiers
from specgov.policies.types import BatchView, Choice, EngineSpec, Policy, StepObservation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Row: TypeAlias = dict[str, Any]
"""A line of a results file: one contender, one condition, one seed."""

EARLIER_EPISODE = 1_000_003
"""Added to the seed for the episode in which a contender ``@learnt`` learns."""
_NEXT_BOOT = 101
"""Added to slot generations after that episode, as the sidecar does when an engine restarts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender and the seed of its requests."""

    contender: Contender
    seed: int


@dataclass
class _Player:
    """A rule in its environment."""

    policy: Policy
    generation_offset: int = 0
    newest: Choice = field(init=False)

    def __post_init__(self) -> None:
        self.newest = self.policy.choose(BatchView(1))

    def learn(self, step: StepObservation) -> None:
        """Hear of a step and decide anew."""
        if self.generation_offset:
            step = replace(step, generations=step.generations + np.uint8(self.generation_offset))
        self.policy.observe(step)
        self.newest = self.policy.choose(BatchView.of(step))


def play(
    condition: Condition, entries: Sequence[Entry], advance: Callable[[float], None] = lambda _: None
) -> list[Row]:
    """What each entry brings, in order; always the same for the same condition and entry.

    Args:
        condition: server and load.
        entries: who plays, with which requests.
        advance: called with the share of the work that is done, 0 to 1.

    Raises:
        ContenderError: a rule cannot take part.
        SimulationError, ScenarioError: the condition cannot be simulated.

    """
    scenario = condition.scenario
    hindsight = _tune(condition, entries)
    seeds = [entry.seed for entry in entries]
    clock = _Clock()
    players = [
        None
        if entry.contender.is_oracle
        else _Player(make_contender(entry.contender, scenario, entry.seed, clock.of(env), hindsight))
        for env, entry in enumerate(entries)
    ]
    learnt = [env for env, entry in enumerate(entries) if entry.contender.has_learnt]
    if learnt:
        pupils = [players[env] for env in learnt]
        earlier = [seeds[env] + EARLIER_EPISODE for env in learnt]
        clock.show(dict(zip(learnt, range(len(learnt)), strict=True)))
        _episode(scenario, earlier, pupils, None, clock, lambda share: advance(0.5 * share))
        for pupil in pupils:
            if pupil is not None:
                pupil.generation_offset = _NEXT_BOOT
    clock.show({env: env for env in range(len(entries))})
    tally = Tally(condition, len(entries))
    begin = 0.5 if learnt else 0.0
    _episode(scenario, seeds, players, tally, clock, lambda share: advance(begin + (1 - begin) * share))
    return [
        {"condition": condition.name, "rule": entry.contender.text, "seed": entry.seed} | tally.row(env)
        for env, entry in enumerate(entries)
    ]


def server_for(scenario: Scenario, seeds: Sequence[int]) -> Server:
    """A server whose environment e has the requests of ``seeds[e]``."""
    server = scenario.build(len(seeds), 0)
    for env, seed in enumerate(seeds):
        server.reset(np.array([env]), seed=seed - env)  # environment e has the key of the seed + e
    return server


def observations(result: StepResult, engine: EngineSpec) -> list[StepObservation | None]:
    """Each environment's step as `observation_of` would give it alone; None where there was none."""
    live = result.live
    bounds = np.searchsorted(live.env, np.arange(len(result.batch_size) + 1)).tolist()
    slots = live.slot.astype(np.uint16)
    kv_use = result.kv_use_ratio.astype(np.float32).tolist()
    step_ms = (np.rint(result.step_ms * 1000) / 1000.0).tolist()
    valid, after_prefill, after_idle = (
        flags.tolist() for flags in (result.step_ms_valid, result.after_prefill, result.after_idle)
    )
    ids, sizes, tiers, contexts, longest, waiting = (
        values.tolist()
        for values in (
            result.step_id,
            result.batch_size,
            result.num_steps,
            result.sum_seq_len_tokens,
            result.max_seq_len_tokens,
            result.waiting_requests,
        )
    )
    seen: list[StepObservation | None] = []
    for env, size in enumerate(sizes):
        if size == 0:
            seen.append(None)
            continue
        mine = slice(bounds[env], bounds[env + 1])
        padded, graph_ran = padded_batch_size(size, engine)
        seen.append(
            StepObservation(
                step_id=ids[env],
                batch_size=size,
                num_steps=tiers[env],
                accepted=live.accepted[mine],
                slots=slots[mine],
                generations=live.generation[mine],
                sum_seq_len_tokens=contexts[env],
                max_seq_len_tokens=longest[env],
                padded_batch_size=padded,
                cuda_graph_ran=graph_ran,
                waiting_requests=waiting[env],
                kv_use_ratio=kv_use[env] if engine.kv_capacity_tokens else None,
                step_ms=step_ms[env] if valid[env] else None,
                after_prefill=after_prefill[env],
                after_idle=after_idle[env],
            )
        )
    return seen


class _Clock:
    """Each contender's simulated time, whichever environment it is in now."""

    def __init__(self) -> None:
        self._env: dict[int, int] = {}
        self.time_ns: Ints = np.zeros(0, np.int64)

    def show(self, env: dict[int, int]) -> None:
        """From now on entry e is in the environment ``env[e]``, at time 0."""
        self._env = env
        self.time_ns = np.zeros(len(env), np.int64)

    def of(self, entry: int) -> Callable[[], float]:
        """The clock of an entry, in s."""

        def now_s() -> float:
            env = self._env.get(entry)
            return 0.0 if env is None else float(self.time_ns[env]) * 1e-9

        return now_s


def _episode(
    scenario: Scenario,
    seeds: Sequence[int],
    players: Sequence[_Player | None],
    tally: Tally | None,
    clock: _Clock,
    advance: Callable[[float], None],
) -> None:
    """Play until every environment has reached the scenario's end; None among the players is the oracle."""
    server, engine = server_for(scenario, seeds), scenario.engine
    tiers, end_ns = np.array(engine.tiers), round(scenario.duration_s * 1e9)
    lag: DecisionLag[list[Choice | None]] = DecisionLag(
        engine.decision_lag_steps, [None if p is None else p.newest for p in players]
    )
    oracles = np.flatnonzero([player is None for player in players])
    num_steps = np.full(len(players), engine.tiers[0])
    playing = (server.time_ns < end_ns) & ~server.exhausted
    while playing.any():
        sizes = server.batch_size.tolist()
        for env, choice in enumerate(lag.due):
            if choice is not None and playing[env]:
                num_steps[env] = choice.num_steps_for(sizes[env])
        truth = server.truth() if tally is not None or oracles.size else None
        if truth is not None and oracles.size:
            best = best_tiers(tiers, truth.expected_tokens[oracles], truth.expected_ms[oracles])
            num_steps[oracles] = best
        result = server.step(num_steps)
        if tally is not None and truth is not None:
            tally.add(result, truth, server.request_ns, playing)
        clock.time_ns = result.time_ns
        playing &= (server.time_ns < end_ns) & ~server.exhausted
        for env, step in enumerate(observations(result, engine)):
            player = players[env]
            if player is not None and step is not None and playing[env]:
                player.learn(step)
        lag.push([None if p is None else p.newest for p in players])
        advance(min(float(result.time_ns.min()) / end_ns, 1.0))


def _tune(condition: Condition, entries: Sequence[Entry]) -> Hindsight:
    """The rules in hindsight that are asked for, on the requests of seed 0."""
    kinds = {e.contender.tuned_kind for e in entries if e.contender.tuned_for == "hindsight"}
    tuner = Tuner([condition.scenario], seed=0)
    found: dict[str, str] = {}
    if "threshold" in kinds:
        found["threshold"] = tuner.threshold().parameters
    if "schedule" in kinds:
        found["schedule"] = tuner.schedule().parameters
    return found
