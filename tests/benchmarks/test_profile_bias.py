"""Which steps count in the search for what biases the profile command, and what is said of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU), str(GPU / "plugin")]

from figures import Step  # noqa: E402
from host import HostWatch, _is_ours  # noqa: E402
from profile_bias import Usable, cell, slices, tables, usable_steps  # noqa: E402
from rules_sidecar import Turns  # noqa: E402


def steps(*made: tuple[int, int, int], ms: int = 5) -> list[Step]:
    """Steps of (step id, batch size, num_steps), 5 ms apart."""
    return [Step(n * ms / 1e3, i, b, b, k, b, 0, 1, 1, 0) for n, (i, b, k) in enumerate(made)]


def test_a_step_counts_after_three_alike_and_not_before_a_prefill() -> None:
    # Steps 1 to 6 are alike; 7 is a prefill, so 6 waited for its launch; 8 to 13 are alike again, and what
    # follows 13 is not known.
    made = [(i, 8, 3) for i in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13)]
    found = list(usable_steps(steps(*made)))
    # Step 4 is the first with three before it that were contiguous; its place in the hold is the fourth. The
    # hold goes on through the prefill, of whose place nothing is known.
    assert [step.place for step in found] == [4, 5, 10, 11]
    assert {round(step.step_ms, 6) for step in found} == {5.0}


def test_a_switch_begins_a_hold_and_another_batch_size_does_not() -> None:
    made = [(1, 8, 3), *((i, 8, 1) for i in range(2, 8)), *((i, 7, 1) for i in range(8, 13))]
    found = [(step.batch_size, step.place) for step in usable_steps(steps(*made))]
    # The hold of tier 1 begins with step 2. Steps 5 to 7 have three before them at size 8, step 11 at 7.
    assert found == [(8, 4), (8, 5), (8, 6), (7, 10)]


def test_a_cell_says_where_in_the_hold_steps_are_slow() -> None:
    slow = [Usable(8, 3, 5, 9.0)] * 3
    fast = [Usable(8, 3, place, 6.0) for place in (6, 6, 6, 20, 20, 20, 20)]
    found = cell([*slow, *fast])
    assert (found["n"], found["median_ms"], found["p10_ms"], found["p90_ms"]) == (10, 6.0, 6.0, 9.0)
    assert (found["by_place"]["5"], found["by_place"]["6"], found["by_place"]["7"]) == (9.0, 6.0, None)
    assert found["late"] == {"17-32": 6.0, "33-64": None}
    of = {"variant": "batch-16", "batch_size": 8, "num_steps": 3, "median_by_pass_ms": {"0": 6.0}}
    assert "| batch-16 | 6.00 (6.00 to 9.00); 6.00; 10 |" in tables({"cells": [{**of, **found}]})


def test_a_slice_is_beside_what_the_host_said_of_it() -> None:
    cells = [
        {"variant": variant, "batch_size": 8, "num_steps": tier, "median_by_pass_ms": medians}
        for variant, tier, medians in (
            ("batch-16", 0, {"0": 5.0, "1": 6.0}),
            ("batch-16", 3, {"0": 10.0, "1": 14.0}),
            ("single-16", 0, {"0": 5.5}),
            ("single-16", 3, {"0": 10.5}),
        )
    ]
    said = slices(
        {
            "cells": cells,
            "slices": [
                {"variant": variant, "batch_size": 8, "pass": number, "spin_ms": spin, "scheduler_waits": 0.0}
                for variant, number, spin in (
                    ("batch-16", 0, 1.0),
                    ("single-16", 0, 1.2),
                    ("batch-16", 1, 1.1),
                )
            ],
        }
    )
    # Over 5 and 10 ms: 1 and 1; 1.1 and 1.05; 1.2 and 1.4. Ranks 0, 1, 2 against 0, 2, 1: 1 - 6 * 2 / 24.
    assert "| 0 | batch-16 | 8 | +0% | 1.0 | 0.0 |" in said
    assert "| 0 | single-16 | 8 | +8% | 1.2 | 0.0 |" in said
    assert "| 1 | batch-16 | 8 | +30% | 1.1 | 0.0 |" in said
    assert said.endswith("by batch size: 8: +0.50.")


def test_turns_are_read_from_a_text() -> None:
    config = Turns.Config.from_arguments(("16", "0,1,3"))
    assert (config.steps, config.tiers) == (16, (0, 1, 3))


def test_only_schedulers_that_this_process_started_are_watched() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert _is_ours(child.pid)
        child.communicate(b"\n")
    assert not _is_ours(child.pid)
    assert not _is_ours(os.getppid())
    watch = HostWatch()
    watch.begin()
    assert "scheduler_cores" not in watch.end()
