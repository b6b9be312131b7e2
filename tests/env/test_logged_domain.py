"""A decision log as a domain to train on: load, acceptance and step times as the log has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgov.env.domains import domain_of
from specgov.env.logged_domain import OUTPUT_TOKENS, PIECES, STRETCHES
from specgov.env.recording import RecordingError
from specgov.env.scenario_schema import ClosedTable
from specgov.env.simulation import ServingSimulation


def write_log(path: Path, steps: int = 960, tiers: tuple[int, ...] = (0, 1, 3), **engine: Any) -> Path:
    """Ten steps a second. Batch size 4 in the first half and 16 in the second, with 4 waiting there too.

    Tiers 3 and 0 in turns of 20 steps; of four requests 3, 2 and 1 pass positions 1, 2 and 3 in the first
    half, and none in the second. A step takes 5 ms at tier 0 and 8 at 3, and 1 ms more in the second half.
    """
    rows: list[dict[str, Any]] = [
        {"kind": "log", "schema": "specgov.decision_log", "schema_version": 2, "time_s": 0.0},
        {"kind": "engine", "time_s": 0.0, "engine_id": "e", "tiers": list(tiers), "max_running_requests": 32}
        | {"decision_lag_steps": 1, "draft_kv_stays_warm": False, "kv_capacity_tokens": 0, "profile": ""}
        | engine,
    ]
    for step_id in range(1, steps + 1):
        late = step_id > steps // 2
        tier = 3 if (step_id - 1) // 20 % 2 == 0 else 0
        quarter = 4 if late else 1
        accepted = [4 * quarter] if tier == 0 else [16, 0, 0, 0] if late else [1, 1, 1, 1]
        rows.append(
            {
                "kind": "step", "time_s": step_id / 10, "engine_id": "e", "step_id": step_id,
                "batch_size": 4 * quarter, "padded_batch_size": 0, "num_steps": tier, "accepted": accepted,
                "sum_seq_len_tokens": 4 * quarter * 512, "waiting_requests": 4 if late else 0,
                "step_ms": 5.0 + tier + (1.0 if late else 0.0), "flags": [],
            }
        )  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_load_is_the_logs(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl")
    table = domain_of(f"log:{path}").scenario.table
    assert isinstance(table.arrivals, ClosedTable)
    # 48 pieces of 2 s; 4 running in the first half, 16 running and 4 waiting in the second.
    assert table.arrivals.concurrency == (4,) * (PIECES // 2) + (20,) * (PIECES // 2)
    assert table.arrivals.period_s == pytest.approx(95.9)  # from the first step at 0.1 s to the last at 96 s
    assert table.engine.tiers == (0, 1, 3)
    assert (table.engine.max_running_requests, table.engine.decision_lag_steps) == (32, 1)
    assert table.engine.draft_kv_stays_warm is False


def test_acceptance_is_that_of_each_stretch(tmp_path: Path) -> None:
    """Positions 1, 2, 3 by hand: 3/4, 2/3, 1/2 in the first half. In the second nothing passes position 1, so
    deeper ones were never reached there, and have the whole log's 2/3 and 1/2.
    """
    classes = domain_of(f"log:{write_log(tmp_path / 'log.jsonl')}").scenario.table.classes
    assert len(classes) == STRETCHES
    first, last = classes[0], classes[-1]
    assert first.conditional_acceptance == pytest.approx((3 / 4, 2 / 3, 1 / 2))
    assert last.conditional_acceptance == pytest.approx((0.0, 2 / 3, 1 / 2))
    assert (first.share, last.share) == ((1, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1))
    # A context of 512 on average: prompt and half of the output.
    assert first.output.median_tokens == OUTPUT_TOKENS
    assert first.prompt.median_tokens == 512 - OUTPUT_TOKENS / 2


def test_step_times_are_calibrated_and_believed(tmp_path: Path) -> None:
    domain = domain_of(f"log:{write_log(tmp_path / 'log.jsonl')}")
    for batch, tier, ms in ((4, 0, 5.0), (4, 3, 8.0), (16, 0, 6.0), (16, 3, 9.0)):
        assert float(domain.believed.step_ms(batch, tier, batch * 512)) == pytest.approx(ms, rel=1e-3)


def test_it_can_be_played(tmp_path: Path) -> None:
    domain = domain_of(f"log:{write_log(tmp_path / 'log.jsonl')}")
    simulation = ServingSimulation(
        domain.scenario, 4, 0, "rate", {}, duration_s=1e6, step_time=domain.believed
    )
    simulation.reset(np.ones(4, np.bool_))
    tokens = sum(int(simulation.step(np.full(4, 2)).step.output_tokens.sum()) for _ in range(50))
    assert tokens > 0


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ({"steps": 60}, "60 steps are too few"),
        ({"tiers": (0, 3, 9)}, "up to 7"),
    ],
)
def test_a_log_that_cannot_be_used_says_why(tmp_path: Path, log: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordingError, match=said):
        domain_of(f"log:{write_log(tmp_path / 'log.jsonl', **log)}")


def test_a_thin_log_takes_its_engines_profile_or_says_so(tmp_path: Path) -> None:
    def without_tier_0(path: Path) -> Path:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"num_steps": 0' not in line), encoding="utf-8")
        return path

    thin = without_tier_0(write_log(tmp_path / "thin.jsonl"))
    with pytest.raises(RecordingError, match=r"num_steps 0, without which .* names no bundled profile"):
        domain_of(f"log:{thin}")
    named = without_tier_0(write_log(tmp_path / "named.jsonl", profile="h200-llama-3.1-8b"))
    assert domain_of(f"log:{named}").scenario.profile.name == "h200-llama-3.1-8b"
