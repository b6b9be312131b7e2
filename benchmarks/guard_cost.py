"""What the guard costs a decision: the sidecar's own work on a report, with the guard and without, in turn.

    python benchmarks/guard_cost.py -o out/guard_cost.json [--quick]

Two engines in this process, one with the guard off, get the same reports in turn: a steady batch as in
``rules.py``, which follows the decisions of the first. Counted is the thread's CPU time in µs from the parsed
report to the decision's message: validation, learning, the choice, and building the message, without gRPC.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import machine
import numpy as np
from rules import BATCH_SIZES, PROFILE, Batch, report_of

from specgov.controller.config import ServeConfig
from specgov.controller.engine import Engine
from specgov.controller.guard.config import GuardConfig
from specgov.controller.validation import check_info
from specgov.proto.v1 import specgov_pb2 as pb

RULES = ("greedy", "thompson", "ppo", "threshold:32:3", "static:3")
WARM_UP_STEPS = 500


@dataclass(frozen=True)
class Cost:
    """CPU time in µs a report; ``ratio`` is of the medians, with the guard over without."""

    rule: str
    batch_size: int
    off_p50: float
    on_p50: float
    off_mean: float
    on_mean: float
    ratio: float


def measure(rule: str, batch_size: int, steps: int) -> Cost:
    """A rule's costs at a batch size."""
    batch = Batch(batch_size, seed=0)
    info = pb.EngineInfo(
        engine_id="e",
        boot_id="b",
        tiers=batch.engine.tiers,
        graph_batch_sizes=batch.engine.graph_batch_sizes,
        max_running_requests=batch.engine.max_running_requests,
        profile=PROFILE,
    )
    off, on = (
        Engine(
            info,
            check_info(info),
            ServeConfig(policy=rule, guard=GuardConfig(enabled=enabled)),
            time.monotonic,
        )
        for enabled in (False, True)
    )
    times = np.zeros((2, WARM_UP_STEPS + steps))
    decision = off.decide()
    for index in range(times.shape[1]):
        if decision is None:
            raise SystemExit("the engine does not decide")
        report = report_of(batch.step(decision.num_steps), decision.decision_id)
        for place in (0, 1) if index % 2 else (1, 0):
            begun = time.thread_time_ns()
            engine = (off, on)[place]
            engine.observe(report)
            decided = engine.decide()
            times[place, index] = time.thread_time_ns() - begun
            decision = decided if place == 0 else decision
    counted = times[:, WARM_UP_STEPS:] / 1e3
    p50, mean = np.median(counted, axis=1).round(1).tolist(), counted.mean(axis=1).round(1).tolist()
    return Cost(rule, batch_size, *p50, *mean, round(p50[1] / p50[0], 3))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="CPU time of a report with the guard and without.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--rules", default=",".join(RULES), help="rules, separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    steps = 1000 if arguments.quick else 5000
    costs = []
    for rule in arguments.rules.split(","):
        for batch_size in BATCH_SIZES:
            costs.append(cost := measure(rule, batch_size, steps))
            print(
                f"{rule:16} batch {batch_size:4}  p50 {cost.off_p50:6.1f} -> {cost.on_p50:6.1f} us "
                f"({cost.ratio:.2f})  mean {cost.off_mean:6.1f} -> {cost.on_mean:6.1f} us",
                flush=True,
            )
    document = {"machine": machine.facts(("numpy", "protobuf")), "costs": [asdict(cost) for cost in costs]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
