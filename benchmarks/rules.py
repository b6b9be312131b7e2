"""What each decision rule costs a step: taking a report in, and choosing.

    python benchmarks/rules.py -o out/rules.json [--quick] [--rules greedy,thompson] [--markdown PAGE.md]

One thread, BLAS included. Every rule of the registry plays a steady batch of 1, 8, 64 or 256 requests on the
bundled Llama 8B profile, which it knows, with tiers 0, 1, 2, 3, 5 and 7: requests differ (acceptance 0.1 to
0.95), are replaced after 300 steps in the mean, and steps scatter by 2 %. Times are the thread's own CPU
time in µs, so that they do not count when others have the core; others still slow it down through caches
and shared units. After a warm-up; mean, p50 and p99 over all steps of all repeats, and the p50 of the
fastest repeat. The mean is what a sidecar's core pays: some rules infer only every few steps.
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

from specgov.policies.profile import load_profile
from specgov.policies.registry import make_policy, policy_names
from specgov.policies.types import BatchView, EngineSpec, Policy, PolicyContext, StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

PROFILE = "h200-llama-3.1-8b"
BATCH_SIZES = (1, 8, 64, 256)
MEAN_REQUEST_STEPS = 300
STEP_SCATTER = 0.02
PROMPT_TOKENS = 500


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    warm_up_steps: int = 300
    steps: int = 700
    repeats: int = 5


QUICK = Plan(warm_up_steps=100, steps=300, repeats=2)


@dataclass(frozen=True)
class Cost:
    """CPU time in µs; ``both`` is from the observation to the decision."""

    rule: str
    batch_size: int
    observe_p50: float
    observe_p99: float
    choose_p50: float
    choose_p99: float
    both_p50: float
    both_p99: float
    both_mean: float
    both_p50_fastest: float


def report_of(step: StepObservation, decision_id: int) -> pb.StepReport:
    """The report on a step that followed a decision."""
    return pb.StepReport(
        step_id=step.step_id,
        batch_size=step.batch_size,
        num_steps=step.num_steps,
        accepted_drafts=step.accepted.tobytes(),
        slots_u16le=step.slots.astype("<u2").tobytes(),
        slot_generations_u8=step.generations.tobytes(),
        sum_seq_len_tokens=step.sum_seq_len_tokens,
        max_seq_len_tokens=step.max_seq_len_tokens,
        step_time_us=round((step.step_ms or 0.0) * 1000),
        step_time_valid=step.step_ms is not None,
        decision_id=decision_id,
    )


class Batch:
    """A steady batch of requests that come and go."""

    def __init__(self, batch_size: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._profile = load_profile(PROFILE)
        self._size = batch_size
        self._slots = np.arange(batch_size, dtype=np.uint16)
        self._generations = np.zeros(batch_size, dtype=np.uint8)
        self._acceptance = self._rng.uniform(0.1, 0.95, batch_size)
        self._length = self._rng.integers(PROMPT_TOKENS, 2 * PROMPT_TOKENS, batch_size)
        self._step_id = 0

    @property
    def engine(self) -> EngineSpec:
        """The engine that runs it."""
        return EngineSpec(self._profile.tiers, self._profile.graph_batch_sizes, max(BATCH_SIZES))

    def context(self) -> PolicyContext:
        """What a rule is made with."""
        return PolicyContext(self.engine, self._rng.spawn(1)[0], time.monotonic, self._profile.step_time)

    def step(self, num_steps: int) -> StepObservation:
        """One step at ``num_steps``."""
        self._step_id += 1
        hits = self._rng.random((self._size, max(num_steps, 1))) < self._acceptance[:, None]
        accepted = np.cumprod(hits, axis=1)[:, :num_steps].sum(1).astype(np.uint8)
        self._length += accepted + 1
        tokens = int(self._length.sum())
        ms = float(self._profile.step_time.step_ms(self._size, num_steps, tokens))
        seen = StepObservation(
            self._step_id,
            self._size,
            num_steps,
            accepted,
            self._slots,
            self._generations.copy(),
            tokens,
            int(self._length.max()),
            step_ms=ms * float(np.exp(STEP_SCATTER * self._rng.standard_normal())),
        )
        self._replace()
        return seen

    def _replace(self) -> None:
        ended = self._rng.random(self._size) < 1 / MEAN_REQUEST_STEPS
        self._generations[ended] += 1
        self._length[ended] = PROMPT_TOKENS
        self._acceptance[ended] = self._rng.uniform(0.1, 0.95, int(ended.sum()))


def measure(rule: str, batch_size: int, plan: Plan) -> Cost:
    """A rule's costs at a batch size."""
    runs = [_run(rule, batch_size, plan, seed) for seed in range(plan.repeats)]
    observe, choose = (np.concatenate([run[part] for run in runs]) / 1e3 for part in (0, 1))
    both = observe + choose
    percentiles = [round(float(np.percentile(x, q)), 1) for x in (observe, choose, both) for q in (50, 99)]
    fastest = min(float(np.median(run[0] + run[1])) for run in runs) / 1e3
    return Cost(rule, batch_size, *percentiles, round(float(both.mean()), 1), round(fastest, 1))


def _run(rule: str, batch_size: int, plan: Plan, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """CPU time in ns of observe and of choose, by step."""
    batch = Batch(batch_size, seed)
    policy = make_policy(rule, batch.context())
    choice = policy.choose(BatchView(batch_size, batch_size * PROMPT_TOKENS, PROMPT_TOKENS))
    times = np.zeros((2, plan.warm_up_steps + plan.steps), dtype=np.int64)
    for index in range(times.shape[1]):
        step = batch.step(choice.num_steps_for(batch_size))
        choice, times[0, index], times[1, index] = _timed(policy, step)
    return times[0, plan.warm_up_steps :], times[1, plan.warm_up_steps :]


def _timed(policy: Policy, step: StepObservation) -> tuple[Any, int, int]:
    batch = BatchView.of(step)
    begin = time.thread_time_ns()
    policy.observe(step)
    middle = time.thread_time_ns()
    choice = policy.choose(batch)
    return choice, middle - begin, time.thread_time_ns() - middle


def markdown(costs: list[Cost], facts: dict[str, Any]) -> str:
    """A table of p50 / p99 (mean) from observation to decision, by rule and batch size."""
    lines = ["| rule | " + " | ".join(f"batch {size}" for size in BATCH_SIZES) + " |"]
    lines.append("|---|" + "---|" * len(BATCH_SIZES))
    for rule in dict.fromkeys(cost.rule for cost in costs):
        cells = [f"{c.both_p50:.0f} / {c.both_p99:.0f} ({c.both_mean:.0f})" for c in costs if c.rule == rule]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", machine.describe(facts), ""])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="CPU time of every decision rule by step.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--rules", default=",".join(policy_names()), help="rules, separated by commas")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    facts, plan = machine.facts(("numpy",)), QUICK if arguments.quick else Plan()
    costs: list[Cost] = []
    print(f"{'rule':17} batch  observe p50/p99  choose p50/p99  both p50/p99, mean (fastest run's p50), µs")
    for rule in arguments.rules.split(","):
        for batch_size in BATCH_SIZES:
            cost = measure(rule, batch_size, plan)
            costs.append(cost)
            print(
                f"{rule:17} {batch_size:5}  {cost.observe_p50:7.1f} {cost.observe_p99:7.1f} "
                f"{cost.choose_p50:7.1f} {cost.choose_p99:7.1f}  {cost.both_p50:7.1f} {cost.both_p99:7.1f} "
                f"{cost.both_mean:7.1f} ({cost.both_p50_fastest:.1f})",
                flush=True,
            )
    document = {"machine": facts, "plan": asdict(plan), "unit": "us", "costs": [asdict(c) for c in costs]}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(costs, facts), encoding="utf-8")


if __name__ == "__main__":
    main()
