"""server_exit.py   How long a real SGLang server on a CPU takes to end, with Specgov and without.

    tests/sglang/run --collect-only   # makes the environment where there is none yet
    PYTHONPATH=tests/sglang/shim .cache/sglang/0.5.23/bin/python benchmarks/server_exit.py -o out/exit.json

Starts the tests' server (tiny models) without the plugin and with it, in turn, lets it answer one request,
and ends it: by SIGTERM to the launcher, or by SIGINT to its process group, as Ctrl-C in a shell does. Written
down is when each of its processes was gone, counted from the signal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import machine

TESTS = Path(__file__).parent.parent / "tests" / "sglang"
sys.path.insert(0, str(TESTS))
import servers  # noqa: E402 of the tests
import sidecars  # noqa: E402

OFF, ON = "off", "on"
WAYS = {
    "SIGTERM to the launcher": (os.kill, signal.SIGTERM),
    "SIGINT to its group": (os.killpg, signal.SIGINT),
}
GONE_S = 120


def measure(way: str, kind: str, models: Path, folder: Path) -> dict[str, Any]:
    """One server's end: seconds until the scheduler, the relay and the last process were gone."""
    folder.mkdir()
    target = f"unix://{folder}/s"
    with ExitStack() as stack:
        variables = {}
        if kind == ON:
            variables["SPECGOV_TARGET"] = target
            stack.enter_context(sidecars.sidecar_process(folder / "s", "--policy", "static:1"))
        server = stack.enter_context(servers.running(models, folder, **variables))
        server.check(servers.ACCEPTED, 20)
        names = {pid: name_of(pid) for pid in servers.processes_of(server.process.pid)}
        load = os.getloadavg()[0]
        send, number = WAYS[way]
        started_s = time.monotonic()
        send(server.process.pid, number)
        gone_s = times_of_ends(server.process, names, started_s)
    return {"way": way, "kind": kind, "load_average_1min": round(load, 1), **gone_s}


def times_of_ends(
    process: subprocess.Popen[bytes], names: dict[int, str], started_s: float
) -> dict[str, float]:
    """Seconds from ``started_s``, by name of process, and of the last."""
    gone_s: dict[str, float] = {}
    left = set(names)
    while left:
        time.sleep(0.01)
        process.poll()  # or it would stay, as a zombie
        now_s = time.monotonic() - started_s
        if now_s > GONE_S:
            raise SystemExit(f"still there: {sorted(names[pid] for pid in left)}")
        living = set(servers.processes_of(process.pid))
        for pid in left - living:
            gone_s[f"{names[pid]}_gone_s"] = now_s
        left &= living
    return gone_s | {"all_gone_s": max(gone_s.values())}


def name_of(pid: int) -> str:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        for part, name in ((b"relay_process", "relay"), (b"sglang::scheduler", "scheduler")):
            if part in command:
                return name
    return "other"


def medians(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the servers of each kind and way: the median of every time, and the longest of the last."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["way"], run["kind"]), []).append(run)
    return [
        {
            "way": way,
            "kind": kind,
            "servers": len(group),
            **{
                name: statistics.median(run[name] for run in group)
                for name in group[0]
                if name.endswith("_gone_s")
            },
            "all_gone_s_max": max(run["all_gone_s"] for run in group),
        }
        for (way, kind), group in groups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=2, help="of servers, without and with, for each way")
    options = parser.parse_args()
    document: dict[str, Any] = {"machine": machine.facts(("sglang", "torch", "specgov", "grpcio"))}
    print(machine.describe(document["machine"]), flush=True)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        subprocess.run([sys.executable, TESTS / "make_models.py", models], check=True)
        for way in WAYS:
            for pair in range(options.pairs):
                for kind in (OFF, ON) if pair % 2 == 0 else (ON, OFF):
                    runs.append(measure(way, kind, models, Path(folder) / str(len(runs))))
                    print(json.dumps(runs[-1]), flush=True)
    document |= {"runs": runs, "medians": medians(runs)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["medians"], indent=1))


if __name__ == "__main__":
    main()
