"""``specgov completion``: shell completion, drawn from the same parsers that read the command lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from specgov.controller.cli.main import COMMANDS, unrun


def completion(shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional], /) -> None:
    """Print a completion script for your shell.

    For bash: specgov completion bash > ~/.local/share/bash-completion/completions/specgov

    For zsh: specgov completion zsh > "${fpath[1]}/_specgov"

    Args:
        shell: The shell that will read the script.

    """
    tree: dict[str, Callable[..., Any]] = {command.name: unrun(command.load()) for command in COMMANDS}
    with contextlib.suppress(SystemExit):  # tyro exits once it has printed the script
        tyro.extras.subcommand_cli_from_dict(
            tree,
            prog="specgov",
            args=["--tyro-print-completion", shell],
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
        )
