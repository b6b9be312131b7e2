"""``specgov sglang``: does a server fit, start one governed, and does a release fit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from specgov.controller.cli import output, remote
from specgov.controller.cli.errors import UsageError

if TYPE_CHECKING:
    from specgov.sglang_plugin.report import Check

_COLOURS = {"ok": "green", "FAILED": "bold red", "not checked": "dim"}
ServerArguments = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- ARGUMENT [...]")]


def doctor(arguments: ServerArguments, /, *, target: remote.Target = None) -> int:
    """Say whether an SGLang server with these arguments would be governed, without starting its model.

    For example: specgov sglang doctor -- --model-path M --speculative-algorithm EAGLE3
    --speculative-draft-model-path D --speculative-adaptive

    Runs in SGLang's environment. Checks the release, the hooks, the worker that the arguments lead to, what
    does not go together with adaptive tiers, the tiers, and the sidecar. Exit code 1 where a check failed.
    Where only the plugin's own needs are installed: python -m specgov.sglang_plugin.doctor.

    Args:
        arguments: The server's own arguments, after --.
        target: Where the sidecar listens; default: SPECGOV_TARGET or SPECGOV_CONFIG.

    """
    from specgov.sglang_plugin.doctor import diagnose

    return _show(diagnose(_given(arguments), _environment(target)))


def launch(arguments: ServerArguments, /, *, target: remote.Target = None) -> int:
    """Start an SGLang server that follows the sidecar.

    For example: specgov sglang launch -- --model-path M --speculative-algorithm EAGLE3
    --speculative-draft-model-path D

    Makes the doctor's checks, adds the flags that adaptive tiers need where they are missing, shows what it
    added, and becomes the server. A failed check stops it, but for a sidecar that does not answer yet.

    Args:
        arguments: The server's own arguments, after --.
        target: Where the sidecar listens; default: SPECGOV_TARGET or SPECGOV_CONFIG, else the sidecar's own
            default socket.

    """
    from specgov.sglang_plugin.launch import start
    from specgov.sglang_plugin.settings import CONFIG_VARIABLE, TARGET_VARIABLE

    if target is None and not (os.environ.get(TARGET_VARIABLE) or os.environ.get(CONFIG_VARIABLE)):
        target = remote.target_or_default(None)
    return start(_given(arguments), _environment(target), _show)


def check_wheel(file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")], /) -> int:
    """Check a wheel of SGLang against what the plugin needs, without running it.

    For example: pip download --no-deps sglang==0.5.23 && specgov sglang check-wheel sglang-0.5.23-*.whl

    Exit code 1 where something that the plugin needs is gone or has changed.

    Args:
        file: The wheel.

    """
    from specgov.sglang_plugin.check_wheel import check_wheel as check

    return _show(check(file))


def _given(arguments: Sequence[str]) -> Sequence[str]:
    if not arguments:
        raise UsageError(
            "give the server's own arguments after --, as in: specgov sglang doctor -- --model-path M"
        )
    return arguments


def _environment(target: str | None) -> dict[str, str]:
    """This process's environment, with the target where one is given."""
    from specgov.sglang_plugin.settings import TARGET_VARIABLE

    given = {} if target is None else {TARGET_VARIABLE: target}
    return {**os.environ, **given}


def _show(checks: Sequence[Check]) -> int:
    from rich.table import Table
    from rich.text import Text

    from specgov.sglang_plugin.report import exit_code

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("check", "outcome", "found"):
        table.add_column(column, overflow="fold", no_wrap=column == "outcome")
    table.add_column("to do", overflow="fold", max_width=36)
    for check in checks:
        outcome = Text(check.outcome, style=_COLOURS[check.outcome])
        table.add_row(Text(check.name), outcome, Text(check.found), Text(check.remedy))
    output.console().print(table)
    failures = sum(check.outcome == "FAILED" for check in checks)
    output.print_line(f"{len(checks)} checks, {failures} failed")
    return exit_code(checks)
