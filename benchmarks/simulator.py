"""How fast the simulator is, and what it costs in memory.

    python benchmarks/simulator.py -o out/simulator.json [--quick] [--markdown PAGE.md] [--plot FILE.svg]

One process on one core. The physics alone (``Server.step`` with random tiers) against the number of
environments and against the requests that run in each; then what trains a policy: physics, observation and
reward (``ServingSimulation``), and the gymnasium environments, single and vectorised. A decision is one
step of one environment. The rate is per second of the process's own CPU time, so that it does not count
when others have the core; they still slow it down through caches and shared units.

In the physics runs every environment is a closed loop, so that the mean number of running requests is what
is asked for, on the bundled Llama 8B profile, with a KV capacity that is never reached, three classes of
requests and lognormal lengths (medians 300 and 250 tokens). A figure is the median of repeated runs, and
the fastest stands beside it. Memory is what the objects hold after a few steps, as counted by tracemalloc
in another run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
from simulator_report import figure, markdown, write_markdown

from specgov.controller import plot
from specgov.env.acceptance import AcceptanceModel
from specgov.env.acceptance_classes import CHAT, CODE, MATHS
from specgov.env.lengths import ClassMix, LogNormalLength, LogNormalLengths
from specgov.env.scenario import load_scenario
from specgov.env.server import Server, ServerConfig
from specgov.env.serving import ServingEnv
from specgov.env.simulation import ServingSimulation
from specgov.env.vector import ServingVectorEnv
from specgov.env.workload import ClosedLoop, RequestMix
from specgov.policies.profile import load_profile
from specgov.policies.types import EngineSpec

PROFILE = "h200-llama-3.1-8b"
SCENARIO = "mixed_classes"
SLOTS = 256
ENVS = (1, 4, 16, 64, 256, 1024, 4096)
OCCUPANCY = 32
OCCUPANCIES = (1, 4, 16, 32, 64, 128, 256)
MANY = 1024
WARM_UP_STEPS = 60
CLASSES = (CHAT, MATHS, CODE)


@dataclass(frozen=True)
class Plan:
    """How long to measure: ``repeats`` runs of ``seconds`` each, all in one process."""

    repeats: int = 7
    seconds: float = 1.0


@dataclass(frozen=True)
class Speed:
    """Decisions a CPU second, of ``envs`` environments with a mean of ``occupancy`` running requests."""

    what: str
    envs: int
    occupancy: float
    decisions_per_s: float
    decisions_per_s_best: float
    memory_mib: float


def server(n_envs: int, occupancy: int) -> Server:
    """Closed loops of ``occupancy`` requests."""
    profile = load_profile(PROFILE)
    mix = RequestMix(
        ClassMix(np.zeros(1), np.full((1, len(CLASSES)), 1 / len(CLASSES))),
        LogNormalLengths(
            [LogNormalLength(300, 0.6, 16, 2048)] * len(CLASSES),
            [LogNormalLength(250, 0.5, 16, 1024)] * len(CLASSES),
        ),
    )
    engine = EngineSpec(profile.tiers, profile.graph_batch_sizes, SLOTS, kv_capacity_tokens=4_000_000)
    config = ServerConfig(engine, profile.step_time, AcceptanceModel(CLASSES), profile.noise, profile.prefill)
    return Server(config, ClosedLoop(mix, [0.0], [occupancy]), n_envs, seed=0)


def physics(n_envs: int, occupancy: int) -> Callable[[], float]:
    """Makes a step; returns the mean occupancy in it."""
    simulated, tiers = server(n_envs, occupancy), random_tiers(n_envs, load_profile(PROFILE).tiers)
    return lambda: float(simulated.step(next_of(tiers)).batch_size.mean())


def simulation(n_envs: int) -> Callable[[], float]:
    """Physics, observation and reward; an episode that ends begins again."""
    simulated = ServingSimulation(SCENARIO, n_envs, duration_s=1e6)
    actions = random_tiers(n_envs, tuple(range(simulated.n_actions)))

    def step() -> float:
        outcome = simulated.step(next_of(actions))
        return float(outcome.step.batch_size.mean())

    return step


def vector_environment(n_envs: int, truth: bool) -> Callable[[], float]:
    """``ServingVectorEnv.step``."""
    environment = ServingVectorEnv(n_envs, SCENARIO, duration_s=1e6, truth=truth)
    environment.reset(seed=0)
    actions = random_tiers(n_envs, tuple(range(environment.simulation.n_actions)))
    return lambda: float(environment.step(next_of(actions))[4]["running_requests"].mean())


def single_environment(truth: bool) -> Callable[[], float]:
    """``ServingEnv.step``."""
    environment = ServingEnv(SCENARIO, duration_s=1e6, truth=truth)
    environment.reset(seed=0)
    actions = random_tiers(1, tuple(range(environment.simulation.n_actions)))
    return lambda: float(environment.step(next_of(actions)[0])[4]["running_requests"])


def random_tiers(n_envs: int, values: tuple[int, ...]) -> dict[str, Any]:
    """A cycle of random choices, so that drawing them is not measured."""
    return {"rows": np.random.default_rng(0).choice(values, (64, n_envs)), "next": 0}


def next_of(cycle: dict[str, Any]) -> np.ndarray:
    cycle["next"] = (cycle["next"] + 1) % 64
    return cycle["rows"][cycle["next"]]


def measure(plan: Plan, what: str, n_envs: int, make: Callable[[], Callable[[], float]]) -> Speed:
    """Speed in one run and memory in another, since tracing slows down."""
    step = make()
    for _ in range(WARM_UP_STEPS):
        step()
    rates, occupancies = [], []
    for _ in range(plan.repeats):
        steps, start_s = 0, time.process_time()
        while (elapsed_s := time.process_time() - start_s) < plan.seconds:
            occupancies.append(step())
            steps += 1
        rates.append(n_envs * steps / elapsed_s)
    speed = Speed(
        what,
        n_envs,
        round(statistics.fmean(occupancies), 1),
        round(statistics.median(rates)),
        round(max(rates)),
        round(memory_mib(make), 1),
    )
    print(f"{what:34} {n_envs:5} environments, {speed.occupancy:5} running: {speed.decisions_per_s:>9,} /s")
    return speed


def memory_mib(make: Callable[[], Callable[[], float]]) -> float:
    """What is held after five steps, the profile and the code not counted."""
    load_profile(PROFILE)
    load_scenario(SCENARIO)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    step = make()
    for _ in range(5):
        step()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--markdown", type=Path, help="page whose marked tables to replace")
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that it works")
    arguments = parser.parse_args()
    plan = Plan(repeats=3, seconds=0.15) if arguments.quick else Plan()

    facts = machine.facts(("specgov", "numpy", "gymnasium"))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    by_envs = [measure(plan, "physics", n, lambda n=n: physics(n, OCCUPANCY)) for n in ENVS]
    by_occupancy = [measure(plan, "physics", MANY, lambda b=b: physics(MANY, b)) for b in OCCUPANCIES]
    layers = [
        measure(plan, "physics, observation, reward", MANY, lambda: simulation(MANY)),
        measure(plan, "ServingVectorEnv, truth=False", MANY, lambda: vector_environment(MANY, False)),
        measure(plan, "ServingVectorEnv", MANY, lambda: vector_environment(MANY, True)),
        measure(plan, "ServingEnv, truth=False", 1, lambda: single_environment(False)),
        measure(plan, "ServingEnv", 1, lambda: single_environment(True)),
    ]
    result = {
        "machine": facts,
        "quick": arguments.quick,
        "plan": asdict(plan),
        "profile": PROFILE,
        "scenario": SCENARIO,
        "slots": SLOTS,
        "by_envs": [asdict(row) for row in by_envs],
        "by_occupancy": [asdict(row) for row in by_occupancy],
        "layers": [asdict(row) for row in layers],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot:
        arguments.plot.write_text(plot.render(figure(result)))
    if arguments.markdown:
        write_markdown(arguments.markdown, result)
    print(markdown(result))


if __name__ == "__main__":
    main()
