"""What learning, saving and comparing cost a decision.

    python benchmarks/learning.py -o out/learning.json [--quick] [--markdown docs/learning.md]

One thread, BLAS included, on the steps of ``benchmarks/rules.py``: a steady batch of requests that come and
go, on the bundled Llama 8B profile. For each rule and batch size:

- observe, choose: CPU time of taking a step in and of choosing, which a decision waits for;
- copy: CPU time of taking what was learnt, during which the engine's lock is held;
- encode, restore: wall time of making a file's bytes of it, and of putting it into a new rule, off the path;
- canary: observe and choose of a canary of the rule and ``greedy``, over those of the rule alone.

Medians, and the 99th percentile where a decision waits, over the steps of all repeats.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
from rules import Batch, _timed

from specgov.controller import state_file
from specgov.controller.canary import Canary
from specgov.controller.decision import DecisionBuilder
from specgov.policies.learnt import Learnt, capture, restore
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, Choice, Policy

RULES = ("greedy", "thompson", "ppo", "sliding_ucb", "linucb", "ema")
BATCH_SIZES = (8, 256)
BEGIN, END = "<!-- learning: begin, written by benchmarks/learning.py -->", "<!-- learning: end -->"


@dataclass(frozen=True)
class Cost:
    """Times in µs, sizes in kB."""

    rule: str
    batch_size: int
    observe_p50: float
    observe_p99: float
    choose_p50: float
    choose_p99: float
    copy_p50: float
    copy_p99: float
    encode_p50: float
    restore_p50: float
    file_kb: float
    canary_both_p50: float
    both_p50: float


def play(policy: Policy, batch: Batch, size: int, steps: int) -> np.ndarray:
    """CPU time in µs of observe and of choose, shape (2, steps)."""
    choice: Choice = policy.choose(BatchView(size, 500 * size, 500))
    times = np.zeros((2, steps))
    for index in range(steps):
        choice, times[0, index], times[1, index] = _timed(policy, batch.step(choice.num_steps_for(size)))
    return times / 1e3


def measure(rule: str, size: int, steps: int, repeats: int) -> Cost:
    """The costs of a rule at a batch size."""
    runs, with_canary, copies, encodes, restores = [], [], [], [], []
    content = b""
    for seed in range(repeats):
        batch = Batch(size, seed)
        policy = make_policy(rule, batch.context())
        assert isinstance(policy, Learnt)
        runs.append(play(policy, batch, size, steps)[:, steps // 4 :])
        for _ in range(50):
            begin = time.thread_time_ns()
            learnt = capture(policy)
            copies.append((time.thread_time_ns() - begin) / 1e3)
            play(policy, batch, size, 1)
        for _ in range(10):
            begin = time.perf_counter_ns()
            content = state_file.to_bytes({"learnt": learnt})
            middle = time.perf_counter_ns()
            restore(make_policy(rule, batch.context()), state_file.from_bytes(content)["learnt"])  # type: ignore[arg-type]
            encodes.append((middle - begin) / 1e3)
            restores.append((time.perf_counter_ns() - middle) / 1e3)
        batch = Batch(size, seed)
        candidate = make_policy("greedy", batch.context())
        builder = DecisionBuilder(batch.engine, candidate, 50, 1000)
        pair = Canary(
            "greedy",
            candidate,
            make_policy(rule, batch.context()),
            builder,
            0.1,
            64,
            np.random.default_rng(seed),
        )
        with_canary.append(play(pair, batch, size, steps)[:, steps // 4 :])
    observe, choose = np.concatenate(runs, axis=1)
    both, both_with = observe + choose, np.concatenate(with_canary, axis=1).sum(0)
    figures = [np.percentile(x, q) for x in (observe, choose, copies) for q in (50, 99)]
    figures += [
        np.median(encodes),
        np.median(restores),
        len(content) / 1000,
        np.median(both_with),
        np.median(both),
    ]
    return Cost(rule, size, *(round(float(figure), 1) for figure in figures))


def markdown(costs: list[Cost], facts: dict[str, Any]) -> str:
    """The table, with the machine."""
    lines = [
        "| rule | batch | observe p50 / p99 | choose p50 / p99 | copy p50 / p99 | encode | restore | file "
        "| observe + choose, with a canary |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.rule} | {c.batch_size} | {c.observe_p50:.0f} / {c.observe_p99:.0f} µs "
        f"| {c.choose_p50:.0f} / {c.choose_p99:.0f} µs | {c.copy_p50:.0f} / {c.copy_p99:.0f} µs "
        f"| {c.encode_p50 / 1000:.1f} ms | {c.restore_p50 / 1000:.1f} ms | {c.file_kb:.0f} kB "
        f"| {c.both_p50:.0f}, {c.canary_both_p50:.0f} µs |"
        for c in costs
    ]
    return "\n".join([f"Machine: {machine.describe(facts)}", "", *lines])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="What learning, saving and comparing cost.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--markdown", type=Path, help="page whose table is replaced")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    facts = machine.facts(("numpy", "safetensors"))
    steps, repeats = (200, 1) if arguments.quick else (1000, 3)
    costs = []
    for rule in RULES:
        for size in BATCH_SIZES:
            costs.append(measure(rule, size, steps, repeats))
            print(costs[-1], flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": facts, "costs": [asdict(cost) for cost in costs]}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown:
        page = arguments.markdown.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        after = rest.partition(END)[2]
        table = markdown(costs, facts)
        arguments.markdown.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
