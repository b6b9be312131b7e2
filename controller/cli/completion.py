"""``specgov completion``: shell completion, drawn from the same parsers that read the command lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union

import tyro

from specgov.controller.cli.main import COMMANDS, unrun


def completion(shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional], /) -> None:
    """Print a completion script for your shell.

    For bash: specgov completion bash > ~/.local/share/bash-completion/completions/specgov

    For zsh: specgov completion zsh > "${fpath[1]}/_specgov"

    Args:
        shell: The shell that will read the script.

    """
    tree: dict[str, Callable[..., Any]] = {}
    groups: dict[str, dict[str, Callable[..., Any]]] = {}
    for command in COMMANDS:
        first, *rest = command.name.split()
        members = groups.setdefault(first, {}) if rest else tree
        members[rest[0] if rest else first] = unrun(command.load())
    tree |= {name: _group(members) for name, members in groups.items()}
    with contextlib.suppress(SystemExit):  # tyro exits once it has printed the script
        tyro.extras.subcommand_cli_from_dict(
            tree,
            prog="specgov",
            args=["--tyro-print-completion", shell],
            config=(
                tyro.conf.FlagCreatePairsOff,
                tyro.conf.OmitArgPrefixes,
                tyro.conf.OmitSubcommandPrefixes,
            ),
        )


def _group(members: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """One word of the command line that a second must follow, as in ``engines list``."""

    def group(member: Any) -> Any:
        return member

    choices = [
        Annotated[Any, tyro.conf.subcommand(name=name, constructor=member)]
        for name, member in members.items()
    ]
    # The suppressed None: a union of one would be no choice.
    group.__annotations__["member"] = Union[(*choices, Annotated[None, tyro.conf.Suppress])]
    return group
