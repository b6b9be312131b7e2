"""The commands that make and show profiles."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from specgov.controller.cli.main import main
from specgov.controller.cli.profiles import comparison, picture
from specgov.policies.profile import load_profile


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Batch sizes 1 and 8, num_steps 0 and 3, ten steps each: 5 + batch / 8 + num_steps / 2 ms."""
    lines, step_id, now_s = [], 0, 10.0
    for batch in (1, 8):
        lines.append(f"#run,512,{batch}")
        step_id += 5
        for num_steps in (0, 3):
            for _ in range(10):
                step_id += 1
                now_s += (5 + batch / 8 + num_steps / 2) / 1e3
                lines.append(f"1,{batch},{step_id},{now_s:.6f},{now_s:.6f},{num_steps + 1},0,{batch * 512}")
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def options(output: Path) -> list[str]:
    return ["-o", str(output), "--model", "llama-3.1-8b", "--hardware", "H200"]


def test_calibrate_writes_the_same_profile_twice(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "mine.json", tmp_path / "again.json"
    assert main(["calibrate", str(recording), *options(first), "--graph-batch-sizes", "1,8"]) == 0
    assert "4 cells measured" in capsys.readouterr().out
    arguments = [*options(second), "--graph-batch-sizes", "1,8", "--name", "mine"]
    assert main(["calibrate", str(recording), *arguments]) == 0
    assert first.read_bytes() == second.read_bytes()
    profile = load_profile(first)
    assert profile.name == "mine"
    # A batch of 3 runs as 8.
    assert profile.step_time.step_ms(3, 3, 8 * 512) == pytest.approx(7.5, abs=2e-3)


def test_calibrate_takes_a_models_configuration(recording: Path, tmp_path: Path) -> None:
    config = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 32000,
    }
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    output, model = tmp_path / "tiny.json", str(folder / "config.json")
    arguments = ["-o", str(output), "--model", model, "--draft", model, "--hardware", "H100"]
    assert main(["calibrate", str(recording), *arguments]) == 0
    assert load_profile(output).model == "tiny"


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (["--model", "gpt-9"], 2, "there is no model 'gpt-9'; there are llama-3.1-8b"),
        (["--hardware", "abacus"], 2, "there is no machine 'abacus'; there are A100-80GB"),
        (["--graph-batch-sizes", "1,x"], 2, "--graph-batch-sizes takes whole numbers"),
        (["--graph-batch-sizes", "8,1"], 1, "graph batch sizes must ascend"),
        (["--tensor-parallel-size", "0"], 2, "must be 1 or more"),
        (["--model", "none/config.json"], 1, "cannot use none/config.json"),
    ],
)
def test_what_calibrate_refuses(
    recording: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    code: int,
    message: str,
) -> None:
    output = tmp_path / "mine.json"
    assert main(["calibrate", str(recording), *options(output), *change]) == code
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_calibrate_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "short.csv"
    path.write_text("#run,512,1\n1,1,1,0.1,0.2,1,0,512\n")
    assert main(["calibrate", str(path), *options(tmp_path / "out.json")]) == 1
    assert "no cell with at least 5 usable steps" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles"]) == 0
    assert "h200-llama-3.1-8b" in capsys.readouterr().out


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Break-even at batch 1 and 256 from the recorded medians, worked out outside this code."""
    assert main(["profiles", "show", "h200-llama-3.1-8b", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    three, seven = (shown["break_even_accept_length"][tier] for tier in ("3", "7"))
    assert [round(three[0], 2), round(three[-1], 2)] == [1.13, 2.45]
    assert [round(seven[0], 2), round(seven[-1], 2)] == [1.33, 4.30]
    assert shown["batch_sizes"][-1] == 256


def test_the_context_shown_is_the_one_with_the_most_measured_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two cells at context 256, four at 512: a short context that was met in passing says little."""
    lines, step_id, now_s = [], 0, 10.0
    for context, batches in ((256, (1,)), (512, (1, 8))):
        for batch in batches:
            lines.append(f"#run,{context},{batch}")
            step_id += 5
            for tier in (0, 3):
                for _ in range(10):
                    step_id += 1
                    now_s += (5 + batch / 8 + tier / 2 + context / 1e3) / 1e3
                    row = f"1,{batch},{step_id},{now_s:.6f},{now_s:.6f},{tier + 1},0,{batch * context}"
                    lines.append(row)
    path, profile = tmp_path / "steps.csv", tmp_path / "mine.json"
    path.write_text("\n".join(lines) + "\n")
    assert main(["calibrate", str(path), *options(profile)]) == 0
    capsys.readouterr()
    assert main(["profiles", "show", str(profile)]) == 0
    shown = capsys.readouterr().out
    assert "at context 512" in shown
    assert "on H200, engine not named" in shown
    assert main(["profiles", "compare", str(profile), "h200-llama-3.1-8b"]) == 0
    assert "at context 512" in capsys.readouterr().out


def test_a_tier_has_the_same_colour_in_both_pictures() -> None:
    profile = load_profile("h200-llama-3.1-8b")
    times, gains = picture(profile, 512).panels
    both = comparison((profile, profile), [3, 7], [1, 256], 512).panels[0]
    for panel in (times, gains):
        colors = {series.label: series.color for series in panel.series if series.label}
        assert [series.color for series in both.series] == [colors["k=3"], colors["k=7"]] * 2


def test_show_with_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "profile.svg"
    assert main(["profiles", "show", "h200-qwen3-30b-a3b", "--plot", str(plot)]) == 0
    assert "Tier-0 tax" in capsys.readouterr().out
    assert ET.parse(plot).getroot().tag.endswith("svg")


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "both.svg"
    arguments = ["h200-llama-3.1-8b", "h200-qwen3-30b-a3b", "--plot", str(plot)]
    assert main(["profiles", "compare", *arguments]) == 0
    assert "k=3 A" in capsys.readouterr().out
    assert plot.exists()


def test_an_unknown_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "show", "h300"]) == 1
    assert "no bundled profile 'h300'" in capsys.readouterr().err
