"""What can go wrong with the decision log."""

from __future__ import annotations


class DecisionLogError(ValueError):
    """The log cannot be written as asked; the message says what to do."""


class RowsLost(Exception):  # noqa: N818 it names the event
    """The disk did not take ``rows`` rows, because of ``cause``."""

    def __init__(self, rows: int, cause: OSError) -> None:
        super().__init__(f"{rows} rows lost: {cause}")
        self.rows = rows
        self.cause = cause
