"""The hot path of two checkouts in one run, in turn: whether a change made it slower.

    python benchmarks/hot_path_since.py BEFORE -o out/since.json [--after CHECKOUT] [--rounds 5] [--own-work]
        [--markdown docs/benchmarks.md]

``BEFORE`` and ``--after`` (this checkout by default) are checkouts, such as ``git worktree add`` makes; the
client and the sidecar are each one's own, the measuring is this file's, and so are the Python and the
packages. A round measures each policy on each checkout, the checkouts in turn:

- the sidecar's own work on a report with all that is counted, without gRPC, and how much of it comes before
  the decision can be sent (``own_work.py``). It is the thread's CPU time, in turns of a fraction of a second:
  other work on the machine adds little to it, and to both alike.
- unless ``--own-work``: submit and read on the engine's thread and the round trip, at steps of 5 ms, with an
  idle and a busy caller; and the sidecar's CPU time for a report, all its threads, with ``ENGINES`` engines
  of 200 steps/s. These want a quiet machine.

Ratios are after over before within a round; given are their median and range.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hot_path
import machine
import own_work
from hot_path_report import SINCE_BEGIN, SINCE_END, since_markdown, write_markdown

ENGINES = 8
PLAN = hot_path.Plan(seconds=2.0, warm_up_s=3.0, repeats=1)
"""The warm-up is what the sidecar needs to have learnt: 600 steps."""
FIGURES = {
    **{
        f"{key}_{size}_us": f"{words}, batch {size}, {average} µs"
        for kind, words in (("own_work", "own work"), ("before_decision", "of it before the decision"))
        for key, average in ((kind, "mean"), (f"{kind}_p50", "p50"))
        for size in own_work.BATCH_SIZES
    },
    "idle_submit_and_read_us": "submit + read, idle caller, p50 µs",
    "busy_submit_and_read_us": "submit + read, busy caller, p50 µs",
    "idle_round_trip_us": "round trip, idle caller, p50 µs",
    "busy_round_trip_us": "round trip, busy caller, p50 µs",
    "sidecar_cpu_us": "sidecar's CPU time a report, µs",
}


def measure(policy: str, folder: Path) -> dict[str, float]:
    """What takes a sidecar, of one checkout: that from which ``specgov`` is imported here."""
    cores = sorted(os.sched_getaffinity(0))
    figures = {}
    path = folder / "callers"
    with hot_path.sidecar(path, policy, cores[-1]):
        for caller in ("idle", "busy"):
            cell = hot_path.measure_caller(
                f"unix://{path}", caller, hot_path.ENGINE_STEP_MS, PLAN.seconds, PLAN.warm_up_s
            )
            figures[f"{caller}_submit_and_read_us"] = cell.both_p50
            figures[f"{caller}_round_trip_us"] = cell.round_trip_p50
    path = folder / "engines"
    with hot_path.sidecar(path, policy, cores[-1]) as pid, hot_path.pinned(cores[0]):
        hot_path.measure_engines(pid, path, ENGINES, PLAN)  # until it has learnt
        cell_of_engines = hot_path.measure_engines(pid, path, ENGINES, PLAN)
        steps_per_s = ENGINES * 1e3 / hot_path.ENGINE_STEP_MS
        figures["sidecar_cpu_us"] = 1e6 * cell_of_engines.cpu / steps_per_s / cell_of_engines.decided
    return figures


def measure_checkout(checkout: Path, policy: str) -> dict[str, float]:
    """The same in a process of its own that imports ``specgov`` from a checkout."""
    with own_work.imported_from(checkout) as environment:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", policy],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def compare(
    checkouts: dict[str, Path], policies: list[str], rounds: int, own_work_alone: bool
) -> list[dict[str, Any]]:
    """All figures, by policy, checkout and round."""
    found = []
    for number in range(rounds):
        for policy in policies:
            figures: dict[str, dict[str, float]] = {name: {} for name in checkouts}
            for size in own_work.BATCH_SIZES:
                hot_path.progress(f"round {number + 1}: {policy}, batch {size}, own work")
                for name, work in own_work.compare(checkouts, policy, size).items():
                    figures[name] |= work
            for name in () if own_work_alone else sorted(checkouts, reverse=number % 2 == 0):
                hot_path.progress(f"round {number + 1}: {policy}, {name}")
                figures[name] |= measure_checkout(checkouts[name], policy)
            found += [
                {"round": number, "policy": policy, "checkout": name, **figures[name]} for name in checkouts
            ]
    hot_path.progress("")
    return found


def commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the hot path of two checkouts.")
    parser.add_argument("before", nargs="?", type=Path, help="checkout of the commit before")
    parser.add_argument("--after", type=Path, default=Path(__file__).parent.parent, help="the other checkout")
    parser.add_argument("--policies", default="static:3,greedy", help="rules, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--markdown", type=Path, help="page whose table is replaced by this run's")
    parser.add_argument("--own-work", action="store_true", help="that alone, without processes and gRPC")
    parser.add_argument("--measure", metavar="POLICY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(arguments.measure, Path(folder))))
        return
    if arguments.before is None:
        parser.error("name the checkout of the commit before")
    checkouts = {"before": arguments.before, "after": arguments.after}
    facts = machine.facts(("grpcio", "protobuf", "numpy"))
    document = {
        "machine": facts,
        "commits": {name: commit(checkout) for name, checkout in checkouts.items()},
        "rows": compare(checkouts, arguments.policies.split(","), arguments.rounds, arguments.own_work),
    }
    text = since_markdown(document, FIGURES)
    print(text)
    if arguments.markdown is not None:
        write_markdown(arguments.markdown, text, SINCE_BEGIN, SINCE_END)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
