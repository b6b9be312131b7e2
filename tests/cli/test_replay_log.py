"""``specgov replay`` on a decision log whose batches, step times and acceptance are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log import DecisionLog
from specgov.controller.step_record import StepRecord
from specgov.policies.types import StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

# At batch size 1 tier 1 costs 1.2 of tier 0, at 64 it costs 1.8; at both every second draft is accepted.
MS = {(1, 0): 5.0, (1, 1): 6.0, (64, 0): 10.0, (64, 1): 18.0}


def write_log(
    path: Path,
    engines: tuple[str, ...] = ("a",),
    tiers: tuple[int, ...] = (0, 1),
    each: int = 40,
    prepared: tuple[tuple[int, ...], ...] = ((0, 1),),
    **info: Any,
) -> Path:
    """``each`` steps of each cell, in the order of ``MS``; at tier 1 every second draft is accepted.

    All that again for each of ``prepared``, with the engine started anew with those tiers.
    """
    log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: 1e9)
    for name, start in itertools.product(engines, prepared):
        log.stream(pb.EngineInfo(engine_id=name, tiers=start, decision_lag_steps=2, **info), "greedy")
        step_id = 0
        for (batch, tier), ms in MS.items():
            for _ in range(each if tier in tiers else 0):
                step_id += 1
                step = StepObservation(
                    step_id=step_id,
                    batch_size=batch,
                    num_steps=tier,
                    accepted=np.array([tier * (step_id + i) % 2 for i in range(batch)], np.uint8),
                    slots=np.zeros(0, np.uint16),
                    generations=np.zeros(0, np.uint8),
                    sum_seq_len_tokens=512 * batch,
                    max_seq_len_tokens=512,
                    step_ms=ms,
                )
                log.steps(name, [StepRecord(step, 0, 0, None, 0)], None, pb.MODE_SHADOW)
    log.flush(final=True)
    return path


def replayed(run: Callable[..., Any], path: Path, *options: str) -> dict[str, Any]:
    ran = run("replay", str(path), "--json", *options)
    assert (ran.code, ran.err) == (0, "")
    (result,) = json.loads(ran.out)
    return result


@pytest.mark.parametrize("name", ["log.jsonl", "log.parquet"])
def test_rates_by_hand(run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    result = replayed(run, write_log(tmp_path / name), "--policy", "static:0", "static:1")
    by_name = {each["policy"]: each for each in result["policies"]}
    assert result["batch_sizes"] == [1, 64]
    assert "step times calibrated from the log" in result["assumptions"]
    # Accept length 1.5 at tier 1, seen over 40 drafts at size 1 and 2560 at 64, all in one window.
    zero = [1 / 0.005, 64 / 0.010]
    one = [1.5 / 0.006, 64 * 1.5 / 0.018]
    assert by_name["static:0"]["output_tokens_per_s_by_batch_size"] == pytest.approx(zero)
    assert by_name["static:1"]["output_tokens_per_s_by_batch_size"] == pytest.approx(one)
    # The oracle takes tier 1 at size 1 and tier 0 at 64. 40 steps each took 440 ms at size 1 and 1120 at 64.
    best = (440 * one[0] + 1120 * zero[1]) / 1560
    assert by_name["oracle"]["output_tokens_per_s"] == pytest.approx(best)
    # What ran: half of the steps of each size at each tier, so 40 (1 + 1.5) tokens in 440 ms, and so on.
    ran = (440 * (100 / 0.440) + 1120 * (6400 / 1.120)) / 1560
    assert by_name["what ran"]["output_tokens_per_s"] == pytest.approx(ran)


def test_a_log_that_is_too_thin_takes_the_engines_profile_or_asks_for_one(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    path = write_log(tmp_path / "thin.jsonl", tiers=(1,))
    ran = run("replay", str(path))
    assert ran.code == 1
    assert "give one with --profile" in ran.err
    stated = replayed(run, path, "--policy", "static:1", "--profile", "h200-llama-3.1-8b")
    assert "step times of the profile h200-llama-3.1-8b" in stated["assumptions"]
    named = write_log(tmp_path / "named.jsonl", tiers=(1,), profile="h200-qwen3-30b-a3b")
    assert "h200-qwen3-30b-a3b" in replayed(run, named, "--policy", "static:1")["assumptions"]


def test_stated_acceptance_replaces_what_was_seen(run: Callable[..., Any], tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl")
    result = replayed(run, path, "--policy", "static:1", "--acceptance", "1")
    assert result["policies"][1]["output_tokens_per_s_by_batch_size"] == pytest.approx(
        [2 / 0.006, 128 / 0.018]
    )


def test_without_drafts_acceptance_must_be_stated(run: Callable[..., Any], tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl", tiers=(0,), profile="h200-llama-3.1-8b")
    ran = run("replay", str(path))
    assert ran.code == 1
    assert "state it with --acceptance" in ran.err
    assert replayed(run, path, "--policy", "static:1", "--acceptance", "0.5")["acceptance"] == "0.5"


def test_one_of_several_engines_must_be_named(run: Callable[..., Any], tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl", ("a", "b"))
    ran = run("replay", str(path))
    assert ran.code == 1
    assert "holds the engines a, b: name one with --engine" in ran.err
    assert replayed(run, path, "--policy", "static:0", "--engine", "b")["steps"] == 160


def test_options_of_logs_are_refused_for_recordings(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("#run,512,1\n", encoding="utf-8")
    ran = run("replay", str(path), "--engine", "a")
    assert ran.code == 2
    assert "for decision logs" in ran.err


def test_steps_that_are_left_out_are_counted_and_all_can_be_had(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    path = write_log(tmp_path / "log.jsonl", each=1300)  # 4 cells: 5200 steps
    said = run("replay", str(path), "--policy", "static:1")
    assert said.code == 0
    assert "Played 5000 of its 5200 usable steps: 200 are left out, evenly" in said.out
    assert "--steps all plays every one." in said.out
    few = replayed(run, path, "--policy", "static:1")
    assert (few["steps"], few["usable_steps"]) == (5000, 5200)

    every = replayed(run, path, "--policy", "static:1", "--steps", "all")
    assert (every["steps"], every["usable_steps"]) == (5200, 5200)
    said = run("replay", str(path), "--policy", "static:1", "--steps", "all")
    assert "Played" not in said.out  # nothing was left out, so there is nothing to say


def test_steps_with_other_tiers_are_counted_too(run: Callable[..., Any], tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl", prepared=((0, 1), (0, 1, 3)))  # 160 steps each
    for options in ((), ("--engine", "a")):
        result = replayed(run, path, "--policy", "static:1", *options)
        assert result["tiers"] == [0, 1]
        assert result["usable_steps"] == 160
        assert "the engine's steps with tiers 0,1 alone, 160 with others left out" in result["assumptions"]
