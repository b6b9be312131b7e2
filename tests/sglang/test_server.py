"""A real SGLang server whose tiers a rule of ours chooses: every token is checked, and every decision."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sglang

FIRST, LAST = 10, 245  # the target's cycle of tokens
ACCEPTED, REJECTED = 10, 128  # last tokens of prompts whose next 100 drafts are all right, or all wrong
TABLE = {
    "1": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
    "4": {"candidate_steps": [0, 1]},
    "ema_alpha": 0.5,
    "warmup_batches": 2,
    "update_interval": 2,
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(TABLE))
    return path


def check(server: Any, last_token: int, tokens: int) -> int:
    """Every token of an answer is the target's; returns the decode steps that it took."""
    answer = server.generate(last_token, tokens)
    cycle = LAST + 1 - FIRST
    assert answer["output_ids"] == [FIRST + (last_token + 1 + i - FIRST) % cycle for i in range(tokens)]
    return answer["meta_info"]["spec_verify_ct"]


def check_eight_at_once(server: Any, tokens: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: check(server, 20 + 25 * i, tokens), range(8)))


def test_a_schedule_decides_every_step_of_a_server(serve: Any, table: Path) -> None:
    server = serve("schedule:1=3:2=1:4=0", table)
    # One request runs at 3. Of 61 tokens the first comes from prefill; then a step gives 4 tokens where all
    # drafts are accepted and 1 where none is.
    assert check(server, ACCEPTED, 61) == math.ceil(60 / 4)
    assert check(server, REJECTED, 61) == 60
    check_eight_at_once(server, 80)
    launches = [line for line in server.trace() if "num_steps" in line]
    results = [line for line in server.trace() if "accepted" in line]
    for launch, result in zip(launches, results, strict=True):
        batch_size = launch["batch_size"]
        assert launch["num_steps"] == (3 if batch_size == 1 else 1 if batch_size < 4 else 0)
        assert max(result["accepted"]) <= launch["num_steps"]
    assert {0, 3} <= {launch["num_steps"] for launch in launches}


def test_ema_decides_in_a_server_as_sglangs_own_rule_would(serve: Any, table: Path) -> None:
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    server = serve(f"ema:config={table}:initial_num_steps=3", table)
    check(server, ACCEPTED, 60)
    check(server, REJECTED, 60)
    check(server, 90, 120)  # from tokens with right drafts to tokens with wrong ones
    check_eight_at_once(server, 40)
    theirs = AdaptiveSpeculativeParams(3, str(table))
    tiers = set()
    for line in server.trace():
        if "num_steps" in line:
            assert line["num_steps"] == theirs.get_steps_for_batch(line["batch_size"])
            tiers.add(line["num_steps"])
        else:
            theirs.on_verify_complete(line["accepted"], line["batch_size"])
    assert tiers == {0, 1, 3}
