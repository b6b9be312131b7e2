"""The figures of ``hot_path.py`` as the tables that stand in the docs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import machine

BEGIN = "<!-- hot path: begin, written by benchmarks/hot_path.py -->"
END = "<!-- hot path: end -->"
SINCE_BEGIN = "<!-- hot path since: begin, written by benchmarks/hot_path_since.py -->"
SINCE_END = "<!-- hot path since: end -->"


def markdown(result: dict[str, Any]) -> str:
    """Machine, aims and tables."""
    plan = result["plan"]
    ping_pong = result["ping_pong_us"]
    return "\n\n".join(
        [
            f"Machine: {machine.describe(result['machine'])}",
            *(["**A quick run, to see that it works: not figures to quote.**"] if result["quick"] else []),
            f"Each figure is the median of {plan['repeats']} run(s) of {plan['seconds']:g} s; batches of "
            f"{result['batch_size']} requests, policy `{result['policy']}`.",
            _aims(result),
            f"Bare ping-pong over a unix socket in the same run: p50 {ping_pong['p50']:.0f} µs, p99 "
            f"{ping_pong['p99']:.0f} µs. With an idle caller at 5 ms the round trip takes "
            f"{result['round_trip_over_ping_pong']:.1f} times as long, submit + read "
            f"{result['submit_and_read_over_ping_pong']:.2f} times.",
            _callers(result["callers_us"]),
            _engines(result["engines"]),
        ]
    )


def write_markdown(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what stands between the page's two marks.

    Raises:
        SystemExit: the page lacks the marks.

    """
    before, found_begin, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise SystemExit(f"{page} has no place for the tables: it needs the lines {begin!r} and {end!r}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def since_markdown(document: dict[str, Any], figures: dict[str, str]) -> str:
    """What two checkouts cost beside each other: a row for each of ``figures``, with words for it, by policy.

    Medians of both, and of the rounds' ratios with their range.
    """
    found = document["rows"]
    lines = [
        "| policy | | before | after | after / before | range over the rounds |",
        "|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row["policy"] for row in found):
        for figure, words in figures.items():
            if figure not in found[0]:
                continue
            before, after = (
                [row[figure] for row in found if (row["policy"], row["checkout"]) == (policy, name)]
                for name in ("before", "after")
            )
            ratios = [b / a for a, b in zip(before, after, strict=True)]
            lines.append(
                f"| `{policy}` | {words} | {statistics.median(before):.1f} | "
                f"{statistics.median(after):.1f} | {statistics.median(ratios):.2f} | "
                f"{min(ratios):.2f} to {max(ratios):.2f} |"
            )
    commits, rounds = document["commits"], 1 + max(row["round"] for row in found)
    missing = "" if all(figure in found[0] for figure in figures) else " Own work alone was measured."
    return "\n\n".join(
        [
            f"Machine: {machine.describe(document['machine'])}",
            f"Before is commit {commits['before']}, after {commits['after']}; {rounds} round(s).{missing}",
            "\n".join(lines),
        ]
    )


def _aims(result: dict[str, Any]) -> str:
    """Each aim, what was measured, and whether it was met; the caller is idle or busy at 5 ms steps."""
    cells = {row["caller"]: row for row in result["callers_us"] if row["step_ms"] == 5.0}
    worst = {
        name: max(cells[caller][name] for caller in ("idle", "busy")) for name in ("both_p50", "both_p99")
    }
    in_time = min(cells[caller]["in_time"] for caller in ("idle", "busy"))
    knee = result["knee_engines"]
    rows = [
        ("submit + read, p50", "≤ 20 µs", f"{worst['both_p50']:.1f} µs", worst["both_p50"] <= 20),
        ("submit + read, p99", "≤ 60 µs", f"{worst['both_p99']:.1f} µs", worst["both_p99"] <= 60),
        ("decisions in time at 5 ms steps", "≥ 99.5 %", f"{in_time:.2%}", in_time >= 0.995),
        ("engines of 200 steps/s on one core", "16", str(knee), knee >= 16),
    ]
    lines = ["| aim (the worse of idle and busy caller) | aimed at | measured | met |", "|---|---|---|---|"]
    lines += [f"| {what} | {aim} | {got} | {'yes' if met else 'no'} |" for what, aim, got, met in rows]
    return "\n".join(lines)


def _callers(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| caller | step | steps/s | submit p50 / p99 | read p50 / p99 | submit + read p50 / p99 | "
        "round trip p50 / p99 | in time | CPU of the client's threads |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['caller']} | {row['step_ms']:g} ms | {1000 / row['step_ms']:.0f} | {_pair(row, 'submit')} | "
        f"{_pair(row, 'read')} | {_pair(row, 'both')} | {_pair(row, 'round_trip')} | {row['in_time']:.2%} | "
        f"{row['threads_cpu']:.1%} |"
        for row in sorted(rows, key=lambda row: ("idle busy python".index(row["caller"]), -row["step_ms"]))
    ]
    return "\n".join(lines)


def _engines(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| engines at 200 steps/s | sidecar CPU (of one core) | steps decided on | in time | "
        "round trip p50 / p99 |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['engines']} | {row['cpu']:.0%} | {row['decided']:.2%} | {row['in_time']:.2%} | "
        f"{_pair(row, 'round_trip')} |"
        for row in rows
    ]
    return "\n".join(lines)


def _pair(row: dict[str, Any], name: str) -> str:
    p50, p99 = row[f"{name}_p50"], row[f"{name}_p99"]
    digits = 1 if p99 < 100 else 0
    return f"{p50:.{digits}f} / {p99:.{digits}f} µs"
