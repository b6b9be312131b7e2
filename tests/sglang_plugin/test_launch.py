"""What launch adds to a server's arguments, when it starts the server, and when not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specgov.sglang_plugin import launch, versions
from specgov.sglang_plugin.doctor import SIDECAR
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.launch import additions, main, start
from specgov.sglang_plugin.report import Check

ENVIRONMENT = {"SPECGOV_TARGET": "unix:///s"}


class StartedError(Exception):
    """In the place of the server's program."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The checks that come out, and what the process became."""

    class World:
        checks: Sequence[Check] = [Check.fine("governed", "")]
        diagnosed: Sequence[str] = []
        became: tuple[str, list[str], dict[str, str]] | None = None
        release = "0.5.23"

    def diagnose(arguments: Sequence[str], environment: Any) -> Sequence[Check]:
        World.diagnosed = arguments
        return World.checks

    def execve(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        World.became = (program, arguments, environment)
        raise StartedError

    monkeypatch.setattr(launch, "diagnose", diagnose)
    monkeypatch.setattr(launch.os, "execve", execve)
    monkeypatch.setattr(versions, "installed_version", lambda: World.release)
    monkeypatch.setattr(versions, "engine_tiers", lambda path: (0, 2) if path == "small.json" else (0, 1, 7))
    return World


@pytest.mark.parametrize(
    ("release", "arguments", "added"),
    [
        ("0.5.23", ["--model-path", "m"], ["--speculative-adaptive"]),
        ("0.5.23", ["--speculative-adaptive"], []),
        ("0.5.17", ["--model-path", "m"], ["--speculative-adaptive", "--speculative-num-steps", "7"]),
        ("0.5.17", ["--speculative-num-steps=1"], ["--speculative-adaptive"]),
        ("0.5.17", ["--speculative-num-steps", "1", "--speculative-adaptive"], []),
        ("0.5.17", ["--config", "server.yaml"], ["--speculative-adaptive"]),
        (
            "0.5.18",
            ["--speculative-adaptive-config", "small.json", "--speculative-adaptive"],
            ["--speculative-num-steps", "2"],
        ),
        ("0.5.15", [], ["--speculative-adaptive"]),
        ("0.5.19", [], ["--speculative-adaptive"]),
    ],
)
def test_what_is_added(release: str, arguments: list[str], added: list[str], world: Any) -> None:
    # 0.5.16 to 0.5.18 size a buffer for the initial tier, so that must be the largest: 7, or 2 in small.json.
    world.release = release
    assert additions(arguments) == added


def test_the_server_takes_the_processs_place_with_what_was_added(
    world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartedError):
        start(["--model-path", "m"], ENVIRONMENT, print)
    complete = ["--speculative-adaptive", "--model-path", "m"]
    assert world.diagnosed == complete
    assert world.became == (
        sys.executable,
        [sys.executable, "-m", "sglang.launch_server", *complete],
        ENVIRONMENT,
    )
    assert "added: --speculative-adaptive; SPECGOV_TARGET=unix:///s\n" in capsys.readouterr().out


def test_a_failed_check_keeps_the_server_from_starting(
    world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    world.checks = [Check.failed("governed", "topk is 4", "use 1")]
    assert start([], ENVIRONMENT, lambda checks: print(checks[0].found)) == 1
    assert world.became is None
    said = capsys.readouterr()
    assert said.out == "topk is 4\n"
    assert "the server is not started" in said.err


@pytest.mark.parametrize("in_file", [True, False])
def test_switched_off_the_server_starts_as_it_would_without(
    world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_file: bool
) -> None:
    world.checks = [Check.failed("settings", "the mode is off", "set the mode active")]
    environment = {**ENVIRONMENT, "SPECGOV_MODE": "off"}
    if in_file:
        (tmp_path / "specgov.toml").write_text("mode = 'off'\n")
        environment = {"SPECGOV_CONFIG": str(tmp_path / "specgov.toml")}
    with pytest.raises(StartedError):
        start(["--model-path", "m"], environment, lambda checks: None)
    assert world.became == (
        sys.executable,
        [sys.executable, "-m", "sglang.launch_server", "--model-path", "m"],
        environment,
    )
    assert "starts without Specgov" in capsys.readouterr().out


@pytest.mark.parametrize("environment", [{}, {"SPECGOV_MODE": "off"}, {**ENVIRONMENT, "SPECGOV_MODE": "of"}])
def test_no_target_or_a_wrong_mode_is_not_off(world: Any, environment: dict[str, str]) -> None:
    world.checks = [Check.failed("settings", "no target, or a mode that there is not", "correct it")]
    assert start([], environment, lambda checks: None) == 1
    assert world.became is None


def test_a_sidecar_may_come_later(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    world.checks = [Check.fine("governed", ""), Check.failed(SIDECAR, "nothing answers", "start one")]
    with pytest.raises(StartedError):
        start([], ENVIRONMENT, lambda checks: None)
    assert "the fallback rule decides until the sidecar answers" in capsys.readouterr().out


def test_without_sglang_the_checks_say_so(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise PluginError("SGLang is not installed")

    monkeypatch.setattr(versions, "installed_version", missing)
    world.checks = [Check.failed("SGLang", "SGLang is not installed", "install it")]
    assert start(["--x"], ENVIRONMENT, lambda checks: None) == 1
    assert world.diagnosed == ["--x"]


def test_the_program(world: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "environ", {})
    assert main(["--model-path", "m"]) == 2
    with pytest.raises(StartedError):
        main(["--target", "unix:///t", "--", "--model-path", "m"])
    assert world.became[2] == {"SPECGOV_TARGET": "unix:///t"}
    assert "1 checks, 0 failed" in capsys.readouterr().out
