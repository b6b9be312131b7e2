"""What docs/simulator.md tells a user to do works as it stands there, in less time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specgov.env.scenario import ScenarioError, load_scenario, parse_scenario

PAGE = Path(__file__).parents[2] / "docs/simulator.md"


def blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text[text.index("## Write a scenario") :], re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with the page's scenario, of 1 s."""
    (scenario,) = blocks("toml")
    assert "duration_s = 60" in scenario
    (tmp_path / "mine.toml").write_text(scenario.replace("duration_s = 60", "duration_s = 1"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_scenario(folder):
    assert load_scenario("mine.toml").table == load_scenario("mine.toml:support_desk").table


def test_the_error_message():
    (scenario,) = blocks("toml")
    with pytest.raises(ScenarioError) as error:
        parse_scenario(scenario.replace("max_running_requests", "max_running"), "mine.toml")
    assert str(error.value) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 1])
def test_the_programs(folder, capsys, number):
    program = (
        blocks("python")[number].replace("300_000", "1_024").replace("make_sb3_env(256", "make_sb3_env(16")
    )
    exec(compile(program, f"block {number}", "exec"), {"__name__": "__main__"})
    if number == 1:
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
            "ppo", "static:0", "static:1", "static:2", "static:3", "static:5", "static:7",
        ]  # fmt: skip
        assert (folder / "ppo-support-desk.zip").exists()
