"""What the reports' tables share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""By load and contestant."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def spread(values: Sequence[float], form: str = ".0f") -> str:
    """The median, and the least and the largest where there are several."""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"
