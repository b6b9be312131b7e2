"""``specgov tune`` writes what engines read."""

import json
from pathlib import Path

import pytest

from specgov.controller.cli.main import main
from specgov.controller.cli.tune import vllm_document
from specgov.policies.registry import parse_policy

FAST = ["--profile", "h200-qwen3-30b-a3b", "--scenario", "mixed_classes", "--duration-s", "0.4"]


def test_vllms_ranges() -> None:
    # The format of vLLM's documentation: [first batch size, last, draft tokens], and the largest of them.
    assert vllm_document("schedule:1=3:65=1:129=0", 512) == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 64, 3], [65, 128, 1], [129, 512, 0]],
    }


def test_a_threshold_is_a_policy_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "threshold", *FAST]) == 0
    printed = capsys.readouterr()
    parse_policy(json.loads(printed.out)["policy"])
    assert "output tokens a request-second in the simulator" in printed.err


def test_sglangs_file_is_read_by_the_ema_rule(tmp_path: Path) -> None:
    path = tmp_path / "adaptive.json"
    assert main(["tune", "sglang", *FAST, "-o", str(path)]) == 0
    _, config = parse_policy(f"ema:config={path}")
    assert [slot.batch_size for slot in config.table][:4] == [1, 2, 3, 5]


def test_vllm_covers_every_batch_size(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.json"
    assert main(["tune", "vllm", *FAST, "-o", str(path)]) == 0
    ranges = json.loads(path.read_text())["num_speculative_tokens_per_batch_size"]
    assert (ranges[0][0], ranges[-1][1]) == (1, 256)
    assert [last + 1 for _, last, _ in ranges[:-1]] == [first for first, _, _ in ranges[1:]]


def test_mistakes_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "vllm", *FAST, "--seed", "-1"]) == 2
    assert "--seed 0 or more" in capsys.readouterr().err
    assert main(["tune", "vllm", "--profile", "nowhere.json"]) == 1
    assert "nowhere.json" in capsys.readouterr().err
