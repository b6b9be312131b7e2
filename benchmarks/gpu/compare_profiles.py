"""compare_profiles.py   Two profiles, or the recordings behind them, cell by cell.

    python benchmarks/gpu/compare_profiles.py h200-llama-3.1-8b steps.jsonl.xz
    python benchmarks/gpu/compare_profiles.py old512.csv,old4096.csv steps.jsonl.xz --cells --contexts 512

Each of the two is a profile (a bundled name or a file) or recordings, with commas between them, that may be
packed with xz; a profile does not hold lengths, nor quantiles but p10 and p90. Prints the second beside the
first by context and batch size, how near each tier's time to tier 0's is to the first's by three quantiles,
and of recordings which steps are slow and for how long at a stretch.
"""

from __future__ import annotations

import argparse
import lzma
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from report_tables import table  # noqa: E402

from specgov.env.calibration import MIN_STEPS, OUTLIER_RATIO, cell_contexts, running_sizes  # noqa: E402
from specgov.env.recording import Recording, read_recording  # noqa: E402
from specgov.policies.profile import load_profile  # noqa: E402

SLOW = 1.12
"""A step that takes so many times its cell's p10 is slow."""
HOST_BOUND = 32
"""Up to this batch size the host sets the pace of a small model."""

Key = tuple[int, int, int]
"""Context, padded batch size, num_steps."""


@dataclass(frozen=True)
class Cell:
    """Step times (ms); ``quantiles`` by name; ``tokens``: the requests' mean length, nan where not known."""

    n: int
    quantiles: dict[str, float]
    tokens: float


@dataclass(frozen=True)
class Side:
    """One of the two; ``recordings`` is empty for a profile."""

    cells: dict[Key, Cell]
    recordings: tuple[Recording, ...] = ()


def read_side(text: str) -> Side:
    """A profile or recordings, of the server that can speculate."""
    paths = [Path(part) for part in text.split(",")]
    if not text.endswith((".jsonl", ".csv", ".xz")):
        grid = load_profile(text).grid
        return Side(
            {
                (int(grid.context_tokens[c]), int(grid.batch_sizes[b]), int(grid.num_steps[k])): Cell(
                    int(grid.count[c, b, k]),
                    {"p10": float(grid.p10_ms[c, b, k]), "median": float(grid.median_ms[c, b, k])},
                    math.nan,
                )
                for c, b, k in np.argwhere(grid.measured)
            }
        )
    recordings = tuple(each for each in map(_recording, paths) if each.can_speculate)
    return Side(cells_of(recordings), recordings)


def _recording(path: Path) -> Recording:
    if path.suffix != ".xz":
        return read_recording(path)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.stem
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        return read_recording(plain)


def keys_of(recording: Recording) -> list[Key]:
    """The cell of each step."""
    sizes = running_sizes(recording)
    contexts = cell_contexts(recording, sizes)
    return [(int(c), int(b), int(k)) for c, b, k in zip(contexts, sizes, recording.num_steps, strict=True)]


def cells_of(recordings: Sequence[Recording]) -> dict[Key, Cell]:
    """The cells of recordings, under calibration's rules of what counts."""
    steps: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for recording in recordings:
        lengths = recording.sum_seq_len_tokens / running_sizes(recording)
        for key, ms, tokens in zip(keys_of(recording), recording.step_ms, lengths, strict=True):
            steps[key].append((float(ms), float(tokens)))
    cells = {}
    for key, found in sorted(steps.items()):
        values = np.array(found)
        step_ms = values[:, 0]
        values = values[np.abs(np.log(step_ms / np.median(step_ms))) <= math.log(OUTLIER_RATIO)]
        if len(values) >= MIN_STEPS:
            quantiles = {"p10": 0.1, "p25": 0.25, "median": 0.5}
            said = {name: float(np.quantile(values[:, 0], q)) for name, q in quantiles.items()}
            cells[key] = Cell(len(values), said, float(values[:, 1].mean()))
    return cells


def by_batch_size(first: Side, second: Side) -> str:
    """The second over the first, least to largest over the tiers of each context and batch size."""
    both = sorted(set(first.cells) & set(second.cells))
    rows = []
    for context, size in sorted({key[:2] for key in both}):
        pairs = [(first.cells[key], second.cells[key]) for key in both if key[:2] == (context, size)]
        known = [(key, median_at_length(first, key, second.cells[key].tokens)) for key in both]
        at_length = [
            second.cells[key].quantiles["median"] / ms
            for key, ms in known
            if key[:2] == (context, size) and ms
        ]
        rows.append(
            (
                str(context),
                str(size),
                f"{sum(a.n for a, _ in pairs)} / {sum(b.n for _, b in pairs)}",
                " / ".join(
                    _whole(statistics.fmean(c.tokens for c in side)) for side in zip(*pairs, strict=True)
                ),
                _range([b.quantiles["median"] / a.quantiles["median"] for a, b in pairs]),
                _range([b.quantiles["p10"] / a.quantiles["median"] for a, b in pairs]),
                _range([b.quantiles["p10"] / a.quantiles["p10"] for a, b in pairs]),
                _range(at_length),
            )
        )
    head = ("context", "batch size", "steps", "tokens a request", "median to median")
    return table((*head, "p10 to the first's median", "p10 to p10", "median to median at equal length"), rows)


def median_at_length(side: Side, key: Key, tokens: float) -> float | None:
    """The median of a cell if its requests had this mean length: on the line through that of another context.

    None where it has no other context, or lengths are not known.
    """
    here = side.cells[key]
    there = next((cell for other, cell in side.cells.items() if other != key and other[1:] == key[1:]), None)
    if there is None or math.isnan(tokens + here.tokens + there.tokens):
        return None
    slope = (there.quantiles["median"] - here.quantiles["median"]) / (there.tokens - here.tokens)
    return here.quantiles["median"] + slope * (tokens - here.tokens)


def cell_table(first: Side, second: Side) -> str:
    """Every cell that both have."""
    rows = []
    for key in sorted(set(first.cells) & set(second.cells)):
        a, b = first.cells[key], second.cells[key]
        times = [f"{a.quantiles[name]:.2f} / {b.quantiles[name]:.2f}" for name in ("p10", "median")]
        rows.append((*map(str, key), f"{a.n} / {b.n}", *times))
    return table(("context", "batch size", "num_steps", "steps", "p10, ms", "median, ms"), rows)


def tier_ratios(first: Side, second: Side) -> str:
    """How far each tier's time over tier 0's, by a quantile of the second, is from the first's by medians."""
    names = [
        name for name in ("p10", "p25", "median") if all(name in c.quantiles for c in second.cells.values())
    ]
    rows = []
    for said, host_bound in ((f"to {HOST_BOUND}", True), (f"above {HOST_BOUND}", False)):
        keys = [
            key
            for key in set(first.cells) & set(second.cells)
            if key[2] and (key[1] <= HOST_BOUND) == host_bound
            if all((*key[:2], 0) in side.cells for side in (first, second))
        ]
        for name in names if keys else []:
            off = sorted(
                abs(_over_tier_0(second, key, name) / _over_tier_0(first, key, "median") - 1) for key in keys
            )
            middle, most = statistics.median(off), off[-1]
            rows.append(
                (said, name, str(len(keys)), f"{middle:.1%}", f"{off[len(off) * 9 // 10]:.1%}", f"{most:.1%}")
            )
    return table(("batch sizes", "by", "cells", "median", "p90", "largest"), rows)


def _over_tier_0(side: Side, key: Key, name: str) -> float:
    return side.cells[key].quantiles[name] / side.cells[*key[:2], 0].quantiles[name]


def slow_steps(side: Side) -> str:
    """By batch size, the share of slow steps, and how long they are slow in a row."""
    slow: dict[int, list[bool]] = defaultdict(list)
    stretches: dict[int, list[float]] = defaultdict(list)
    for recording in side.recordings:
        last: Key | None = None
        for key, ms in zip(keys_of(recording), recording.step_ms, strict=True):
            if key not in side.cells:
                continue
            is_slow = bool(ms > SLOW * side.cells[key].quantiles["p10"])
            if is_slow and last is not None and last[1] == key[1] and slow[key[1]] and slow[key[1]][-1]:
                stretches[key[1]][-1] += ms
            elif is_slow:
                stretches[key[1]].append(float(ms))
            slow[key[1]].append(is_slow)
            last = key
    rows = [
        (
            str(size),
            str(len(found)),
            f"{statistics.fmean(found):.0%}",
            " / ".join(f"{np.quantile(stretches[size] or [0.0], q) / 1e3:.2f}" for q in (0.5, 0.9, 1.0)),
        )
        for size, found in sorted(slow.items())
    ]
    return table(("batch size", "steps", "slow", "s in a row: median / p90 / longest"), rows)


def _range(values: Sequence[float]) -> str:
    # Adding 0 makes a zero of either sign one without.
    bounds = [round(bound(values) - 1, 2) + 0.0 for bound in (min, max) if values]
    return " to ".join(f"{share:+.0%}" for share in bounds)


def _whole(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--contexts", type=int, nargs="+", help="only these")
    parser.add_argument("--cells", action="store_true", help="every cell, too")
    options = parser.parse_args()
    first, second = (
        Side(
            {k: c for k, c in side.cells.items() if not options.contexts or k[0] in options.contexts},
            side.recordings,
        )
        for side in map(read_side, (options.first, options.second))
    )
    print(f"The second over the first, least to largest over the tiers:\n\n{by_batch_size(first, second)}\n")
    if options.cells:
        print(f"First / second:\n\n{cell_table(first, second)}\n")
    print(f"Each tier's time to tier 0's, off the first's by medians:\n\n{tier_ratios(first, second)}\n")
    if second.recordings:
        print(f"Slow steps of the second, above {SLOW} times their cell's p10:\n\n{slow_steps(second)}")


if __name__ == "__main__":
    main()
