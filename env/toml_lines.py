"""Where in a TOML text a key stands: the parser does not say, and an error without a line helps little."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TABLE = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")

Path = tuple[str | int, ...]


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line (from 1) of ``path``, else of the nearest table or key around it; None if there is none.

    A path names tables and keys, and elements of arrays of tables by number: ``("classes", 1, "share")``.
    """
    lines = _index(text)
    for end in range(len(path), 0, -1):
        line = lines.get(tuple(path[:end]))
        if line is not None:
            return line
    return None


def _index(text: str) -> dict[Path, int]:
    """The line of every table and key."""
    lines: dict[Path, int] = {}
    lengths: dict[Path, int] = {}  # of arrays of tables
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _absolute(_split(header[2]), lengths)
            if header[1] == "[[":
                table = table[:-1] if isinstance(table[-1], int) else table
                lengths[table] = lengths.get(table, 0) + 1
                lines.setdefault(table, number)
                table = (*table, lengths[table] - 1)
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_split(key[1])), number)
    return lines


def _absolute(names: list[str], lengths: dict[Path, int]) -> Path:
    """The path with the number of the newest element after each array of tables."""
    path: Path = ()
    for name in names:
        path = (*path, name)
        if path in lengths:
            path = (*path, lengths[path] - 1)
    return path


def _split(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]
