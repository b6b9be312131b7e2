"""What the sidecar costs an engine, and what an engine costs the sidecar.

    python benchmarks/hot_path.py -o out/hot_path.json [--quick] [--markdown docs/benchmarks.md]

Measured in one run on one machine: submitting a report and reading the decision on the engine's own thread;
the round trip through the sidecar, a process of its own; the share of decisions that are there one step
later; a bare ping-pong over a unix socket to compare with; and the sidecar alone, pinned to one core, against
the number of engines. The engine's thread either sleeps until its next step (idle), or works in short C calls
that let other threads run, as a scheduler does that launches kernels (busy), or stays in Python throughout
(python), the worst case for the client's threads.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import machine
import numpy as np
from engine_load import run_load
from hot_path_report import markdown, write_markdown

from specgov.client import Report, StreamClient
from specgov.proto.v1 import specgov_pb2 as pb

BATCH_SIZE = 64
ACCEPTED = bytes(slot % 4 for slot in range(BATCH_SIZE))
"""Of three drafts: where none were ever accepted, the guard would ask no policy."""
STEP_MS = (20.0, 5.0, 3.0, 10.0)
CALLERS = ("idle", "busy", "python")
ENGINES = (1, 2, 4, 8, 12, 16, 20, 24, 32)
ENGINE_STEP_MS = 5.0
KNEE_IN_TIME = 0.995
"""The knee: the largest number of engines of which this share of decisions is still in time."""
PAST_KNEE_IN_TIME = 0.5
"""Below this share larger numbers of engines are not tried."""
START_S = 30.0

PING_PONG_SERVER = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen(1)
connection, _ = server.accept()
while message := connection.recv(4096):
    connection.sendall(message[:64])
"""


@dataclass(frozen=True)
class Plan:
    """How long to measure; ``seconds`` and ``warm_up_s`` for each of ``repeats`` runs of a cell."""

    seconds: float = 5.0
    warm_up_s: float = 1.0
    repeats: int = 3


QUICK = Plan(seconds=1.5, warm_up_s=0.5, repeats=1)


@dataclass(frozen=True)
class CallerCell:
    """One engine at one pace. Times in µs; the round trip is over the steps whose decision was seen.

    ``threads_cpu`` is the share of one core that the client's threads use.
    """

    submit_p50: float
    submit_p99: float
    read_p50: float
    read_p99: float
    both_p50: float
    both_p99: float
    round_trip_p50: float
    round_trip_p99: float
    in_time: float
    seen: float
    threads_cpu: float


@dataclass(frozen=True)
class EnginesCell:
    """The sidecar with a number of engines. ``cpu`` is its share of one core; times in µs."""

    cpu: float
    decided: float
    in_time: float
    round_trip_p50: float
    round_trip_p99: float


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """This thread, and the processes that it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def process(command: Sequence[str], core: int, socket_path: Path) -> Iterator[int]:
    """A process on a core of its own that listens on ``socket_path``; its id."""
    with pinned(core):
        child = subprocess.Popen(command)
    try:
        deadline_s = time.monotonic() + START_S
        while not socket_path.exists():
            if child.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{' '.join(command)} does not listen on {socket_path}")
            time.sleep(0.01)
        yield child.pid
    finally:
        child.terminate()
        child.wait(START_S)


def sidecar(socket_path: Path, policy: str, core: int) -> contextlib.AbstractContextManager[int]:
    command = ["-m", "specgov.controller.cli.main", "serve", "--listen", f"unix://{socket_path}"]
    command += ["--policy", policy, "--log-level", "error"]
    return process([sys.executable, *command], core, socket_path)


def percentiles_us(seconds: Sequence[float]) -> tuple[float, float]:
    if not seconds:
        return float("nan"), float("nan")
    p50, p99 = np.percentile(np.asarray(seconds) * 1e6, (50, 99))
    return float(p50), float(p99)


def sleep_until(deadline_s: float) -> None:
    time.sleep(max(0.0, deadline_s - time.monotonic()))


def work_until(deadline_s: float) -> None:
    data = bytes(16_384)
    while time.monotonic() < deadline_s:
        hashlib.sha256(data).digest()  # about 10 µs without the interpreter's lock
        sum(range(500))


def compute_until(deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        sum(range(100))


REST: dict[str, Callable[[float], None]] = {
    "idle": sleep_until,
    "busy": work_until,
    "python": compute_until,
}


def other_threads_cpu_s() -> float:
    """CPU time so far of this process's threads but the calling one."""
    return time.process_time() - time.thread_time()


def measure_caller(target: str, caller: str, step_ms: float, seconds: float, warm_up_s: float) -> CallerCell:
    """One engine makes a step every ``step_ms``: report the last, read the decision for the next, rest."""
    info = pb.EngineInfo(engine_id=f"{caller}-{step_ms:g}", boot_id=str(time.time_ns()), tiers=[0, 1, 3])
    accepted, generations = ACCEPTED, bytes(BATCH_SIZE)
    slots = np.arange(BATCH_SIZE, dtype="<u2").tobytes()
    client = StreamClient(target, info)
    client.start()
    client.submit(Report(1, BATCH_SIZE, 3, accepted, slots, generations, 64_000, 2_000))
    if client.wait_for_step(1, START_S) is None:
        raise SystemExit(f"the sidecar does not decide: {client.stats()}")
    steps = int((warm_up_s + seconds) * 1e3 / step_ms)
    counted_from = int(warm_up_s * 1e3 / step_ms)
    submit_s, read_s = [0.0] * steps, [0.0] * steps
    sent_s: dict[int, float] = {}
    round_trips_s: dict[int, float] = {}
    in_time = 0
    rest, timer, next_s = REST[caller], time.perf_counter, time.monotonic()
    begun_s, threads_begun_s = next_s, other_threads_cpu_s()
    for index in range(steps):
        step_id = index + 2
        newest = client.newest()
        if newest is not None and newest.known_step_id in sent_s:
            known = newest.known_step_id
            round_trips_s[known] = newest.received_s - sent_s[known]
            in_time += index > counted_from and known == step_id - 1
        report = Report(step_id, BATCH_SIZE, 3, accepted, slots, generations, 64_000, 2_000, 0, 5_000, True)
        sent_s[step_id] = time.monotonic()
        started_s = timer()
        client.submit(report)
        submitted_s = timer()
        client.current(step_id + 1)
        read_s[index], submit_s[index] = timer() - submitted_s, submitted_s - started_s
        next_s += step_ms / 1e3
        rest(next_s)
    threads_cpu = (other_threads_cpu_s() - threads_begun_s) / (time.monotonic() - begun_s)
    client.close()
    submit_s, read_s = submit_s[counted_from:], read_s[counted_from:]
    counted = [trip for step_id, trip in round_trips_s.items() if step_id >= counted_from + 2]
    return CallerCell(
        *percentiles_us(submit_s),
        *percentiles_us(read_s),
        *percentiles_us([a + b for a, b in zip(submit_s, read_s, strict=True)]),
        *percentiles_us(counted),
        in_time=in_time / (len(submit_s) - 1),
        seen=len(counted) / len(submit_s),
        threads_cpu=threads_cpu,
    )


def measure_ping_pong(socket_path: Path, step_ms: float, seconds: float) -> dict[str, float]:
    """A message of a report's size there, one of a decision's back, at an engine's pace, without gRPC."""
    message = bytes(5 * BATCH_SIZE)
    times_s = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(socket_path))
        next_s = time.monotonic()
        for _ in range(int(seconds * 1e3 / step_ms)):
            started_s = time.perf_counter()
            connection.sendall(message)
            connection.recv(4096)
            times_s.append(time.perf_counter() - started_s)
            next_s += step_ms / 1e3
            sleep_until(next_s)
    p50, p99 = percentiles_us(times_s)
    return {"p50": p50, "p99": p99}


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def measure_engines(pid: int, socket_path: Path, engines: int, plan: Plan) -> EnginesCell:
    before_s, started_s = cpu_s(pid), time.monotonic()
    load = run_load(str(socket_path), engines, ENGINE_STEP_MS / 1e3, plan.warm_up_s, plan.seconds, BATCH_SIZE)
    return EnginesCell(
        (cpu_s(pid) - before_s) / (time.monotonic() - started_s),
        len(load.round_trips_s) / load.steps,
        load.in_time / load.steps,
        *percentiles_us(load.round_trips_s),
    )


def median_cell(cells: Sequence[Any]) -> dict[str, float]:
    """The median of each figure over a cell's repeats."""
    return {f.name: statistics.median(getattr(cell, f.name) for cell in cells) for f in fields(cells[0])}


def run(plan: Plan, policy: str, folder: Path) -> dict[str, Any]:
    """All measurements; the cells of one repeat are measured one after the other, then the next repeat."""
    cores = sorted(os.sched_getaffinity(0))
    caller_core, other_core = cores[0], cores[-1]
    facts = machine.facts(("specgov", "grpcio", "protobuf", "numpy"))
    callers: dict[tuple[str, float], list[CallerCell]] = {}
    engines: dict[int, list[EnginesCell]] = {}
    ping_pongs = []
    for repeat in range(plan.repeats):
        with pinned(caller_core):
            ping_path = folder / f"ping-{repeat}"
            command = [sys.executable, "-c", PING_PONG_SERVER, str(ping_path)]
            with process(command, other_core, ping_path):
                ping_pongs.append(measure_ping_pong(ping_path, ENGINE_STEP_MS, plan.seconds))
        path = folder / f"sidecar-{repeat}"
        with sidecar(path, policy, other_core):
            for caller in CALLERS:
                for step_ms in STEP_MS:
                    progress(f"repeat {repeat + 1}: {caller} caller, {step_ms:g} ms")
                    cell = measure_caller(f"unix://{path}", caller, step_ms, plan.seconds, plan.warm_up_s)
                    callers.setdefault((caller, step_ms), []).append(cell)
        for count in ENGINES:
            progress(f"repeat {repeat + 1}: {count} engines")
            # A sidecar for each number, so that none starts with the last one's queues.
            path = folder / f"sidecar-{repeat}-{count}"
            with sidecar(path, policy, other_core) as pid, pinned(caller_core):
                cell_of_engines = measure_engines(pid, path, count, plan)
            engines.setdefault(count, []).append(cell_of_engines)
            if cell_of_engines.in_time < PAST_KNEE_IN_TIME:
                break
    progress("")
    ping_pong = {key: statistics.median(p[key] for p in ping_pongs) for key in ("p50", "p99")}
    caller_rows = [
        {"caller": caller, "step_ms": step_ms} | median_cell(cells)
        for (caller, step_ms), cells in sorted(callers.items(), key=lambda item: CALLERS.index(item[0][0]))
    ]
    engine_rows = [{"engines": count} | median_cell(cells) for count, cells in engines.items()]
    in_time = [row["engines"] for row in engine_rows if row["in_time"] >= KNEE_IN_TIME]
    idle = next(row for row in caller_rows if row["caller"] == "idle" and row["step_ms"] == ENGINE_STEP_MS)
    return {
        "machine": facts,
        "plan": asdict(plan),
        "quick": plan == QUICK,
        "policy": policy,
        "batch_size": BATCH_SIZE,
        "cores": {"sidecar": other_core, "load": caller_core, "caller": "not pinned"},
        "ping_pong_us": ping_pong,
        "callers_us": caller_rows,
        "engines": engine_rows,
        "knee_engines": max(in_time, default=0),
        "round_trip_over_ping_pong": idle["round_trip_p50"] / ping_pong["p50"],
        "submit_and_read_over_ping_pong": idle["both_p50"] / ping_pong["p50"],
    }


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the hot path between engine and sidecar.")
    parser.add_argument("-o", "--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--quick", action="store_true", help="one short run of each cell: not for the docs")
    parser.add_argument("--policy", default="static:3", help="the sidecar's rule (default: %(default)s)")
    parser.add_argument("--markdown", type=Path, help="page whose tables are replaced by this run's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(QUICK if arguments.quick else Plan(), arguments.policy, Path(folder))
    print(markdown(result))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.markdown is not None:
        write_markdown(arguments.markdown, markdown(result))


if __name__ == "__main__":
    main()
