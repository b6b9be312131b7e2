"""How a command fails: one line for the user and an exit code."""

from __future__ import annotations

from typing import ClassVar


class CliError(Exception):
    """A failure that the user can understand from its message alone; exit code 1.

    The message is one line that says what is wrong, where, and what to do.
    """

    exit_code: ClassVar[int] = 1


class UsageError(CliError):
    """The command line asks for something that cannot be; exit code 2."""

    exit_code: ClassVar[int] = 2


class UnreachableError(CliError):
    """Nothing answers at the target; exit code 3."""

    exit_code: ClassVar[int] = 3
