"""What the commands' options share: how they show in help, and reading numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tyro

from specgov.controller.cli.errors import UsageError

Number = TypeVar("Number", int, float)

LARGEST_WHOLE = 2**32 - 1
"""The protocol's 32-bit fields hold no more."""


def option(metavar: str) -> Any:
    """How an option whose default is nothing shows in ``--help``."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def non_negative(option: str, value: Number) -> Number:
    """``value`` if it is neither below 0 nor more than the protocol's whole numbers hold.

    Raises:
        UsageError: it is.

    """
    if value < 0:
        raise UsageError(f"{option} must not be negative, not {value}")
    if value > LARGEST_WHOLE:
        raise UsageError(f"{option} must be at most {LARGEST_WHOLE}, not {value}")
    return value


def shown(metavar: str) -> Any:
    """How an option with a default shows in ``--help``."""
    return tyro.conf.arg(metavar=metavar)


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """The comma-separated numbers of ``text``, none below 0.

    Raises:
        UsageError: something else stands there.

    """
    try:
        return [non_negative(option, kind(part)) for part in text.split(",")]
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} takes {expected} separated by commas, not {text!r}") from None
