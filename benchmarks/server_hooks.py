"""server_hooks.py   Specgov's hooks in a real SGLang server on a CPU: their cost, the broadcast's, the lag.

    tests/sglang/run --collect-only   # makes the environment where there is none yet
    PYTHONPATH=tests/sglang/shim .cache/sglang/0.5.23/bin/python benchmarks/server_hooks.py -o out/hooks.json

Starts the tests' server (tiny models) without the plugin and with it, in turn, alone and with two
tensor-parallel ranks. It serves eight requests at a time at one fixed tier, so that the steps are alike.
With two ranks there is also a sidecar that changes the tier every other step, so that orders ride in SGLang's
broadcast of requests. Times are taken inside the scheduler processes by the plugin in benchmarks/hook_times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests" / "sglang"
sys.path.insert(0, str(TESTS))
import servers  # noqa: E402 of the tests
import sidecars  # noqa: E402

OFF, ON, CHANGING = "off", "on", "changing tiers"
TIERS = {OFF: [3], ON: [3], CHANGING: [0, 1, 3]}
BATCH_SIZE = 8
TOKENS = 300
KEPT_STEPS = 50  # of the first ones none counts


def measure(kind: str, ranks: int, models: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """One start of a server: what its steps at batch size 8 took."""
    folder.mkdir(parents=True)
    table = folder / "tiers.json"
    table.write_text(json.dumps({"1": {"candidate_steps": TIERS[kind]}}))
    flags = ["--speculative-adaptive-config", str(table), "--tp-size", str(ranks)]
    paths = (TESTS / "shim", HERE / "hook_times")
    variables = {
        "SPECGOV_TEST_TRACE": "",
        "SPECGOV_HOOK_TIMES": str(folder),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(ranks))
    with ExitStack() as stack:
        if kind != OFF:
            variables["SPECGOV_TARGET"] = f"unix://{folder}/s"
        if kind == ON:
            log = ("--decision-log", str(folder / "decisions.jsonl"))
            stack.enter_context(sidecars.sidecar_process(folder / "s", "--policy", "static:3", *log))
        if kind == CHANGING:
            stack.enter_context(sidecars.fake_sidecar(variables["SPECGOV_TARGET"], changing))
        server = stack.enter_context(servers.running(models, folder, *flags, **variables))
        for _ in range(rounds):
            server.check_eight_at_once(TOKENS)
        load = os.getloadavg()[0]
        server.process.terminate()
        servers.wait_until(lambda: not servers.processes_of(server.process.pid), 60)
        time.sleep(2)  # the decision log is written off the decision path
    steps = [row for row in lines(folder / "times.0.jsonl") if row["batch_size"] == BATCH_SIZE][KEPT_STEPS:]
    if not steps:
        raise SystemExit(f"no steps of {BATCH_SIZE} requests:\n{server.log[-4000:]}")
    return {
        "kind": kind,
        "ranks": ranks,
        "load_average_1min": round(load, 1),
        **summary(steps),
        **lags(folder),
    }


def changing(messages: Any, _: Any) -> Iterator[Any]:
    """A sidecar that asks for another tier every other step."""
    for report in sidecars.reports_of(messages):
        yield sidecars.decision(report, TIERS[CHANGING][report.step_id // 2 % 3])


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    own = sorted(row["own_us"] for row in steps)
    result = {
        "steps": len(steps),
        "step_ms_p50": statistics.median(row["step_us"] for row in steps) / 1000,
        "own_us_p50": statistics.median(own),
        "own_us_p99": own[int(0.99 * len(own))],
    }
    for name, rider in (("broadcast_us_p50", False), ("broadcast_with_rider_us_p50", True)):
        waits = [row["broadcast_us"] for row in steps if row["rider"] == rider]
        result[name] = statistics.median(waits) if waits else None
        result[f"steps_{name.removesuffix('_us_p50')}"] = len(waits)
    return result


def lags(folder: Path) -> dict[str, Any]:
    """The decision lag in steps, by the sidecar's log."""
    path = folder / "decisions.jsonl"
    if not path.exists():
        return {}
    seen = Counter(
        row["lag_steps"]
        for row in lines(path)
        if row.get("kind") == "step" and row["lag_steps"] is not None and row["batch_size"] == BATCH_SIZE
    )
    return {"decision_lag_steps": dict(sorted(seen.items()))}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def medians(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the starts of each kind: the median of every figure, and all lags."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["ranks"], run["kind"]), []).append(run)
    rows = []
    for (ranks, kind), group in sorted(groups.items()):
        row: dict[str, Any] = {"ranks": ranks, "kind": kind, "starts": len(group)}
        for name, value in group[0].items():
            values = [run[name] for run in group if isinstance(run[name], (int, float))]
            if name not in row and values and isinstance(value, (int, float)):
                row[name] = statistics.median(values)
        seen: Counter[int] = sum((Counter(run.get("decision_lag_steps", {})) for run in group), Counter())
        row["decision_lag_share"] = {lag: n / seen.total() for lag, n in sorted(seen.items())}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=4, help="of eight requests, in each start")
    options = parser.parse_args()
    document: dict[str, Any] = {
        "machine": machine.facts(("sglang", "torch", "specgov", "grpcio", "protobuf", "numpy"))
    }
    print(machine.describe(document["machine"]), flush=True)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        subprocess.run([sys.executable, TESTS / "make_models.py", models], check=True)
        for ranks in options.ranks:
            kinds = [OFF, ON] if ranks == 1 else [OFF, ON, CHANGING]
            for number, kind in enumerate(
                [*kinds, *kinds[::-1]]
            ):  # a drift of the machine falls on all alike
                runs.append(measure(kind, ranks, models, Path(folder) / f"{ranks}-{number}", options.rounds))
                print(json.dumps(runs[-1]), flush=True)
    document |= {"runs": runs, "medians": medians(runs)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["medians"], indent=1))


if __name__ == "__main__":
    main()
