"""Our ``ema`` and SGLang's own rule, driven with the same results: every tier of every step is equal."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, EngineSpec, PolicyContext, StepObservation

pytestmark = pytest.mark.sglang

RESULTS = 10_000
BATCH_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 25, 31, 32, 33, 48, 63, 64, 65, 100, 200)
GRAPHS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128)
CONFIGS: dict[str, dict[str, Any] | None] = {
    "SGLang's own": None,
    "quick": {
        "1": {"candidate_steps": [0, 1, 3]},
        "ema_alpha": 0.5,
        "warmup_batches": 2,
        "update_interval": 1,
    },
    "slots apart": {
        "4": {
            "candidate_steps": [5, 2, 0],
            "down_hysteresis": 0.1,
            "up_hysteresis": -0.3,
            "update_interval": 2,
        },
        "20": {"candidate_steps": [0, 1, 2, 3, 4, 5], "ema_alpha": 0.9, "warmup_batches": 0},
        "100": {"candidate_steps": [2]},
        "warmup_batches": 3,
        "note": "keys that SGLang does not know are left alone",
    },
    "ceiling": {
        "1": {"candidate_steps": [1, 2, 4, 8], "ceiling_coeff": 1.3},
        "8": {"candidate_steps": [0, 2, 4, 8], "ceiling_coeff": 0.7, "down_hysteresis": -1.5},
        "ema_alpha": 0.4,
        "update_interval": 3,
    },
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang logs each switch."""
    caplog.set_level(logging.WARNING)


@pytest.mark.parametrize("graphs", [(), GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_every_tier_is_equal(tmp_path: Path, seed: int, name: str, graphs: tuple[int, ...]) -> None:
    from sglang.srt.speculative.adaptive_spec_params import (
        AdaptiveSpeculativeParams,
        resolve_candidate_steps_from_config,
    )

    path = None
    if CONFIGS[name] is not None:
        path = str(tmp_path / "adaptive.json")
        Path(path).write_text(json.dumps(CONFIGS[name]))
    rng = np.random.default_rng(seed)
    tiers = tuple(resolve_candidate_steps_from_config(path))
    initial = int(rng.choice(tiers))

    theirs = AdaptiveSpeculativeParams(initial, path)
    theirs.set_cuda_graph_bs(list(graphs) or None)
    config = f":config={path}" if path else ""
    context = PolicyContext(EngineSpec(tiers, graphs), rng, lambda: 0.0)
    ours = make_policy(f"ema:initial_num_steps={initial}{config}", context)

    used = set()
    switches = 0
    for step_id in range(RESULTS):
        # Now and then acceptance changes: from nothing accepted to all of it.
        if step_id % 250 == 0:
            acceptance = rng.choice([0.0, 0.3, 0.6, 0.9, 1.0])
        batch_size = int(rng.choice(BATCH_SIZES))
        num_steps = theirs.get_steps_for_batch(batch_size)
        choice = ours.choose(BatchView(batch_size))
        assert [choice.num_steps_for(b) for b in BATCH_SIZES] == [
            theirs.get_steps_for_batch(b) for b in BATCH_SIZES
        ]
        used.add(num_steps)
        runs = rng.random((batch_size, num_steps)) < acceptance
        accepted = np.cumprod(runs, axis=1).sum(axis=1).astype(np.uint8)
        switches += theirs.on_verify_complete(accepted.tolist(), batch_size) is not None
        ours.observe(observation(step_id, batch_size, num_steps, accepted))
    assert used == set(tiers)
    assert switches > 100


@pytest.mark.parametrize("seed", range(3))
def test_slots_agree_on_the_average_to_the_last_bit(seed: int) -> None:
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    rng = np.random.default_rng(seed)
    theirs = AdaptiveSpeculativeParams(3)
    context = PolicyContext(EngineSpec((0, 1, 3, 5, 7)), rng, lambda: 0.0)
    ours = make_policy("ema", context)
    for step_id in range(1000):
        batch_size = int(rng.choice(BATCH_SIZES))
        num_steps = theirs.get_steps_for_batch(batch_size)
        accepted = rng.integers(0, num_steps + 1, batch_size).astype(np.uint8)
        theirs.on_verify_complete(accepted.tolist(), batch_size)
        ours.observe(observation(step_id, batch_size, num_steps, accepted))
        expected = {f"accepted_drafts_from_batch_{b}": s.ema_accept_len for b, s in theirs._slots.items()}
        assert ours.estimates() == expected


def observation(step_id: int, batch_size: int, num_steps: int, accepted: np.ndarray) -> StepObservation:
    no_slots, no_generations = np.zeros(0, np.uint16), np.zeros(0, np.uint8)
    return StepObservation(step_id, batch_size, num_steps, accepted, no_slots, no_generations, 0, 0)
