"""What prefill costs by a decision log, on made-up logs whose costs are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgov.env.calibration import calibrate
from specgov.env.logged_prefill import Interruption, Interruptions, measured_prefill
from specgov.env.recording import read_recording
from specgov.policies.profile import parse_profile

CHUNK_MS, TOKEN_MS = 11.0, 0.015


class Decoding:
    """4 ms, 1 ms more for each draft step, 0.05 ms for each request; implements ``StepTime``."""

    def step_ms(self, batch_size: Any, num_steps: Any, sum_seq_len_tokens: Any) -> Any:
        return (
            4.0 + np.asarray(num_steps) + 0.05 * np.asarray(batch_size) + 0.0 * np.asarray(sum_seq_len_tokens)
        )


class Log:
    """The rows of one engine: decode steps, and prefill between them, with their true times."""

    def __init__(self, *, counts_all: bool = True) -> None:
        self.rows: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self._now_ms, self._step_id, self._after_prefill = 1e6, 0, False
        self._counts_all = counts_all

    def prefill(self, *prompts: int) -> None:
        """An iteration that prefills these."""
        self._now_ms += CHUNK_MS + TOKEN_MS * sum(prompts)
        self._step_id += self._counts_all
        self.lengths += [prompt + 1 for prompt in prompts]
        self._after_prefill = True

    def decode(self, num_steps: int, waits_ms: float | None = None) -> None:
        """A step; with ``waits_ms`` it comes before a prefill and seems so much longer."""
        size, before_ms = len(self.lengths), self._now_ms
        self._now_ms += float(Decoding().step_ms(size, num_steps, 0)) + (waits_ms or 0.0)
        self._step_id += 1
        valid = not self._after_prefill and self._step_id > 1
        self.rows.append(
            {
                "kind": "step", "time_s": self._now_ms / 1e3, "engine_id": "e", "step_id": self._step_id,
                "batch_size": size, "padded_batch_size": size, "num_steps": num_steps,
                "sum_seq_len_tokens": sum(self.lengths), "accepted": [0] * num_steps + [size],
                "step_ms": self._now_ms - before_ms if valid else None, "reports_dropped": 0,
                "flags": ["after_prefill"] if self._after_prefill else [],
            }
        )  # fmt: skip
        self.lengths = [length + num_steps + 1 for length in self.lengths]
        self._now_ms -= waits_ms or 0.0  # the prefill goes on meanwhile
        self._after_prefill = False

    def save(self, path: Path) -> Path:
        header = {"kind": "log", "schema": "specgov.decision_log", "schema_version": 2}
        path.write_text("".join(json.dumps(row) + "\n" for row in (header, *self.rows)))
        return path


def found(log: Log) -> list[Interruption]:
    interruptions = Interruptions()
    for row in log.rows:
        interruptions.add(row)
    return interruptions.found


def growing(prompts: list[list[int]], *, counts_all: bool = True) -> Log:
    """A batch that grows by each of ``prompts``, the requests of one iteration, with four steps between."""
    log = Log(counts_all=counts_all)
    log.prefill(100)
    for together in prompts:
        for _ in range(4):
            log.decode(1)
        log.prefill(*together)
    log.decode(1)
    log.decode(1)
    return log


def test_an_interruption_by_hand() -> None:
    # Four steps of one request of 101 tokens; a prefill of 300 and 200; two steps of three requests. Steps
    # b, c and d take 5.05, 5.15 and 5.15 ms, the prefill 11 + 7.5.
    (each,) = found(growing([[300, 200]]))
    assert each.iterations == 1
    assert each.tokens == 300 + 200 + 2
    assert each.passed_ms == pytest.approx(5.05 + 5.15 + 5.15 + 18.5)
    assert each.steps == ((1, 1, 107), (3, 1, 109 + 502), (3, 1, 109 + 502 + 6))


@pytest.mark.parametrize("counts_all", [True, False])
def test_chunk_and_token_are_told_where_prompts_differ(counts_all: bool) -> None:
    prompts = [[int(length)] for length in np.linspace(50, 2000, 40)]
    told = measured_prefill(found(growing(prompts, counts_all=counts_all)), Decoding(), 0.5)
    assert told is not None
    assert (told.interruptions, told.with_tokens, told.tokens_told) == (40, 40, True)
    # Each prompt counts a token more, which its prefill wrote.
    assert told.cost.ms_per_token == pytest.approx(TOKEN_MS, rel=1e-3)
    assert told.cost.fixed_ms == pytest.approx(CHUNK_MS, abs=0.05)


def test_requests_that_end_unseen_and_a_busy_host_mislead_little() -> None:
    # In one of eight interruptions a request ends as two come, and its length is taken off the tokens; one of
    # eight takes 40 ms longer.
    rng, log = np.random.default_rng(1), Log()
    log.prefill(100)
    for number in range(160):
        for _ in range(4):
            log.decode(1)
        if number % 8 == 0:
            log.lengths.pop(0)
        log.prefill(*rng.integers(50, 2000, 2 if number % 8 == 0 else 1).tolist())
        log._now_ms += 40.0 * (number % 8 == 4)
    told = measured_prefill(found(log), Decoding(), 0.5)
    assert told is not None
    assert told.cost.ms_per_token == pytest.approx(TOKEN_MS, rel=0.05)
    assert told.cost.fixed_ms == pytest.approx(CHUNK_MS, rel=0.1)


def test_iterations_that_follow_each_other_share_the_time() -> None:
    log = Log()
    log.prefill(100)
    for number in range(30):
        for _ in range(4):
            log.decode(1)
        log.prefill(200 + 40 * number)
        log.prefill(200 + 40 * number)
    log.decode(1)
    log.decode(1)
    assert {each.iterations for each in found(log)} == {2}
    told = measured_prefill(found(log), Decoding(), 0.5)
    assert told is not None
    assert told.cost.fixed_ms == pytest.approx(CHUNK_MS, abs=0.05)


def test_the_token_s_part_is_the_model_s_where_prompts_are_alike() -> None:
    told = measured_prefill(found(growing([[300]] * 30)), Decoding(), 0.02)
    assert told is not None
    assert not told.tokens_told
    # 11 + 0.015 * 300 ms in all, of which 0.02 * 301 are said to be the tokens'.
    assert told.cost.ms_per_token == 0.02
    assert told.cost.fixed_ms == pytest.approx(11 + 4.5 - 6.02, abs=1e-3)


def test_tokens_are_not_known_where_as_many_leave_as_come() -> None:
    log = Log()
    log.prefill(100)
    for _ in range(30):
        for _ in range(4):
            log.decode(1)
        log.lengths.pop(0)
        log.prefill(300)
    log.decode(1)
    log.decode(1)
    told = measured_prefill(found(log), Decoding(), 0.02)
    assert told is not None
    assert (told.interruptions, told.with_tokens, told.tokens_told) == (30, 0, False)
    assert told.cost.fixed_ms == pytest.approx(11 + 4.5, abs=1e-3)


def test_too_few_interruptions_say_nothing() -> None:
    assert measured_prefill(found(growing([[300]] * 19)), Decoding(), 0.02) is None


@pytest.mark.parametrize(
    "change",
    [
        {"time_s": None},
        {"reports_dropped": 1},
        {"flags": ["after_idle"]},
        {"flags": ["warm_up"]},
        {"flags": ["after_prefill"]},
        {"step_id": 900},
    ],
)
@pytest.mark.parametrize("which", [-4, -3, -1])
def test_what_is_no_plain_interruption_is_left_out(which: int, change: dict[str, Any]) -> None:
    log = growing([[300]])
    del log.rows[:1]  # a, b, c, d and one more
    assert len(found(log)) == 1
    log.rows[which] |= change
    if which == -4 and change == {"flags": ["after_prefill"]}:
        return  # what came before a is not in the time
    assert found(log) == []


def interrupted_log(waits_ms: float | None) -> Log:
    """Two batch sizes at two tiers, a prefill after every 12th step, 30 of each."""
    log = Log()
    log.prefill(100, 100, 100, 100)
    for number in range(120):
        for index in range(12):
            log.decode(0 if number % 2 else 3, waits_ms if index == 11 else None)
        if number == 59:
            log.lengths = []
            log.prefill(*[100] * 8)
        else:
            log.lengths.pop(0)
            log.prefill(400)
    log.decode(0)
    log.decode(0)
    return log


def test_steps_before_a_prefill_are_left_out_whatever_the_plugin_said_of_them(tmp_path: Path) -> None:
    # An older plugin gave them the time that they waited, here 15 ms more.
    recording = read_recording(interrupted_log(15.0).save(tmp_path / "old.jsonl"))
    assert recording.rejected["before a prefill"] == 120
    assert recording.step_ms.max() == pytest.approx(4 + 3 + 0.4)
    log = interrupted_log(None)
    for row in log.rows[11::12]:
        row["step_ms"] = None
    newer = read_recording(log.save(tmp_path / "new.jsonl"))
    assert newer.rejected["before a prefill"] == 120
    np.testing.assert_allclose(newer.step_ms, recording.step_ms)


def test_a_calibration_says_what_prefill_costs_and_how_it_knows(tmp_path: Path) -> None:
    recording = read_recording(interrupted_log(None).save(tmp_path / "log.jsonl"))
    profile = calibrate([recording])
    assert profile.facts["prefill"] == {
        "chunks": 0,
        "interruptions": 120,
        "interruptions_with_tokens": 0,
        "ms_per_chunk_from": "decision log",
        "ms_per_token_from": "parametric model",
    }
    # As many requests end as come, so that the tokens are not known, and in the chunk's part.
    assert profile.prefill.fixed_ms == pytest.approx(CHUNK_MS + 400 * TOKEN_MS, abs=0.1)
    assert parse_profile(profile.to_json(), "x").prefill == profile.prefill


def test_too_few_are_told_as_such(tmp_path: Path) -> None:
    log = interrupted_log(None)
    log.rows = [row for row in log.rows if "after_prefill" not in row["flags"]]
    profile = calibrate([read_recording(log.save(tmp_path / "log.jsonl"))])
    assert profile.facts["prefill"] == {"chunks": 0, "ms_per_token_from": "parametric model"}
