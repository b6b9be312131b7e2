"""The watched folder of a bundle: what is swapped in, and what is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_bench import Bench, write_bundle

from specgov.controller.bundles import watched_folder
from specgov.controller.config import ServeConfig
from specgov.policies.bundle import Bundle, BundleError, Card, save_bundle
from specgov.policies.network import following_the_model
from specgov.policies.ppo import Ppo
from specgov.policies.types import BatchView

Make = Callable[..., Any]


@pytest.fixture
def bench(make_info: Make, make_report: Make) -> Callable[..., Bench]:
    return lambda **config: Bench(make_info, make_report, **config)


def test_only_a_bundles_folder_is_watched(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a", 3)
    assert watched_folder(ServeConfig(policy=f"ppo:{tmp_path}/a")) == f"{tmp_path}/a"
    for policy in ("greedy", "ppo", "ppo:default", "ppo:mine@1"):
        assert watched_folder(ServeConfig(policy=policy)) is None


def test_a_changed_bundle_is_swapped_in(bench: Make, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "a", 3)
    one = bench(policy=f"ppo:{folder}", bundles={"trial_steps": 2})
    second = one.connect(engine_id="engine-2")
    other = one.connect(engine_id="engine-3")
    other.set_policy("static:1")
    one.watcher.look()  # as at the start
    assert one.step().num_steps == 3
    write_bundle(folder, 5)
    one.watcher.look()
    assert one.step().num_steps == 5
    assert (second.state().trial_steps_left, other.policy_text) == (2, "static:1")
    late = one.connect(engine_id="engine-4")
    assert isinstance(late.policy, Ppo)
    assert late.policy.choose(BatchView(4)).num_steps_for(4) == 5


@pytest.mark.parametrize("damage", ["half written", "newer schema", "not finite", "gone"])
def test_a_bundle_that_cannot_be_used_changes_nothing(
    bench: Make, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_bundle(tmp_path / "a", 3)
    one = bench(policy=f"ppo:{folder}")
    one.watcher.look()
    weights, card = folder / "policy.safetensors", folder / "bundle.json"
    if damage == "half written":
        good = weights.read_bytes()
        weights.write_bytes(good[:-1] + b"\x01")
    elif damage == "newer schema":
        card.write_text(json.dumps({**json.loads(card.read_text()), "schema_version": 2}))
    elif damage == "not finite":
        network = following_the_model((2,))
        network.head_bias[0] = np.nan
        save_bundle(Bundle(Card("mine", (2,), 5.0), network), folder)
    else:
        weights.unlink()
    for _ in range(3):
        one.watcher.look()
    assert one.step().num_steps == 3
    assert [record.levelname for record in caplog.records if "changed bundle" in record.getMessage()] == [
        "ERROR"
    ]
    assert one.connect(engine_id="engine-2").policy.name == "ppo"  # from memory
    write_bundle(folder, 5)
    one.watcher.look()
    assert one.step().num_steps == 5


def test_a_sidecar_does_not_start_on_a_bundle_that_cannot_be_used(start: Make, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="name a folder that holds"):
        start(policy=f"ppo:{tmp_path}/nowhere")
