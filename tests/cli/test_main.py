"""The command's frame: help, exit codes, one line for each failure, and nothing loaded that is not needed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from specgov.controller.cli import main as cli
from specgov.controller.cli.main import COMMANDS, Command

HEAVY = ("torch", "gymnasium", "stable_baselines3", "sglang", "matplotlib", "specgov.env")


def modules_after(tmp_path: Path, *argv: str) -> tuple[set[str], int]:
    """The modules that ``specgov *argv`` has loaded when it ends, and its exit code."""
    listing = tmp_path / "modules"
    code = (
        "import sys, atexit, pathlib\n"
        f"atexit.register(lambda: pathlib.Path({str(listing)!r}).write_text('\\n'.join(sys.modules)))\n"
        "from specgov.controller.cli.main import main\n"
        f"sys.exit(main({list(argv)!r}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    return set(listing.read_text().split()), ended.returncode


def test_help_loads_no_library_at_all(tmp_path: Path) -> None:
    loaded, code = modules_after(tmp_path, "--help")
    assert code == 0
    assert not loaded & {*HEAVY, "grpc", "numpy", "rich", "tyro", "pydantic"}


@pytest.mark.parametrize("argv", [["engines", "list"], ["sglang", "doctor", "--", "--model-path", "m"]])
def test_with_the_plugins_own_needs_only_it_says_what_to_do(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after ``pip install --no-deps`` and grpcio and protobuf: None in sys.modules is a missing module."""
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(argv) == 1
    said = capsys.readouterr().err
    assert said.startswith("specgov: the commands need the module tyro, which is not installed")
    assert (said.count("\n"), "python -m specgov.sglang_plugin.doctor" in said) == (1, True)


@pytest.mark.parametrize(
    "argv",
    [
        ("decide", "--batch-size", "3", "--acceptance", "0.5", "--target", "unix:///nowhere/specgov.sock"),
        ("engines", "--target", "unix:///nowhere/specgov.sock"),
    ],
)
def test_asking_the_sidecar_loads_neither_env_nor_torch(tmp_path: Path, argv: tuple[str, ...]) -> None:
    loaded, code = modules_after(tmp_path, *argv)
    assert code == 3  # nobody there: the question was asked
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_an_example(run, command: Command) -> None:
    ran = run(*command.name.split(), "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"usage: specgov {command.name}" in ran.out
    assert "specgov " + command.name.removesuffix(" list") in ran.out.partition("\n")[2]


def test_overview_lists_every_command(run) -> None:
    ran = run("--help")
    assert ran.code == 0
    assert all(f"  {command.name} " in ran.out for command in COMMANDS)
    assert max(map(len, ran.out.splitlines())) <= 100


def test_a_group_has_help(run) -> None:
    ran = run("engines", "--help")
    assert ran.code == 0
    assert "engines watch" in ran.out
    assert "demo" not in ran.out


def test_version(run) -> None:
    assert run("--version").out == f"specgov {version('specgov')}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("nonsense",), "there is no command 'nonsense'"),
        (("config",), "config takes one of check; nothing followed"),
        (("engines", "nonsense"), "not 'nonsense'"),
        (("completion", "fish"), "fish"),
        (("decide",), "--batch-size"),
        (("decide", "--batch-size", "many", "--acceptance", "0.5"), "--batch-size"),
        (("decide", "--batch-size", "3", "--nonsense"), "--nonsense"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, argv: tuple[str, ...], said: str) -> None:
    ran = run(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("specgov: ")
    assert "─" not in ran.err


def test_no_command_shows_the_overview_and_is_wrong_usage(run) -> None:
    assert run().code == 2


def raises(error: BaseException) -> object:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (
            FileNotFoundError(2, "No such file or directory", "x.csv"),
            1,
            "specgov: x.csv: No such file or directory\n",
        ),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_what_may_happen_to_a_command(
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, code: int, said: str
) -> None:
    monkeypatch.setattr(cli.Command, "load", lambda _: raises(error))
    monkeypatch.setattr(cli, "_silence_stdout", lambda: None)
    ran = run("demo")
    assert (ran.code, ran.err) == (code, said)


def test_a_defect_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.Command, "load", lambda _: raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(run, shell: str) -> None:
    ran = run("completion", shell)
    assert ran.code == 0
    for word in ("decide", "engines", "watch", "every-steps", "accept-length"):
        assert word in ran.out


def test_bash_accepts_the_completion(run, tmp_path: Path) -> None:
    script = tmp_path / "specgov.bash"
    script.write_text(run("completion", "bash").out)
    assert subprocess.run(["/bin/bash", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("engines", ""), {"list", "show", "mode", "policy", "canary", "watch"}),
        (("config", ""), {"check"}),
        (("engines", "mode", "some-engine", "--t"), {"--target"}),
        (("decide", "--ba"), {"--batch-size"}),
    ],
)
def test_bash_completes_both_words_of_a_command(
    run, tmp_path: Path, typed: tuple[str, ...], offered: set[str]
) -> None:
    script = tmp_path / "specgov.bash"
    script.write_text(run("completion", "bash").out)
    asked = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; '
        'COMP_POINT=${#COMP_LINE}; _tyro_specgov; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    bash = ["/bin/bash", "-c", asked, "bash", str(script), "specgov", *typed]
    answer = subprocess.run(bash, check=True, capture_output=True, text=True).stdout.split()
    assert set(answer) - {"-h", "--help"} == offered
