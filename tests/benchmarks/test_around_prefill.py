"""What prefill does to the steps around it: worked out by hand on a log of a few steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks" / "gpu")]

from around_prefill import clean_times, held_up, longest, prefill_ms, steps_of  # noqa: E402


def test_a_step_that_waited_for_a_prefill_is_found_and_the_prefill_is_measured(tmp_path: Path) -> None:
    # Steps of 10 ms; iteration 21 is a prefill of 25 ms. Its launch holds up the result of 20 by 15 ms; the
    # other 10 are in the time to the result of 22.
    now_ms, lines = 0.0, ['{"kind": "log"}']
    for step_id in [*range(1, 21), *range(22, 35)]:
        took_ms = {20: 25.0, 22: 20.0}.get(step_id, 10.0)
        now_ms += took_ms
        row = {
            "kind": "step",
            "time_s": now_ms * 1e-3,
            "step_id": step_id,
            "batch_size": 8,
            "padded_batch_size": 8,
            "num_steps": 3,
            "sum_seq_len_tokens": 4000,
            "step_ms": None if step_id == 22 else took_ms,
            "flags": ["after_prefill"] if step_id == 22 else [],
        }
        lines.append(json.dumps(row))
    lines.append(json.dumps({**row, "step_id": 35, "flags": ["warm_up"]}))
    log = tmp_path / "decisions1.jsonl"
    log.write_text("\n".join(lines))
    logs = [steps_of(log)]
    assert len(logs[0]) == 33
    clean = clean_times(logs)
    assert {row["step_ms"] for row in clean[8, 3]} == {10.0}
    usual_ms = {(8, 3): 10.0}
    found = held_up(logs, usual_ms)
    assert (found["before_a_prefill"], found["timed_steps"], found["share"]) == (1, 32, round(1 / 32, 4))
    assert found["ratio_p10_p50_p90"] == [2.5, 2.5, 2.5]
    assert found["share_of_time"] == pytest.approx(15 / (31 * 10 + 25), abs=1e-4)
    # Steps 20, 22 and 23 took 25 + 20 + 10 ms, and would have taken 30.
    assert prefill_ms(logs, usual_ms) == {"1": {"times": 1, "median_ms_each": 25.0}}
    assert longest(logs)[0] == {"prefills": 1, "s": 0.02}
