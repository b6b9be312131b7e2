"""From the lines that the plugin recorded to the figures of a run."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

BIN_S = 0.25
"""Of the timeline."""
LONGEST_GAP_S = 0.25
"""A longer gap between results is idleness, not a step."""


class Step(NamedTuple):
    """See the plugin's ``record.py``."""

    t_s: float
    step_id: int
    batch_size: int
    live: int
    num_steps: int
    tokens: int
    context_tokens: int
    chosen_by: int
    decision_id: int
    waiting: int


@dataclass
class Recorded:
    """A run's lines; ``fills``: time, step id, requests; the rest by request number."""

    steps: list[Step] = field(default_factory=list)
    fills: list[tuple[float, int, int]] = field(default_factory=list)
    first_s: dict[int, float] = field(default_factory=dict)
    done: dict[int, tuple[float, int]] = field(default_factory=dict)


class RecordTail:
    """Reads what a recorder's file gains."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0

    def read(self) -> dict[str, Recorded]:
        """The runs in the whole lines since the last call, by name."""
        runs: dict[str, Recorded] = defaultdict(Recorded)
        if not self._path.exists():
            return runs
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.decode().splitlines():
            kind, run, *values = line.split(",")
            if kind == "step":
                runs[run].steps.append(Step(float(values[0]), *map(int, values[1:])))
            elif kind == "fill":
                runs[run].fills.append((float(values[0]), int(values[1]), int(values[2])))
            elif kind == "first":
                runs[run].first_s[int(values[1])] = float(values[0])
            elif kind == "done":
                runs[run].done[int(values[1])] = (float(values[0]), int(values[2]))
        return runs


def figures(
    recorded: Recorded, sent_s: dict[int, float], began_s: float, count_from_s: float, duration_s: float
) -> dict[str, Any]:
    """The figures of a run, of the time that counts: ``count_from_s`` to ``duration_s`` after ``began_s``."""
    start_s, end_s = began_s + count_from_s, began_s + duration_s
    steps = [step for step in recorded.steps if start_s <= step.t_s < end_s]
    if not steps:
        raise ValueError("no step was recorded in the time that counts")
    tokens = sum(step.tokens for step in steps)
    ttft_ms = [
        1e3 * (at_s - sent_s[number])
        for number, at_s in recorded.first_s.items()
        if number in sent_s and start_s <= at_s < end_s
    ]
    tpot_ms = [
        1e3 * (at_s - recorded.first_s[number]) / (made - 1)
        for number, (at_s, made) in recorded.done.items()
        if start_s <= at_s < end_s and made > 1 and number in recorded.first_s
    ]
    chosen = Counter(step.chosen_by for step in steps)
    return {
        "output_tokens_per_s": tokens / (end_s - start_s),
        "steps": len(steps),
        "requests_done": len(tpot_ms),
        "tpot_ms": quantiles(tpot_ms),
        "ttft_ms": quantiles(ttft_ms),
        "tier_time_shares": tier_time_shares(steps),
        "tier_switches": sum(a.num_steps != b.num_steps for a, b in pairwise(steps)),
        "steps_by_chooser": {_CHOOSERS.get(kind, str(kind)): count for kind, count in sorted(chosen.items())},
        "most_waiting": max(step.waiting for step in steps),
        "step_ms": step_times(steps),
        "timeline": timeline(recorded.steps, began_s, duration_s),
    }


_CHOOSERS = {
    0: "not governed",
    1: "sidecar's decision",
    2: "rule in the engine",
    3: "SGLang's own policy",
}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50 and p99; empty where there are no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 3) for q in (50, 99)}


def tier_time_shares(steps: Sequence[Step]) -> dict[str, float]:
    """The share of decode time at each tier; a step's time is that since the result before it."""
    spent: dict[int, float] = defaultdict(float)
    for before, step in pairwise(steps):
        spent[step.num_steps] += min(step.t_s - before.t_s, LONGEST_GAP_S)
    total = sum(spent.values()) or 1.0
    return {str(tier): round(spent[tier] / total, 4) for tier in sorted(spent)}


def timeline(steps: Sequence[Step], began_s: float, duration_s: float) -> dict[str, list[Any]]:
    """Means over stretches of ``BIN_S``: tier, batch size, output rate; None where nothing ran."""
    bins: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        bins[int((step.t_s - began_s) / BIN_S)].append(step)
    count = max(1, round(duration_s / BIN_S))
    found = [bins.get(number, []) for number in range(count)]

    def mean(values: list[int]) -> float | None:
        return round(statistics.fmean(values), 3) if values else None

    return {
        "t_s": [number * BIN_S for number in range(count)],
        "num_steps": [mean([s.num_steps for s in inside]) for inside in found],
        "batch_size": [mean([s.batch_size for s in inside]) for inside in found],
        "output_tokens_per_s": [sum(s.tokens for s in inside) / BIN_S for inside in found],
    }


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the sidecar's decision log says of a run's steps."""
    lags = Counter(row["lag_steps"] for row in rows if row["lag_steps"] is not None)
    followed = sum(bool(row["followed_decision_id"]) for row in rows)
    return {
        "steps_reported": len(rows),
        "reports_dropped": sum(row.get("reports_dropped", 0) for row in rows),
        "followed_share": round(followed / len(rows), 5) if rows else None,
        "lag_steps": {str(lag): count for lag, count in sorted(lags.items())},
        "reasons": dict(Counter(row["decision"]["reason"] for row in rows if row["decision"])),
    }


def step_times(steps: Sequence[Step], least: int = 10) -> dict[str, dict[str, tuple[float, int]]]:
    """Median duration (ms) and count of steps, by batch size and num_steps, where there are ``least``.

    A step counts whose predecessor was the iteration before it, of the same batch size and tier.
    """
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for before, step in pairwise(steps):
        alike = (before.batch_size, before.num_steps) == (step.batch_size, step.num_steps)
        if alike and step.step_id == before.step_id + 1:
            found[step.batch_size, step.num_steps].append(1e3 * (step.t_s - before.t_s))
    cells: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for (size, tier), ms in sorted(found.items()):
        if len(ms) >= least:
            cells[str(size)][str(tier)] = (round(statistics.median(ms), 3), len(ms))
    return cells


def recording(recorded: Recorded, context_tokens: int, batch_size: int) -> list[str]:
    """The steps of a batch on a server without speculation, as lines of a recording (env/recording.py)."""
    decode = {
        s.step_id: f"1,{s.batch_size},{s.step_id},{s.t_s:.6f},{s.t_s:.6f},0,,{s.context_tokens}"
        for s in recorded.steps
    }
    prefill = {
        step_id: f"0,{requests},{step_id},{t_s:.6f},{t_s:.6f},0,,0"
        for t_s, step_id, requests in recorded.fills
    }
    lines = [line for _, line in sorted({**prefill, **decode}.items())]
    return [f"#run,{context_tokens},{batch_size}", *lines]
