"""The sweep over concurrencies: one table and one picture of all its loads."""

from __future__ import annotations

import math
import statistics
from typing import Any

from report_tables import Runs, spread, table

from specgov.controller.plot import Figure, Panel, Series

SWEEP = "sweep_"


def sweep_table(runs: Runs) -> str:
    """Output rates by contestant and concurrency; "" where no sweep was played."""
    sizes, names = _sizes(runs), _names(runs)
    rows = [
        (name, *(_rates(runs[f"{SWEEP}{size}"].get(name, [])) for size in sizes)) for name in names if sizes
    ]
    return table(("output tokens/s at", *map(str, sizes)), rows) if rows else ""


def sweep_figure(runs: Runs) -> Figure:
    """Output rate against concurrency, over the slowest contestant's too, since rates span two decades."""
    sizes, names = _sizes(runs), _names(runs)
    medians = {name: [_median(runs[f"{SWEEP}{size}"].get(name, [])) for size in sizes] for name in names}
    slowest = [
        min((v for v in column if v is not None), default=None)
        for column in zip(*medians.values(), strict=True)
    ]
    places = [float(size) for size in sizes]
    over = {
        name: [None if a is None or not b else a / b for a, b in zip(values, slowest, strict=True)]
        for name, values in medians.items()
    }
    return Figure(
        "sweep, a real server",
        "requests in flight",
        (
            Panel(
                "output rate, tokens/s",
                [Series(name, places, values) for name, values in medians.items()],
                y_log=True,
                height_px=220,
            ),
            Panel("over the slowest's", [Series("", places, values) for values in over.values()]),
        ),
        x_log=True,
        x_ticks=places,
        x_labels=[str(size) for size in sizes],
    )


def _sizes(runs: Runs) -> list[int]:
    return sorted(int(load.removeprefix(SWEEP)) for load in runs if load.startswith(SWEEP))


def _names(runs: Runs) -> list[str]:
    """Every contestant of the sweep, the one with the largest rates first."""
    totals: dict[str, list[float]] = {}
    for load in (load for load in runs if load.startswith(SWEEP)):
        for name, found in runs[load].items():
            totals.setdefault(name, []).append(math.log(max(_median(found) or 0.0, 1e-9)))
    return sorted(totals, key=lambda name: -statistics.fmean(totals[name]))


def _median(runs: list[dict[str, Any]]) -> float | None:
    return statistics.median(run["output_tokens_per_s"] for run in runs) if runs else None


def _rates(runs: list[dict[str, Any]]) -> str:
    return spread([run["output_tokens_per_s"] for run in runs]) if runs else ""
