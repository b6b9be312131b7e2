"""Cells of two recordings beside each other: worked out by hand on steps of whole milliseconds."""

from __future__ import annotations

import lzma
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU)]

from compare_profiles import (  # noqa: E402
    by_batch_size,
    cell_table,
    median_at_length,
    read_side,
    slow_steps,
    tier_ratios,
)


def recording(path: Path, *runs: tuple[int, int, Sequence[tuple[int, float]]]) -> Path:
    """Runs of (context, batch size, (num_steps, ms) of each step); requests are 100 tokens longer."""
    lines, now_s = [], 10.0
    for context, size, steps in runs:
        lines.append(f"#run,{context},{size}")
        for number, (tier, ms) in enumerate(steps):
            now_s += ms / 1e3
            lines.append(f"1,{size},{number},{now_s:.6f},{now_s:.6f},{tier + 1},,{size * (context + 100)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def hold(tier: int, *used_ms: float) -> list[tuple[int, float]]:
    """Steps at a tier of which the first three do not count."""
    return [(tier, used_ms[0])] * 3 + [(tier, ms) for ms in used_ms]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.fixture
def sides(tmp_path: Path) -> tuple[str, str]:
    first = recording(
        tmp_path / "first.csv",
        (512, 8, [*hold(0, *[5.0] * 5), *hold(1, *[6.0] * 5)]),
        (4096, 8, hold(0, *[9.0] * 5)),
    )
    second = recording(
        tmp_path / "second.csv",
        # p10 5, p25 5, median 6; tier 1: p10 6, p25 6, median 6.
        (512, 8, [*hold(0, 5, 5, 5, 6, 6, 7, 7), *hold(1, *[6.0] * 7)]),
        (4096, 8, hold(0, *[9.9] * 5)),
    )
    packed = tmp_path / "second.csv.xz"
    packed.write_bytes(lzma.compress(second.read_bytes()))
    return str(first), str(packed)


def test_the_second_beside_the_first(sides: tuple[str, str]) -> None:
    first, second = map(read_side, sides)
    rows = [cells(line) for line in by_batch_size(first, second).splitlines()[2:]]
    # Tier 0: 6 to 5 by medians, 5 to 5 by p10; tier 1: 6 to 6. Only tier 0 has two contexts.
    assert rows[0] == [
        "512",
        "8",
        "10 / 14",
        "612 / 612",
        "+0% to +20%",
        "+0% to +0%",
        "+0% to +0%",
        "+20% to +20%",
    ]
    assert rows[1][:5] == ["4096", "8", "5 / 5", "4196 / 4196", "+10% to +10%"]
    assert cells(cell_table(first, second).splitlines()[2]) == [
        "512",
        "8",
        "0",
        "5 / 7",
        "5.00 / 5.00",
        "5.00 / 6.00",
    ]
    # 1.2 times tier 0 in the first; by p10 and p25 6 / 5 too, by medians 6 / 6.
    off = {row[1]: row[3] for row in map(cells, tier_ratios(first, second).splitlines()[2:])}
    assert off == {"p10": "0.0%", "p25": "0.0%", "median": "16.7%"}


def test_requests_of_another_length_are_compared_on_the_line_between_contexts(sides: tuple[str, str]) -> None:
    first = read_side(sides[0])
    # From 5 ms at 612 tokens to 9 at 4196; half-way 7.
    assert median_at_length(first, (4096, 8, 0), (612 + 4196) / 2) == pytest.approx(7.0, abs=1e-3)
    assert median_at_length(first, (512, 8, 1), 700) is None
    assert median_at_length(first, (512, 8, 0), math.nan) is None


def test_slow_steps_and_their_stretches(sides: tuple[str, str]) -> None:
    # Of 19 steps the 6, 6, 7 and 7 ms of tier 0 are above 1.12 times 5: one stretch of 26 ms.
    assert cells(slow_steps(read_side(sides[1])).splitlines()[2]) == ["8", "19", "21%", "0.03 / 0.03 / 0.03"]


def test_a_profile_is_compared_too(sides: tuple[str, str]) -> None:
    done = subprocess.run(
        [
            sys.executable,
            GPU / "compare_profiles.py",
            "h200-llama-3.1-8b",
            sides[1],
            "--contexts",
            "512",
            "--cells",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    row = next(cells(line) for line in done.stdout.splitlines() if line.startswith("| 512 | 8 | 0 |"))
    assert row[3].endswith(" / 7")
