"""What Specgov costs by being there: the same tier with it and without, in pairs of one start and seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from report_tables import Runs, table

STUDENT_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom; the next smaller one is taken."""


def presence(runs: Runs, on: str, off: str) -> str:
    """Ratios and their 95 % intervals by load, of output rate and of the step time of the cell with the most
    steps; "" without pairs.

    The output rate has the prefills in it, which scatter; the step time has not.
    """
    head = ("load", "pairs", f"{on} / {off}: output rate", "95 % interval", "step time", "95 % interval")
    rows = []
    for load, by_contestant in runs.items():
        mine, other = (
            {(run["began"], run["seed"]): run for run in by_contestant.get(name, [])} for name in (on, off)
        )
        pairs = [(mine[at], other[at]) for at in mine if at in other]
        if len(pairs) < 2:
            continue
        rates = [math.log(a["output_tokens_per_s"] / b["output_tokens_per_s"]) for a, b in pairs]
        times = [log for pair in pairs if (log := _step_time_ratio(*pair)) is not None]
        rows.append((load, str(len(pairs)), *_said(rates), *_said(times)))
    return table(head, rows) if rows else ""


def half_width(values: Sequence[float]) -> float:
    """Half the width of the mean's 95 % interval, by Student's t."""
    freedom = len(values) - 1
    quantile = STUDENT_95[max((known for known in STUDENT_95 if known <= freedom), default=1)]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _step_time_ratio(run: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The logarithm of the ratio of medians, of the cell of which both have most."""
    counts = {
        (size, tier): min(count, other["step_ms"][size][tier][1])
        for size, tiers in run["step_ms"].items()
        for tier, (_, count) in tiers.items()
        if tier in other["step_ms"].get(size, {})
    }
    if not counts:
        return None
    size, tier = max(counts, key=lambda cell: counts[cell])
    return math.log(run["step_ms"][size][tier][0] / other["step_ms"][size][tier][0])


def _said(logs: Sequence[float]) -> tuple[str, str]:
    if len(logs) < 2:
        return "", ""
    mean, half = statistics.fmean(logs), half_width(logs)
    return f"{math.exp(mean):.4f}", f"{math.exp(mean - half):.4f} to {math.exp(mean + half):.4f}"
