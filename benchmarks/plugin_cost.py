"""plugin_cost.py   What SGLang's scheduler thread pays for the plugin in one decode iteration, by batch size.

Everything that the hooks do in an iteration runs for real, against a sidecar in a process of its own: the
rounds of the broadcast, the choice of the tier, the report, the client's queue. Requests, batches and results
are stand-ins with SGLang's attributes, so SGLang's own work is not in the figures.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specgov.sglang_plugin import versions
from specgov.sglang_plugin.hooks import Hooks
from specgov.sglang_plugin.runtime import Runtime
from specgov.sglang_plugin.settings import Settings

BATCH_SIZES = (1, 8, 32, 64, 128, 256)
_WORK = np.random.default_rng(0).random(400)
STEPS = 400
WARM_UP_STEPS = 50


class Request:
    """What of a request is read, and a SGLang-like number of other attributes."""

    def __init__(self, number: int) -> None:
        self.rid = f"{number:032x}"
        self.finished_reason = None
        self.is_retracted = False
        self.origin_input_ids = [0] * 500
        self.output_ids = [0] * 100


class Mode:
    def is_decode(self) -> bool:
        return True


@dataclass
class Batch:
    reqs: list[Request]
    forward_iter: int
    forward_mode: Mode
    has_grammar: bool = False


@dataclass
class Result:
    speculative_num_draft_tokens: int
    num_correct_drafts_per_req_cpu: list[int]
    can_run_cuda_graph: bool = True


class Rule:
    candidate_steps = [0, 1, 3, 5, 7]  # noqa: RUF012

    def set_cuda_graph_bs(self, sizes: list[int] | None) -> None:
        pass


class Arguments:
    speculative_algorithm = "EAGLE"
    speculative_adaptive = True
    skip_server_warmup = True


class Scheduler:
    server_args = Arguments()
    enable_overlap = True
    max_running_requests = 256
    max_total_num_tokens = 1_000_000

    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.forward_ct = 0


def pass_time(seconds: float, busy: bool) -> None:
    """The rest of a step: asleep, or in C calls of about 10 µs that let other threads run."""
    if not busy:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        np.sort(_WORK)


def measure(batch_size: int, churn: bool, busy: bool, target: str, step_s: float) -> list[float]:
    """Microseconds in the hooks, one entry a step; with ``churn`` a request ends at every step."""
    versions.installed_version = lambda: "0.5.23"  # type: ignore[assignment]
    versions.ranks_of = lambda _: versions.Ranks(0, 1, None)  # type: ignore[assignment]
    versions.kv_use_ratio = lambda _: 0.5  # type: ignore[assignment]
    runtime = Runtime(Settings(target, engine_id=f"cost-{batch_size}-{churn}-{busy}"))
    hooks = Hooks(runtime)
    policy = runtime.make_policy(Rule(), 3)  # type: ignore[arg-type]
    policy.set_cuda_graph_bs([1, 2, 4, 8, 16, 32, 64, 128, 256])
    scheduler = Scheduler()
    rng = np.random.default_rng(0)
    spent: list[float] = []
    inner = [0.0]

    def process(_: Scheduler, batch: Batch, result: Result) -> None:
        """SGLang's own part, whose time is taken off."""
        started = time.perf_counter()
        if churn:
            batch.reqs[0].finished_reason = "stop"  # type: ignore[assignment]
        inner[0] = time.perf_counter() - started
        policy.on_verify_complete(result.num_correct_drafts_per_req_cpu, len(batch.reqs))

    def loop(scheduler: Scheduler) -> None:
        reqs = [Request(number) for number in range(batch_size)]
        newest = batch_size
        for step in range(STEPS + WARM_UP_STEPS):
            accepted = rng.integers(0, 2, batch_size).tolist()
            t0 = time.perf_counter()
            hooks.around_broadcast(lambda _, r: r, None, [])
            scheduler.forward_ct += 1
            tier = policy.get_steps_for_batch(batch_size)
            t1 = time.perf_counter()
            batch = Batch(reqs, scheduler.forward_ct, Mode())
            result = Result(tier + 1, [min(a, tier) for a in accepted])
            t2 = time.perf_counter()
            hooks.around_result(process, scheduler, batch, result)
            t3 = time.perf_counter()
            if step >= WARM_UP_STEPS:
                spent.append(1e6 * (t1 - t0 + t3 - t2 - inner[0]))
            if churn:
                reqs = [*reqs[1:], Request(newest)]
                newest += 1
            pass_time(step_s, busy)

    hooks.around_event_loop(loop, scheduler)
    assert not runtime.guard.errors, runtime.guard.errors
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step-ms", type=float, default=5.0, help="pause between steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix://{folder}/s"
        sidecar = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "specgov"),
                "serve",
                "--listen",
                target,
                "--log-level",
                "error",
            ]
        )
        try:
            time.sleep(2)
            print("| batch size | caller | p50 µs | p99 µs | p50 µs, a request ends each step |")
            print("|---|---|---|---|---|")
            for batch_size, busy in itertools.product(BATCH_SIZES, (True, False)):
                steady, churn = (
                    measure(batch_size, churn, busy, target, arguments.step_ms / 1000)
                    for churn in (False, True)
                )
                p50, p99, p50_churn = np.median(steady), np.percentile(steady, 99), np.median(churn)
                caller = "busy" if busy else "idle"
                print(f"| {batch_size} | {caller} | {p50:.0f} | {p99:.0f} | {p50_churn:.0f} |")
        finally:
            sidecar.terminate()
            sidecar.wait(10)


if __name__ == "__main__":
    main()
