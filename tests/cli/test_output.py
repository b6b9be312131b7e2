"""Tables on narrow terminals, and readers that go away."""

from __future__ import annotations

import io
import os
import sys

import pytest

from specgov.controller.cli import output

COLUMNS = ("engine", "model", "connected", "mode", "policy", "num_steps", "batch", "reports", "switches")
ROW = ("an-engine", "llama-3.1-8b", "yes", "active", "greedy", 3, 128, 123456, 12)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_no_column_disappears_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    output.console().print(output.table(COLUMNS, [ROW]))
    for cell in (*COLUMNS, *ROW):
        assert str(cell) in terminal.getvalue()


def test_what_redraws_its_lines_keeps_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    assert output.console(redraws=True).width == 40


def test_a_reader_that_went_away_is_left_to_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``print``: rich would end the process with exit code 1."""
    read, write = os.pipe()
    os.close(read)
    gone = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", gone)
    with pytest.raises(BrokenPipeError):
        output.console().print("x" * 10_000)
    os.dup2(os.open(os.devnull, os.O_WRONLY), write)
    gone.close()
