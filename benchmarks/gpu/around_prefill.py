"""around_prefill.py   What prefill does to the times of the steps around it, from decision logs of a contest.

    python benchmarks/gpu/around_prefill.py kept/decisions*.jsonl --profile mine.json -o around_prefill.json

Reads the sidecars' decision logs of a contest (its --keep folder). An engine's step ids count all its
iterations, so an id that is missing between two decode steps is a prefill. A clean step is one with no
prefill in the two iterations before it and the one after it; the median of clean steps of a graph size and
tier is what such a step takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from specgov.policies.profile import Profile, load_profile

Row = dict[str, Any]
LONGEST_S = 5.0
"""A longer time between steps is the pause between two runs."""
LEAST = 8
"""Clean steps that a median needs."""


def steps_of(path: Path) -> list[Row]:
    """The steps of a decision log, warm-up and steps without a live request left out."""
    rows = (json.loads(line) for line in path.read_text().splitlines() if line.startswith("{"))
    return [
        row
        for row in rows
        if row["kind"] == "step" and "warm_up" not in row["flags"] and row["sum_seq_len_tokens"]
    ]


def prefills_between(before: Row, after: Row) -> int:
    """Iterations between two steps that were no decode steps."""
    return int(after["step_id"] - before["step_id"] - 1)


def neighbours(logs: Sequence[list[Row]]) -> Iterator[tuple[Row, Row, Row, Row]]:
    """Four steps in a row, of one run."""
    for steps in logs:
        for four in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
            if all(b["time_s"] - a["time_s"] < LONGEST_S for a, b in pairwise(four)):
                yield four


def cell(row: Row) -> tuple[int, int]:
    """Graph size and tier."""
    return row["padded_batch_size"], row["num_steps"]


def clean_times(logs: Sequence[list[Row]]) -> dict[tuple[int, int], list[Row]]:
    """The clean steps by cell."""
    found: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for a, b, c, d in neighbours(logs):
        gaps = prefills_between(a, b) or prefills_between(b, c) or prefills_between(c, d)
        if not gaps and c["step_ms"]:
            found[cell(c)].append(c)
    return {key: rows for key, rows in found.items() if len(rows) >= LEAST}


def held_up(logs: Sequence[list[Row]], usual_ms: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Steps with a time that came before a prefill: how long they seemed, over what such steps take."""
    timed = [row for steps in logs for row in steps if row["step_ms"]]
    held = [b for a, b, c, d in neighbours(logs) if b["step_ms"] and prefills_between(b, c)]
    ratios = [row["step_ms"] / usual_ms[cell(row)] for row in held if cell(row) in usual_ms]
    excess_ms = sum(row["step_ms"] - usual_ms[cell(row)] for row in held if cell(row) in usual_ms)
    return {
        "timed_steps": len(timed),
        "before_a_prefill": len(ratios),
        "share": round(len(ratios) / len(timed), 4),
        "share_of_time": round(excess_ms / sum(row["step_ms"] for row in timed), 4),
        "ratio_p10_p50_p90": [round(float(q), 2) for q in np.percentile(ratios, (10, 50, 90))],
        "share_above_1.3": round(float(np.mean(np.array(ratios) > 1.3)), 3),
    }


def prefill_ms(logs: Sequence[list[Row]], usual_ms: dict[tuple[int, int], float]) -> dict[str, Any]:
    """What an iteration of prefill adds: the time of three steps around it, less what these take."""
    added: dict[int, list[float]] = defaultdict(list)
    for a, b, c, d in neighbours(logs):
        count = prefills_between(b, c)
        known = all(cell(row) in usual_ms for row in (b, c, d))
        if count and known and not prefills_between(a, b) and not prefills_between(c, d):
            passed_ms = 1e3 * (d["time_s"] - a["time_s"])
            added[count].append((passed_ms - sum(usual_ms[cell(row)] for row in (b, c, d))) / count)
    return {
        str(count): {"times": len(ms), "median_ms_each": round(statistics.median(ms), 1)}
        for count, ms in sorted(added.items())
    }


def longest(logs: Sequence[list[Row]], count: int = 4) -> list[dict[str, float]]:
    """The longest stretches without a decode step: iterations of prefill, and seconds."""
    found = [
        {"prefills": prefills_between(a, b), "s": round(b["time_s"] - a["time_s"], 2)}
        for a, b, _, _ in neighbours(logs)
        if prefills_between(a, b)
    ]
    return sorted(found, key=lambda one: -one["s"])[:count]


def against(profile: Profile, clean: dict[tuple[int, int], list[Row]], least: int = 20) -> dict[str, Any]:
    """Measured over the profile's step times, the median by cell, and how many steps."""
    table: dict[str, Any] = {}
    for (size, tier), rows in sorted(clean.items()):
        if len(rows) >= least:
            context = np.array([row["sum_seq_len_tokens"] * size / row["batch_size"] for row in rows])
            expected = profile.step_time.step_ms(size, tier, context)
            ratio = np.median(np.array([row["step_ms"] for row in rows]) / expected)
            table[f"{size}, tier {tier}"] = [round(float(ratio), 3), len(rows)]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--profile", help="to compare its step times with those of clean steps")
    options = parser.parse_args()
    logs = [steps_of(path) for path in options.logs]
    clean = clean_times(logs)
    if not clean:
        raise SystemExit(
            f"no cell of these logs has {LEAST} clean steps: they are too short, or not of a contest"
        )
    usual_ms = {key: statistics.median(row["step_ms"] for row in rows) for key, rows in clean.items()}
    document = {
        "command": "around_prefill",
        "steps": sum(map(len, logs)),
        "held_up": held_up(logs, usual_ms),
        "added_by_prefills_in_a_row": prefill_ms(logs, usual_ms),
        "longest_without_decode": longest(logs),
        "usual_ms": {f"{size}, tier {tier}": ms for (size, tier), ms in sorted(usual_ms.items())},
    }
    if options.profile:
        document["measured_over_profile"] = against(load_profile(options.profile), clean)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
