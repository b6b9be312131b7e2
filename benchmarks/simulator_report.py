"""The figures of ``simulator.py`` as the tables and the picture that stand in the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import machine

from specgov.controller.plot import Figure, Panel, Series

BEGIN = "<!-- simulator: begin, written by benchmarks/simulator.py -->"
END = "<!-- simulator: end -->"

Row = dict[str, Any]


def markdown(result: Row) -> str:
    """Machine, aims and tables."""
    plan = result["plan"]
    return "\n\n".join(
        [
            f"Machine: {machine.describe(result['machine'])} One process on one core.",
            *(["**A quick run, to see that it works: not figures to quote.**"] if result["quick"] else []),
            f"Each figure is the median of {plan['repeats']} runs of {plan['seconds']:g} s of CPU time, "
            f"beside it the fastest. Physics alone: profile `{result['profile']}`, slots for "
            f"{result['slots']} requests in each environment. The other layers: scenario "
            f"`{result['scenario']}`.",
            _aims(result),
            "What a layer costs:",
            _table(result["layers"]),
            "Physics alone, by the number of environments:",
            _table(result["by_envs"]),
            "Physics alone, by the requests that run in each environment:",
            _table(result["by_occupancy"]),
        ]
    )


def write_markdown(page: Path, result: Row) -> None:
    """Replace what stands between the page's two marks.

    Raises:
        SystemExit: the page lacks the marks.

    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the tables: it needs the lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(result)}\n\n{END}{after}")


def figure(result: Row) -> Figure:
    """Cost of a decision against environments and against requests, both axes logarithmic."""
    return Figure(
        "Simulated server: cost of a decision on one core",
        "environments (above: 32 running requests in each) or running requests (below: 1,024 environments)",
        [
            Panel("µs a decision, by environments", [_cost(result["by_envs"], "envs")], y_log=True),
            Panel(
                "µs a decision, by running requests", [_cost(result["by_occupancy"], "occupancy")], y_log=True
            ),
        ],
        x_log=True,
        x_ticks=[1, 4, 16, 64, 256, 1024, 4096],
    )


def _cost(rows: list[Row], by: str) -> Series:
    return Series("physics", [row[by] for row in rows], [1e6 / row["decisions_per_s"] for row in rows])


def _aims(result: Row) -> str:
    """Each aim, what was measured, and whether it was met."""
    physics = next(row for row in result["by_envs"] if row["envs"] == 1024)
    layers = {row["what"]: row for row in result["layers"]}
    rows = [
        ("physics, 1,024 environments", 200_000, physics),
        (
            "with observations and rewards, 1,024 environments",
            100_000,
            layers["physics, observation, reward"],
        ),
        ("the gymnasium environment, one, truth left out", 3_000, layers["ServingEnv, truth=False"]),
        ("the gymnasium environment, one, with the truth in `info`", 3_000, layers["ServingEnv"]),
    ]
    lines = ["| aim | running requests | aimed at | median | met |", "|---|---|---|---|---|"]
    for what, aim, row in rows:
        met = "yes" if row["decisions_per_s"] >= aim else "no"
        lines.append(
            f"| {what} | {row['occupancy']:g} | {aim:,} /s | {row['decisions_per_s']:,} /s | {met} |"
        )
    return "\n".join(lines)


def _table(rows: list[Row]) -> str:
    lines = [
        "| what | environments | running requests in each | decisions/s | fastest | µs a decision | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {row['envs']:,} | {row['occupancy']:g} | {row['decisions_per_s']:,} | "
        f"{row['decisions_per_s_best']:,} | {1e6 / row['decisions_per_s']:.2f} | "
        f"{row['memory_mib']:.1f} MiB |"
        for row in rows
    ]
    return "\n".join(lines)
