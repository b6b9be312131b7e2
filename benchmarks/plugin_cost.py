"""What SGLang's scheduler thread pays for the plugin in one decode iteration.

    python benchmarks/plugin_cost.py [--client relay|thread] [-o FILE]   the hooks' own time, by batch size
    python benchmarks/plugin_cost.py --host-bound [-o FILE]              what a loop that Python bounds loses

Everything that the hooks do in an iteration runs for real, against a sidecar in a process of its own: the
rounds of the broadcast, the choice of the tier, the report, the client's queue. Requests, batches and results
are stand-ins with SGLang's attributes, so SGLang's own work is not in the figures.

With --host-bound the loop works back to back, in Python and in short C calls that let go of the interpreter's
lock, the same amount in each step: its time tells what threads in its process take from it. Blocks of steps
with the relay, with the thread client and without the plugin take turns in one run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np

from specgov.sglang_plugin import versions
from specgov.sglang_plugin.hooks import Hooks
from specgov.sglang_plugin.runtime import Runtime
from specgov.sglang_plugin.settings import Settings

BATCH_SIZES = (1, 8, 32, 64, 128, 256)
_WORK = np.random.default_rng(0).random(400)
STEPS = 400
WARM_UP_STEPS = 50
CLIENTS = ("relay", "thread")
WITHOUT = "none"
ROUNDS = 8


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


@dataclass(frozen=True)
class HooksCell:
    """Microseconds in the hooks in a step; ``p50_churn`` where a request ends in each."""

    client: str
    batch_size: int
    caller: str
    p50: float
    p99: float
    p50_churn: float


@dataclass(frozen=True)
class HostBoundCell:
    """A step of a loop that Python bounds: medians over rounds of each block's median, and ratios to none's.

    ``work_ms`` is the loop's own work, ``step_ms`` that and the hooks; the lows and highs are over rounds.
    Two that other processes on the machine hardly touch: ``lock_waits``, how often the loop slept in a step's
    work, which it only does for the interpreter's lock; ``others_us``, the other threads' CPU time in a step.
    """

    client: str
    batch_size: int
    work_ms: float
    step_ms: float
    work_ratio: float
    work_ratio_low: float
    work_ratio_high: float
    step_ratio: float
    lock_waits: float
    others_us: float


class Engine:
    """A scheduler with the plugin's hooks, or without them where ``client`` is none."""

    def __init__(self, batch_size: int, client: str, target: str) -> None:
        versions.installed_version = lambda: "0.5.23"  # type: ignore[assignment]
        versions.ranks_of = lambda _: versions.Ranks(0, 1, None)  # type: ignore[assignment]
        versions.kv_use_ratio = lambda _: 0.5  # type: ignore[assignment]
        self._rng = np.random.default_rng(0)
        self._scheduler = Scheduler()
        self._governed = client != WITHOUT
        self.reqs = [Request(number) for number in range(batch_size)]
        if self._governed:
            self._runtime = Runtime(Settings(target, engine_id=f"cost-{batch_size}", client=client))
            self._hooks = Hooks(self._runtime)
            self._policy = self._runtime.make_policy(Rule(), 3)  # type: ignore[arg-type]
            self._policy.set_cuda_graph_bs([1, 2, 4, 8, 16, 32, 64, 128, 256])

    def serve(self, loop: Callable[[], None]) -> None:
        """Run ``loop`` as the scheduler's: what the plugin starts ends with it."""
        if not self._governed:
            loop()
            return
        self._hooks.around_event_loop(lambda _: loop(), self._scheduler)
        if self._runtime.guard.errors:
            raise RuntimeError(f"the plugin failed: {self._runtime.guard.errors}")

    def wait_until_connected(self) -> None:
        link = self._runtime._link if self._governed else None
        deadline = time.monotonic() + 30
        while link is not None and link.client.current(1) is None and not link.client.stats().connected:
            if time.monotonic() > deadline:
                raise RuntimeError("no stream to the sidecar in 30 s")
            time.sleep(0.01)

    def step(self, churn: bool = False) -> float:
        """One step; returns the seconds in the hooks."""
        if not self._governed:
            return 0.0
        batch_size = len(self.reqs)
        accepted = self._rng.integers(0, 2, batch_size).tolist()
        inner_s = 0.0

        def process(_: Scheduler, batch: Batch, result: Result) -> None:
            """SGLang's own part, whose time is taken off."""
            nonlocal inner_s
            started = time.perf_counter()
            if churn:
                batch.reqs[0].finished_reason = "stop"  # type: ignore[assignment]
            inner_s = time.perf_counter() - started
            self._policy.on_verify_complete(result.num_correct_drafts_per_req_cpu, batch_size)

        t0 = time.perf_counter()
        self._hooks.around_broadcast(lambda _, r: r, None, [])
        self._scheduler.forward_ct += 1
        tier = self._policy.get_steps_for_batch(batch_size)
        t1 = time.perf_counter()
        batch = Batch(self.reqs, self._scheduler.forward_ct, Mode())
        result = Result(tier + 1, [min(a, tier) for a in accepted])
        t2 = time.perf_counter()
        self._hooks.around_result(process, self._scheduler, batch, result)
        t3 = time.perf_counter()
        if churn:
            self.reqs = [*self.reqs[1:], Request(self._scheduler.forward_ct + 1000)]
        return t1 - t0 + t3 - t2 - inner_s


def pass_time(seconds: float, busy: bool) -> None:
    """The rest of a step: asleep, or in C calls of about 10 µs that let other threads run."""
    if not busy:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        np.sort(_WORK)


def work(units: int) -> None:
    """A fixed amount: each unit is some Python and a C call that lets go of the interpreter's lock."""
    for unit in range(units):
        table = {}
        for number in range(40):
            table[number] = number * unit
        np.sort(_WORK)


def hooks_us(engine: Engine, churn: bool, busy: bool, step_s: float) -> list[float]:
    """Microseconds in the hooks, one entry a step; with ``churn`` a request ends at every step."""
    spent: list[float] = []

    def loop() -> None:
        engine.wait_until_connected()
        for _ in range(STEPS + WARM_UP_STEPS):
            spent.append(1e6 * engine.step(churn))
            pass_time(step_s, busy)

    engine.serve(loop)
    return spent[WARM_UP_STEPS:]


def measure_hooks(client: str, target: str, step_s: float) -> Iterator[HooksCell]:
    for batch_size, busy in itertools.product(BATCH_SIZES, (True, False)):
        steady, churn = (
            hooks_us(Engine(batch_size, client, target), churn, busy, step_s) for churn in (False, True)
        )
        p50, p99 = np.percentile(steady, [50, 99])
        caller = "busy" if busy else "idle"
        yield HooksCell(client, batch_size, caller, float(p50), float(p99), float(np.median(churn)))


def sleeps() -> int:
    """How often this thread has slept so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def block(engine: Engine, units: int, steps: int) -> tuple[float, float, float, float]:
    """Over one block of steps: work and step in ms (medians), sleeps and others' CPU in µs a step (means)."""
    times: list[tuple[float, float, int]] = []
    others_s = 0.0

    def loop() -> None:
        nonlocal others_s
        engine.wait_until_connected()
        for number in range(steps + WARM_UP_STEPS):
            if number == WARM_UP_STEPS:
                others_s = time.thread_time() - time.process_time()
            in_hooks_s = engine.step()
            slept_before = sleeps()
            started = time.perf_counter()
            work(units)
            work_s = time.perf_counter() - started
            times.append((1e3 * work_s, 1e3 * (work_s + in_hooks_s), sleeps() - slept_before))
        others_s += time.process_time() - time.thread_time()

    engine.serve(loop)
    measured = np.array(times[WARM_UP_STEPS:])
    work_ms, step_ms, _ = np.median(measured, axis=0)
    return float(work_ms), float(step_ms), float(measured[:, 2].mean()), 1e6 * others_s / steps


def measure_host_bound(target: str, step_s: float, batch_sizes: tuple[int, ...]) -> Iterator[HostBoundCell]:
    unit_s = min(timeit.repeat(lambda: work(1), number=20, repeat=100)) / 20
    kinds = (WITHOUT, *CLIENTS)
    for batch_size in batch_sizes:
        results: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in kinds}
        for round_number in range(ROUNDS):
            for kind in kinds if round_number % 2 == 0 else kinds[::-1]:
                engine = Engine(batch_size, kind, target)
                results[kind].append(block(engine, round(step_s / unit_s), STEPS // 2))
        base = np.array(results[WITHOUT])
        for kind in kinds:
            own = np.array(results[kind])
            work_ratios, step_ratios = (own[:, :2] / base[:, :2]).T
            work_ms, step_ms, lock_waits, others_us = map(float, np.median(own, axis=0))
            yield HostBoundCell(
                kind,
                batch_size,
                work_ms,
                step_ms,
                work_ratio=float(np.median(work_ratios)),
                work_ratio_low=float(work_ratios.min()),
                work_ratio_high=float(work_ratios.max()),
                step_ratio=float(np.median(step_ratios)),
                lock_waits=lock_waits,
                others_us=others_us,
            )


@contextlib.contextmanager
def sidecar() -> Iterator[str]:
    """The target of a sidecar in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix://{folder}/s"
        command = [str(Path(sys.executable).parent / "specgov"), "serve", "--listen", target]
        process = subprocess.Popen([*command, "--log-level", "error"])
        try:
            time.sleep(2)
            yield target
        finally:
            process.terminate()
            process.wait(10)


def show(cell: Any, first: bool) -> None:
    """A dataclass as a row of a table, under its head where it is the ``first``."""
    row = asdict(cell)
    if first:
        print("| " + " | ".join(row) + " |")
        print("|" + "---|" * len(row))
    texts = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
    print("| " + " | ".join(texts) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", choices=CLIENTS, default="relay")
    parser.add_argument("--host-bound", action="store_true", help="what a loop that Python bounds loses")
    parser.add_argument("--step-ms", type=float, default=5.0, help="pause between steps, or their work")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 64], help="with --host-bound")
    parser.add_argument("-o", "--output", type=Path, help="write JSON there too, with machine and versions")
    arguments = parser.parse_args()
    facts = machine.facts(("grpcio", "protobuf", "numpy", "specgov"))
    print(machine.describe(facts))
    cells: list[HooksCell | HostBoundCell] = []
    with sidecar() as target:
        step_s = arguments.step_ms / 1000
        measured = (
            measure_host_bound(target, step_s, tuple(arguments.batch_sizes))
            if arguments.host_bound
            else measure_hooks(arguments.client, target, step_s)
        )
        for cell in measured:
            show(cell, not cells)
            cells.append(cell)
    if arguments.output is not None:
        document = {
            "machine": facts,
            "step_ms": arguments.step_ms,
            "steps": STEPS,
            "cells": [asdict(cell) for cell in cells],
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
