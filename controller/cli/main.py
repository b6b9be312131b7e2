"""The ``specgov`` command: a table of subcommands, each loaded only when it is called.

A command is a function whose typed parameters tyro turns into options and whose docstring is its help; it
returns an exit code or None (0). Exit codes: 0 fine, 1 failed, 2 usage, 3 unreachable, 130 interrupted.
A command reports a user's mistake by raising ``CliError`` or one of its kinds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specgov.controller.cli.errors import CliError, UsageError

# Before a command loads numpy: on matrices as small as the rules' a second BLAS thread saves nothing, and
# while it waits it spins on a core that the engine needs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before it loads gRPC, which would write a line to stderr for each failed handshake of a stranger's.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

CommandFunction = Callable[..., int | None]

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its words, ``module:function`` below ``specgov``, and one line of help."""

    name: str
    target: str
    summary: str

    def load(self) -> CommandFunction:
        """Import the command's module, and with it whatever the command needs."""
        module, _, function = self.target.partition(":")
        loaded: CommandFunction = getattr(importlib.import_module(f"specgov.{module}"), function)
        return loaded


# One row a command. Words separated by a space make a group ("config check").
COMMANDS = (
    Command("demo", "controller.cli.demo:demo", "See it work: sidecar and emulated engine, a minute, no GPU"),
    Command("serve", "controller.cli.serve:serve", "Run the sidecar"),
    Command("decide", "controller.cli.decide:decide", "Ask the sidecar one question and print its decision"),
    Command("engines list", "controller.cli.engines:list_engines", "List the engines that the sidecar knows"),
    Command(
        "engines show", "controller.cli.engines:show", "Show one engine: state, estimates, last decisions"
    ),
    Command(
        "engines mode", "controller.cli.engines:mode", "Set an engine's mode: active, shadow, frozen or off"
    ),
    Command("engines policy", "controller.cli.engines:policy", "Give an engine another policy"),
    Command("engines canary", "controller.cli.canary:canary", "Let a candidate decide a share of the steps"),
    Command("engines watch", "controller.cli.engines:watch", "Follow the engines step by step"),
    Command("top", "controller.cli.top:top", "Show the engines live, in a terminal"),
    Command("health", "controller.cli.health:health", "Say whether the sidecar serves, as a probe asks"),
    Command("config check", "controller.cli.config:check", "Check a configuration file of the sidecar"),
    Command("emulate", "controller.cli.emulate:emulate", "Play an engine against a running sidecar"),
    Command("replay", "controller.cli.replay:replay", "Compare the policies on a recording's step costs"),
    Command("report", "controller.cli.report:report", "Make a page of what a decision log tells"),
    Command("simulate", "controller.cli.simulate:simulate", "Run a policy on a simulated server"),
    Command("scenarios list", "controller.cli.scenarios:list_scenarios", "List the bundled scenarios"),
    Command(
        "scenarios show", "controller.cli.scenarios:show", "Print a bundled scenario, to copy and change"
    ),
    Command("evaluate", "controller.cli.evaluate:evaluate", "Compare all rules with an oracle on a suite"),
    Command("plot", "controller.cli.evaluation_plot:plot", "Draw the results of evaluate"),
    Command("tune sglang", "controller.cli.tune:sglang", "Find SGLang's best adaptive config for a profile"),
    Command("tune vllm", "controller.cli.tune:vllm", "Find vLLM's best draft tokens by batch size"),
    Command("tune threshold", "controller.cli.tune:threshold", "Find the best plain batch-size threshold"),
    Command("tune peers", "controller.cli.tune_peers:tune_peers", "Tune the opponents that evaluate plays"),
    Command("train", "controller.cli.train:train", "Train a policy network in the simulator"),
    Command("export", "controller.cli.train:export", "Make a policy bundle of a training run"),
    Command("policy push", "controller.cli.bundles:push", "Let running engines try a policy bundle"),
    Command("policy list", "controller.cli.bundles:list_bundles", "List the bundles in the sidecar's store"),
    Command("policy rollback", "controller.cli.bundles:rollback", "Go back to the policy before"),
    Command("policy show", "controller.cli.train:show", "Show a policy bundle: network, training, scores"),
    Command("calibrate", "controller.cli.calibrate:calibrate", "Make a profile from recorded steps"),
    Command("profiles list", "controller.cli.profiles:list_profiles", "List the bundled step-time profiles"),
    Command("profiles show", "controller.cli.profiles:show", "Show a profile, and save a picture of it"),
    Command("profiles compare", "controller.cli.profiles:compare", "Compare two profiles' break-even points"),
    Command(
        "sglang doctor", "controller.cli.sglang:doctor", "Say whether an SGLang server would be governed"
    ),
    Command("sglang launch", "controller.cli.sglang:launch", "Start an SGLang server that is governed"),
    Command("sglang profile", "controller.cli.sglang_profile:profile", "Record a live server's step times"),
    Command(
        "sglang check-wheel", "controller.cli.sglang:check_wheel", "Check a wheel of SGLang for the plugin"
    ),
    Command(
        "completion", "controller.cli.completion:completion", "Print a completion script for bash or zsh"
    ),
)
_NEEDED = ("tyro", "rich", "structlog", "pydantic", "prometheus_client", "safetensors")
"""Modules of the dependencies that the plugin can do without, and the commands cannot."""
# Shorter ways to say it.
ALIASES = {"engines": "engines list", "profiles": "profiles list", "scenarios": "scenarios list"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``specgov`` with ``argv`` (default: the process's) and return its exit code."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except CliError as error:
        print(f"specgov: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"specgov: {where}{error.strerror or error}", file=sys.stderr)  # noqa: T201
        return 1
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _NEEDED:
            raise
        print(f"specgov: {_is_missing(name)}", file=sys.stderr)  # noqa: T201
        return CliError.exit_code
    except Exception as error:
        # The package's own exceptions say what is wrong and what to do; anything else is a defect of ours.
        if not type(error).__module__.startswith("specgov."):
            raise
        print(f"specgov: {error}", file=sys.stderr)  # noqa: T201
        return CliError.exit_code


def _is_missing(name: str) -> str:
    return (
        f"the commands need the module {name}, which is not installed: install specgov with its dependencies "
        "(without --no-deps); beside SGLang, with the plugin's own needs only, there are python -m "
        "specgov.sglang_plugin.doctor, launch and check_wheel"
    )


def _silence_stdout() -> None:
    """After the reader went away (``specgov ... | head``): so that Python's last flush does not fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())  # noqa: T201
        return 0 if argv else UsageError.exit_code
    if argv[0] == "--version":
        print(f"specgov {version()}")  # noqa: T201
        return 0
    command, arguments = _find(argv)
    if command is None:
        print(overview(group=argv[0]))  # noqa: T201
        return 0
    return parse(command, arguments)() or 0


def _find(argv: list[str]) -> tuple[Command | None, list[str]]:
    """The command that ``argv`` names and its arguments; no command where a group's help is asked for."""
    by_name = {command.name: command for command in COMMANDS}
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in by_name:
            return by_name[name], argv[words:]
    members = [name.split()[1] for name in by_name if name.startswith(f"{argv[0]} ")]
    if not members:
        known = ", ".join(dict.fromkeys(name.split()[0] for name in by_name))
        raise UsageError(f"there is no command {argv[0]!r}; there are {known}; see specgov --help")
    if argv[1:2] in (["-h"], ["--help"]):
        return None, []
    if argv[0] in ALIASES and not (argv[1:] and not argv[1].startswith("-")):
        return by_name[ALIASES[argv[0]]], argv[1:]
    given = f"not {argv[1]!r}" if argv[1:] else "nothing followed"
    raise UsageError(f"{argv[0]} takes one of {', '.join(members)}; {given}; see specgov {argv[0]} --help")


def parse(command: Command, arguments: Sequence[str]) -> Callable[[], int | None]:
    """The command bound to its parsed arguments, ready to be called.

    Raises:
        UsageError: the arguments do not fit the command.
        SystemExit: help was asked for and printed.

    """
    import tyro

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            bound: Callable[[], int | None] = tyro.cli(
                unrun(command.load()),
                prog=f"specgov {command.name}",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as ended:
        if ended.code in (0, None):
            raise
        raise UsageError(_one_line(stderr.getvalue(), command.name)) from None
    return bound


def unrun(function: CommandFunction) -> Callable[..., Any]:
    """``function`` with the same parameters, that binds its arguments and does not run."""

    @functools.wraps(function)
    def bind(*args: Any, **kwargs: Any) -> Callable[[], int | None]:
        return functools.partial(function, *args, **kwargs)

    return bind


def _one_line(box: str, name: str) -> str:
    """What tyro's framed error says, without frame, repeated help and line breaks."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    sections = " ".join(lines).split("─")
    said = [section.strip() for section in sections if section.strip()]
    kept = [text for text in said if not text.startswith(("For full helptext", "Argument helptext"))]
    message = "; ".join(" ".join(text.split()) for text in kept) or "the arguments do not fit"
    return f"{name}: {message}; see specgov {name} --help"


def overview(group: str | None = None) -> str:
    """The help of the whole program, or of the commands whose first word is ``group``."""
    shown = [command for command in COMMANDS if group is None or command.name.split()[0] == group]
    width = max(len(command.name) for command in shown)
    rows = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in shown)
    if group is not None:
        return (
            f"usage: specgov {group} COMMAND [OPTIONS]\n\n{rows}\n\nspecgov {group} COMMAND --help says more."
        )
    return (
        "usage: specgov COMMAND [OPTIONS]\n\n"
        "A speculation governor for LLM serving: at each decode step it decides whether to speculate,\n"
        "and how deep.\n\n"
        f"commands:\n{rows}\n\n"
        "options:\n  -h, --help  This text\n  --version   The version\n\n"
        "specgov COMMAND --help says more about one. Begin with: specgov demo\n"
        "Exit codes: 0 fine, 1 failed, 2 usage, 3 the sidecar cannot be reached, 130 interrupted."
    )


def version() -> str:
    """The installed distribution's version."""
    from importlib.metadata import version as distribution_version

    return distribution_version("specgov")


if __name__ == "__main__":
    sys.exit(main())
