"""How servers start: refused with every problem named, off where nothing asks for us, in shadow, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servers import ACCEPTED, REJECTED, Server, running, started
from sidecars import at_tier, fake_sidecar

pytestmark = pytest.mark.sglang

NOBODY = "unix:///nowhere/specgov.sock"


def test_a_server_that_could_not_be_governed_does_not_start(models: Path, tmp_path: Path) -> None:
    flags = ("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "4")
    with started(models, tmp_path, *flags, SPECGOV_TARGET=NOBODY, SPECGOV_TIERS="0,2") as server:
        assert server.process.wait(120) != 0
    assert "- --speculative-eagle-topk is 2: adaptive tiers need 1" in server.log
    assert "- SPECGOV_TIERS names 2, but the server prepares 0, 1, 3" in server.log
    assert "Load weight" not in server.log


def test_a_setting_that_cannot_be_used_ends_the_launcher_with_one_line(models: Path, tmp_path: Path) -> None:
    with started(models, tmp_path, SPECGOV_TARGET=NOBODY, SPECGOV_FALLBACK="greedy") as server:
        assert server.process.wait(120) == 1
    assert "specgov: SPECGOV_FALLBACK: must be one of static:K" in server.log.splitlines()[-1]


def test_unset_it_changes_nothing(models: Path, tmp_path: Path) -> None:
    with running(models, tmp_path, "--log-level", "debug") as server:
        server.check(ACCEPTED, 40)
        server.check_eight_at_once(30)
    assert "is live" not in server.log
    assert list(server.folder.glob("launches.*")) == []  # our policy was never made
    assert "to sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams" not in server.log
    assert {step["num_steps"] for step in server.steps()} >= {3}


def own_rule_of_sglang() -> Any:
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    return AdaptiveSpeculativeParams


def check_that_each_tier_is(rule: Any, server: Server) -> None:
    """Replay what the policy was asked and told, and compare every tier."""
    tiers = set()
    for line in server.policy_lines():
        if "num_steps" in line:
            assert line["num_steps"] == rule.get_steps_for_batch(line["batch_size"])
            tiers.add(line["num_steps"])
        else:
            rule.on_verify_complete(line["accepted"], line["batch_size"])
    assert tiers == {0, 1, 3}


def mixed_load(server: Server) -> None:
    server.check(ACCEPTED, 60)
    server.check(REJECTED, 60)
    server.check(90, 120)  # from tokens with right drafts to tokens with wrong ones
    server.check_eight_at_once(40)


def test_in_shadow_sglangs_own_rule_decides_and_is_reported(
    models: Path, tmp_path: Path, socket: Path
) -> None:
    target = f"unix://{socket}"
    with (
        fake_sidecar(target, at_tier(1)) as recorder,
        running(models, tmp_path, SPECGOV_TARGET=target, SPECGOV_MODE="shadow") as server,
    ):
        mixed_load(server)
        check_that_each_tier_is(own_rule_of_sglang()(3, str(tmp_path / "adaptive.json")), server)
    assert {launch["kind"] for launch in server.launches()} == {"ENGINES_RULE"}
    assert len(recorder.reports) > 100
    assert {r.engine_rule_num_steps - r.num_steps for r in recorder.reports} == {0}
    assert {r.decision_id for r in recorder.reports} == {0}


def test_the_ema_fallback_decides_as_sglangs_own_rule_would(models: Path, tmp_path: Path) -> None:
    table = tmp_path / "adaptive.json"
    fallback = f"ema:config={table}:initial_num_steps=3"
    with running(models, tmp_path, SPECGOV_TARGET=NOBODY, SPECGOV_FALLBACK=fallback) as server:
        mixed_load(server)
        check_that_each_tier_is(own_rule_of_sglang()(3, str(table)), server)
    assert {launch["kind"] for launch in server.launches()} == {"OWN_RULE"}
