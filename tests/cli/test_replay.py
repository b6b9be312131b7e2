"""``specgov replay`` on recordings whose step costs are known, against hand calculations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specgov.controller.cli.errors import UsageError
from specgov.controller.cli.replay import acceptance_by_position

SHARED = Path(__file__).parents[3] / "shared" / "data" / "h200"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the H200 recordings are not here")


def recording(step_ms: dict[tuple[int, int], float], context: int = 512, steps: int = 12) -> str:
    """A recording with ``steps`` steps of each (batch size, num_steps), all of exactly the duration given."""
    lines, iteration, now_s, batch_before = [], 0, 100.0, None
    for (batch_size, num_steps), ms in step_ms.items():
        if batch_size != batch_before:
            lines.append(f"#run,{context},{batch_size}")
            batch_before = batch_size
        for _ in range(steps):
            iteration += 1
            now_s += ms / 1000
            times = f"{now_s - 0.001:.6f},{now_s:.6f}"
            lines.append(f"1,{batch_size},{iteration},{times},{num_steps + 1},1.0,{512 * batch_size}")
    return "\n".join(lines) + "\n"


# T(3)/T(0) is 1.2 at batch size 1 and 2.45 at 256; T(1)/T(0) is 1.1 and 1.5.
STEP_MS = {(1, 0): 5.0, (1, 1): 5.5, (1, 3): 6.0, (256, 0): 10.0, (256, 1): 15.0, (256, 3): 24.5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "steps.csv"
    path.write_text(recording(STEP_MS))
    return path


def rates(run, file: Path, *options: str) -> dict[str, dict[int, float]]:
    """Expected output rate by policy and batch size."""
    ran = run("replay", str(file), "--json", "--steps", "60", *options)
    assert (ran.code, ran.err) == (0, "")
    (result,) = json.loads(ran.out)
    assert result["counterfactual"] is True
    return {
        policy["policy"]: dict(
            zip(result["batch_sizes"], policy["output_tokens_per_s_by_batch_size"], strict=True)
        )
        for policy in result["policies"]
    }


def test_below_break_even_static_3_is_slower_than_static_0_by_that_ratio(run, file: Path) -> None:
    # At acceptance 0.5 the accept length at num_steps 3 is 1 + 0.5 + 0.25 + 0.125 = 1.875.
    by_policy = rates(run, file, "--acceptance", "0.5", "--policies", "static:0", "static:3")
    zero, three = by_policy["static:0"], by_policy["static:3"]
    assert zero[256] == pytest.approx(256 / 0.010, rel=1e-3)
    assert three[256] == pytest.approx(1.875 * 256 / 0.0245, rel=1e-3)
    # Break-even at batch size 256 is 2.45: slower by 1.875 / 2.45 = 0.765. At 1 it is 1.2: faster.
    assert three[256] / zero[256] == pytest.approx(1.875 / 2.45, rel=1e-3)
    assert three[1] / zero[1] == pytest.approx(1.875 / 1.2, rel=1e-3)
    # The oracle takes tier 3 at batch size 1 and, since 1.5 / 1.5 is no gain, the best of 0 and 1 at 256.
    assert by_policy["oracle"] == pytest.approx({1: three[1], 256: zero[256]}, rel=1e-3)


def test_above_break_even_it_is_the_other_way_round(run, file: Path) -> None:
    # All accepted: accept length 4 against 2.45 and 1.2.
    by_policy = rates(run, file, "--acceptance", "1", "--policies", "static:0", "static:3", "threshold:2:3")
    assert by_policy["static:3"][256] / by_policy["static:0"][256] == pytest.approx(4 / 2.45, rel=1e-3)
    assert by_policy["threshold:2:3"] == pytest.approx(
        {1: by_policy["static:3"][1], 256: by_policy["static:0"][256]}
    )


def test_every_policy_is_played_by_default_and_the_tables_name_them(run, file: Path) -> None:
    ran = run("replay", str(file), "--steps", "60")
    assert ran.code == 0
    assert "Counterfactual" in ran.out
    for name in ("static:0", "static:1", "static:3", "threshold", "schedule", "ema", "oracle"):
        assert f"  {name} " in ran.out


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        # Six cells of 12 steps; of each the first three have not settled, so 54 are usable.
        (("--steps", "50"), "Played 50 of its 54 usable steps: 4 are left out, evenly"),
        (("--steps", "all"), ""),
        ((), "Played 2200 steps: its 54 usable ones, repeated evenly."),
    ],
)
def test_where_steps_are_left_out_or_repeated_it_says_how_many(
    run, file: Path, steps: tuple[str, ...], said: str
) -> None:
    ran = run("replay", str(file), "--policy", "static:0", *steps)
    assert ran.code == 0
    assert said in ran.out
    assert ("Played" in ran.out) == bool(said)


def test_the_same_seed_gives_the_same_output(run, file: Path) -> None:
    first, again = (run("replay", str(file), "--steps", "60", "--json").out for _ in range(2))
    assert first == again


def test_a_file_that_is_no_recording_is_one_line_with_the_line(run, file: Path) -> None:
    lines = recording(STEP_MS).splitlines()
    lines[4] = "1,1,nonsense"
    file.write_text("\n".join(lines))
    ran = run("replay", str(file))
    assert (ran.code, ran.out) == (1, "")
    assert "steps.csv, line 5" in ran.err
    assert ran.err.count("\n") == 1


def test_a_missing_cell_is_named(run, file: Path) -> None:
    without = {cell: ms for cell, ms in STEP_MS.items() if cell != (256, 1)}
    file.write_text(recording({**without, (8, 0): 6.0, (8, 1): 7.0, (8, 3): 9.0}))
    ran = run("replay", str(file))
    assert ran.code == 1
    assert "batch size 256, num_steps 1" in ran.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policies", "nonsense"), "unknown policy"),
        (("--policies", "static:5"), "no tier 5"),
        (("--acceptance", "nonsense"), "no class 'nonsense'"),
        (("--acceptance", "1.5"), "from 0 to 1"),
        (("--steps", "0"), "--steps takes a number from 1 on, or all, not '0'"),
        (("--steps", "some"), "--steps takes a number from 1 on, or all, not 'some'"),
        (("--steps", "9" * 20), "--steps must be at most 4294967295"),
        (("--lag", "0"), "--lag"),
    ],
)
def test_wrong_usage(run, file: Path, options: tuple[str, ...], said: str) -> None:
    ran = run("replay", str(file), *options)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_acceptance_of_a_class_is_conditional_and_stated_values_are_held() -> None:
    # Published survival of "chat": 0.844, 0.599, 0.385, 0.271. Conditional: each over the one before.
    expected = [0.844, 0.599 / 0.844, 0.385 / 0.599, 0.271 / 0.385, 0.271 / 0.385]
    assert acceptance_by_position("chat", 5) == pytest.approx(expected)
    assert acceptance_by_position("0.8,0.5", 4).tolist() == [0.8, 0.5, 0.5, 0.5]
    assert acceptance_by_position("0", 2).tolist() == [0, 0]
    with pytest.raises(UsageError):
        acceptance_by_position("0.5,,", 2)


@needs_shared
@pytest.mark.parametrize("model", ["llama8b", "qwen3moe"])
def test_real_recordings_by_hand(run, model: str) -> None:
    path = SHARED / f"steps_{model}_spec_ctx512.csv"
    by_policy = rates(
        run, path, "--acceptance", "0.5", "--policies", "static:0", "static:3", "--steps", "110"
    )
    # By hand: medians of the durations between results, at least four steps after a change of tier.
    t0, t3 = (median_step_ms(path, 256, num_steps) for num_steps in (0, 3))
    ratio = by_policy["static:3"][256] / by_policy["static:0"][256]
    assert ratio == pytest.approx(
        1.875 / (t3 / t0), rel=0.02
    )  # the table is smoothed by a percent here and there
    if model == "llama8b":
        assert t3 / t0 == pytest.approx(
            2.45, abs=0.05
        )  # the break-even accept length, known for this recording
        assert ratio < 0.8


def median_step_ms(path: Path, batch_size: int, num_steps: int) -> float:
    wanted, inside, steps, settled = f"#run,512,{batch_size}", False, [], 0
    before_s = 0.0
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            inside, settled = line == wanted, 0
            continue
        is_decode, batch, _, _, result_s, width, *_ = line.split(",")
        same = is_decode == "1" and int(batch) == batch_size and int(width or 0) == num_steps + 1
        settled = settled + 1 if inside and same else 0
        if settled > 4:
            steps.append(1000 * (float(result_s) - before_s))
        before_s = float(result_s)
    return float(np.median(steps))
