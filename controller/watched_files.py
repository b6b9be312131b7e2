"""Whether a file has changed, by what the system says of it, without reading it."""

from __future__ import annotations

import os

Stamp = tuple[int, int, int] | None
"""Inode, size, and nanoseconds at which the contents changed last; None: there is no file."""


def stamp_of(path: str) -> Stamp:
    """The file's stamp. A link's target counts, so that a swapped link is a change."""
    try:
        found = os.stat(path)  # noqa: PTH116 one call that follows links
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
