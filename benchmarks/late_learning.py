"""What it would cost to decide before the newest step is learnt from, instead of after.

    python benchmarks/late_learning.py -o out/late_learning.json [--seeds 4] [--seconds 60]

The same requests are played to the rule twice: as it is, and learning from each step only after the decision
that follows it. Batch sizes are known at once either way. The score is that of ``specgov evaluate``: output
tokens by time that requests spend in the system; the figure is late / at once, less 1, in percent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import ClassVar

import machine
import numpy as np

from specgov.env.emulated import run_in_process
from specgov.env.scenario import load_scenario
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, Choice, Policy, PolicyContext, StepObservation

SCENARIOS = ("flash_crowd", "day_and_night", "mixed_classes", "moe", "agentic_bursts")


class Late:
    """A rule that learns from a step after the decision that follows it."""

    name: ClassVar[str] = "late"
    version: ClassVar[str] = "1"

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting: StepObservation | None = None

    def observe(self, step: StepObservation) -> None:
        """Keep the step for later."""
        self._waiting = step

    def choose(self, batch: BatchView) -> Choice:
        """Decide first, learn then."""
        choice = self._policy.choose(batch)
        if self._waiting is not None:
            self._policy.observe(self._waiting)
            self._waiting = None
        return choice

    def forget(self) -> None:
        """As the rule does."""
        self._policy.forget()

    def estimates(self) -> dict[str, float]:
        """Those of the rule."""
        return self._policy.estimates()


def score(rule: str, name: str, seed: int, seconds: float, *, late: bool) -> float:
    """Output tokens a second of a request's time in the system."""
    scenario = load_scenario(name)
    server = scenario.build(1, seed)
    engine = server.config.engine
    step_time = scenario.profile.step_time.with_graph_batch_sizes(engine.graph_batch_sizes)
    policy = make_policy(rule, PolicyContext(engine, np.random.default_rng(seed), lambda: 0.0, step_time))
    tokens = 0
    for step in run_in_process(Late(policy) if late else policy, server):
        tokens += step.observation.output_tokens
        if float(server.time_ns[0]) > seconds * 1e9:
            break
    return tokens / float(server.request_ns[0]) * 1e9


def main() -> None:
    """Play and write."""
    parser = argparse.ArgumentParser(description="What learning a step later costs.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--rule", default="greedy")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated seconds of each run")
    arguments = parser.parse_args()
    facts = machine.facts(("numpy",))
    percents: dict[str, list[float]] = {}
    for name in SCENARIOS:
        for seed in range(arguments.seeds):
            at_once, late = (
                score(arguments.rule, name, seed, arguments.seconds, late=which) for which in (False, True)
            )
            percents.setdefault(name, []).append(100 * (late / at_once - 1))
        print(f"{name:16} {np.mean(percents[name]):+.2f} %  {np.round(percents[name], 2)}", flush=True)
    every = np.concatenate(list(percents.values()))
    mean, error = float(every.mean()), float(every.std(ddof=1) / np.sqrt(len(every)))
    print(f"{arguments.rule}: {mean:+.2f} % +- {error:.2f} (standard error of {len(every)} runs)")
    document = {"machine": facts, "rule": arguments.rule, "percent": percents, "mean": mean, "error": error}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
