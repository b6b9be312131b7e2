"""The guard's configuration: what is refused, what is the default, and that its page lists all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guard_bench import ENGINE

from specgov.controller.config import ConfigError, load_config
from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.guard import Guard
from specgov.policies.types import EngineSpec, PolicyContext, PolicyError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('baseline = "greedy"', "guard.baseline: the baseline must depend on the batch size alone"),
        ('baseline = "static:x"', "guard.baseline: policy 'static:x'"),
        ("loss_share = 1.5", "guard.loss_share"),
        ("allowance = 1", "guard.allowance: unknown key: there are tpot_mean_ms,"),
        ("tpot_mean_ms = nan", "guard.tpot_mean_ms"),
        ("first_backoff_steps = 9\nlargest_backoff_steps = 8", "first_backoff_steps 9 is above"),
        ("[guard.engines.a]\ntpot = 1", "guard.engines.a.tpot: unknown key: there are tpot_mean_ms,"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Any, text: str, says: str) -> None:
    path = tmp_path / "specgov.toml"
    path.write_text(f"[guard]\n{text}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert says in str(error.value)
    assert str(error.value).startswith(f"{path}")


def test_a_baseline_that_the_engine_cannot_do_says_whose_it_is() -> None:
    context = PolicyContext(ENGINE, np.random.default_rng(0), lambda: 0.0)
    with pytest.raises(PolicyError, match=r"guard\.baseline: .* no tier 5"):
        Guard(GuardConfig(baseline="static:5"), "e", context)


@pytest.mark.parametrize(
    ("tiers", "baseline"),
    [((0, 1, 3, 5), "threshold:32:3"), ((0, 2, 7), "threshold:32:2"), ((1, 5), "schedule:1=1:32=1")],
)
def test_the_default_baseline_fits_every_engine(tiers: tuple[int, ...], baseline: str) -> None:
    context = PolicyContext(EngineSpec(tiers), np.random.default_rng(0), lambda: 0.0)
    guard = Guard(GuardConfig(), "e", context)
    assert guard.baseline_text == baseline
    assert guard.baseline.num_steps_for(1) <= 3


def test_the_page_lists_every_setting_and_cause() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guard.md").read_text()
    for name, setting in GuardConfig.model_fields.items():
        key = "engines.ENGINE_ID" if name == "engines" else name
        assert f"| `{key}` | {default_of(setting.default)} | {setting.description} |" in page
    for cause in GuardCause:
        assert not cause or f"| `{cause.word}` |" in page


def default_of(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    return "`true`" if value is True else f"`{value:g}`"
