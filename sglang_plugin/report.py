"""Checks and their outcome, as an engine's environment can print them: with the standard library alone."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "FAILED", "not checked"]
_WIDEST_NAME = 53


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what came out, what was found, and what to do where it failed."""

    name: str
    outcome: Outcome
    found: str
    remedy: str = ""

    @classmethod
    def fine(cls, name: str, found: str) -> Check:
        """A check that passed."""
        return cls(name, "ok", found)

    @classmethod
    def failed(cls, name: str, found: str, remedy: str) -> Check:
        """A check that failed."""
        return cls(name, "FAILED", found, remedy)

    @classmethod
    def skipped(cls, name: str, found: str) -> Check:
        """A check that could not be made, since another failed, or that has no object here."""
        return cls(name, "not checked", found)


def exit_code(checks: Iterable[Check]) -> int:
    """1 where a check failed, else 0."""
    return int(any(check.outcome == "FAILED" for check in checks))


def print_checks(checks: Iterable[Check]) -> int:
    """Print the checks on stdout; returns their exit code."""
    checks = list(checks)
    width = min(max(len(check.name) for check in checks), _WIDEST_NAME)
    for check in checks:
        sys.stdout.write("\n".join(_lines(check, width)) + "\n")
    failures = sum(check.outcome == "FAILED" for check in checks)
    sys.stdout.write(f"{len(checks)} checks, {failures} failed\n")
    return exit_code(checks)


def _lines(check: Check, width: int) -> list[str]:
    columns = max(shutil.get_terminal_size((120, 24)).columns, 60)
    text = check.found + (f"; to do: {check.remedy}" if check.remedy else "")
    indent = " " * (width + 15)
    head = f"{check.name:<{width}}  {check.outcome:<11}  "
    if len(head) > len(indent):
        return [
            head.rstrip(),
            *textwrap.wrap(
                text, columns, break_long_words=False, initial_indent=indent, subsequent_indent=indent
            ),
        ]
    return textwrap.wrap(head + text, columns, subsequent_indent=indent, break_long_words=False)
