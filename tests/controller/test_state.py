"""Saved states: an engine goes on after a restart as if there had been none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from state_bench import Sidecar, play

from specgov.policies.registry import policy_names
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


def reports(rng: np.random.Generator, first: int, count: int, make_report: Make) -> list[pb.StepReport]:
    """Steps of 4 to 40 requests whose tiers, acceptance and times vary."""
    made = []
    for step_id in range(first, first + count):
        size, num_steps = int(rng.integers(4, 41)), int(rng.choice([0, 1, 3, 5]))
        made.append(
            make_report(
                step_id,
                batch_size=size,
                num_steps=num_steps,
                accepted_drafts=rng.binomial(num_steps, 0.7, size).astype(np.uint8).tobytes(),
                slots_u16le=np.arange(size, dtype="<u2").tobytes(),
                slot_generations_u8=bytes(size),
                sum_seq_len_tokens=300 * size,
                step_time_us=int(5000 + 700 * num_steps + 40 * size + rng.integers(0, 300)),
            )
        )
    return made


@pytest.mark.parametrize("policy", policy_names())
def test_decisions_after_a_restart_are_those_of_an_uninterrupted_run(
    policy: str, sidecar: Make, make_report: Make
) -> None:
    steps = reports(np.random.default_rng(7), 1, 160, make_report)
    first = sidecar(policy=policy)
    engine = first.connect()
    play(engine, steps[:100])
    first.stop()
    uninterrupted = play(engine, steps[100:])
    again = sidecar(policy=policy).connect()
    assert again.state().restored_reports == 100
    assert (again.policy_failure, engine.policy_failure) == ("", "")
    assert play(again, steps[100:]) == uninterrupted


def test_the_boot_goes_on_or_begins_anew(sidecar: Make, make_report: Make) -> None:
    first = sidecar()
    play(first.connect(), [make_report(9)])
    first.stop()
    second = sidecar()
    with pytest.raises(ValueError, match="step"):
        second.connect().observe(make_report(9))  # the engine has made this step already
    second.stop()
    new_boot = sidecar().connect(boot_id="boot-2")
    new_boot.observe(make_report(1))
    assert new_boot.last_record is not None
    assert new_boot.last_record.step.generations.tolist() == [102, 102, 103, 102]  # 101 on: other requests


def test_a_boot_that_finds_more_memory_keeps_all(sidecar: Make, make_report: Make) -> None:
    """Engines measure the KV cache's room at each boot; no estimate depends on it."""
    first = sidecar()
    engine = first.connect(kv_capacity_tokens=100_000)
    play(engine, [make_report(1)])
    rule = engine.policy
    assert first.connect(kv_capacity_tokens=100_007, boot_id="boot-2").policy is rule
    engine.change_policy("static:3")
    engine.change_policy("greedy")
    play(engine, [make_report(2)])
    first.stop()
    assert sidecar().connect(kv_capacity_tokens=99_000, boot_id="boot-3").restored_reports == 2


def test_what_an_operator_set_by_hand_stays(sidecar: Make) -> None:
    first = sidecar()
    engine = first.connect()
    engine.mode = pb.MODE_OFF
    engine.set_policy("threshold:8:3")
    first.stop()
    again = sidecar().connect()
    assert (again.mode, again.policy_text, again.policy.name) == (pb.MODE_OFF, "threshold:8:3", "threshold")


def test_what_was_only_configured_follows_the_configuration(sidecar: Make, make_report: Make) -> None:
    first = sidecar(policy="greedy")
    play(first.connect(), [make_report(1)])
    first.stop()
    second = sidecar(policy="thompson", mode="shadow")
    again = second.connect()
    assert (again.policy_text, again.mode, again.restored_reports) == ("thompson", pb.MODE_SHADOW, 0)


def test_an_engine_that_taught_nothing_leaves_no_file(sidecar: Make, tmp_path: Path) -> None:
    one = sidecar()
    one.connect()
    one.stop()
    assert list((tmp_path / "states").glob("*.state")) == []


def test_only_what_changed_is_written_again(sidecar: Make, make_report: Make) -> None:
    one = sidecar()
    play(one.connect(), [make_report(1)])
    play(one.connect(engine_id="engine-2"), [make_report(1)])
    one.keeper.save()
    one.keeper.save()
    assert one.keeper.saves == 2
    play(one.connect(engine_id="engine-2"), [make_report(2)])
    one.keeper.save()
    assert one.keeper.saves == 3


def test_nothing_is_written_where_no_folder_is_named(start: Make, make_report: Make, tmp_path: Path) -> None:
    running = start(policy="greedy")
    running.stream().send(make_report(1))
    running.sidecar.stop()
    assert {path.name for path in tmp_path.iterdir()} <= {"specgov.sock"}


def test_a_real_sidecar_saves_at_its_end_and_restores_at_its_start(
    start: Make, make_report: Make, tmp_path: Path
) -> None:
    state = {"dir": str(tmp_path / "states")}
    running = start(policy="greedy", state=state)
    stream = running.stream()
    stream.send(make_report(1))
    stream.decision_that_knows(1)
    running.sidecar.stop()
    again = start(policy="greedy", state=state)
    again.stream()
    assert again.state().restored_reports == 1
    assert again.metric("specgov_state_saves_failed_total") == 0


def test_a_save_holds_the_engine_only_while_its_numbers_are_copied(sidecar: Make, make_report: Make) -> None:
    locked: list[bool] = []
    one: Sidecar

    def write(path: Path, content: bytes) -> None:
        locked.append(engine.lock.locked())

    one = sidecar(write=write)
    engine = one.connect()
    play(engine, [make_report(1)])
    one.keeper.save()
    assert locked == [False]
