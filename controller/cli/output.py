"""How commands print: tables for people, JSON for programs, progress for the patient."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 120
LEAST_WIDTH = 100
"""What the widest table needs; a narrower terminal breaks its lines, where rich would leave out columns."""


class _Console(Console):
    """A console that lets the command's caller see that the reader went away, as ``print`` does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stderr: bool = False, redraws: bool = False) -> Console:
    """A console as wide as the terminal, or of one fixed width where there is none.

    At least ``LEAST_WIDTH`` wide, but for one that redraws its lines and so must know where they break.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = WIDTH_WITHOUT_TERMINAL
    if stream.isatty():
        columns = shutil.get_terminal_size().columns
        width = columns if redraws else max(columns, LEAST_WIDTH)
    return _Console(file=stream, width=width, highlight=False, soft_wrap=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose first column is text and whose others are right-aligned."""
    built = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        built.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        built.add_row(*(str(cell) for cell in row))
    return built


def print_json(value: Any) -> None:
    """``value`` as indented JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_line(value: Any) -> None:
    """A text, or anything else as JSON, as one line that a reader downstream sees at once."""
    sys.stdout.write((value if isinstance(value, str) else json.dumps(value)) + "\n")
    sys.stdout.flush()


def progress() -> Progress:
    """A progress bar on stderr that leaves nothing behind, and shows nothing where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True, redraws=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
