"""The demo's live table; where there is no terminal, a plain line now and then."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from specgov.controller.cli.engine_run import EngineRun

RATE_WINDOW_S = 1.0
"""Simulated time over which the present output rate is taken."""
REFRESH_S = 0.2
LINE_S = 2.0
SHOWN_CHANGES = 8


class DemoView:
    """Shows a run as it goes; a context manager.

    Args:
        console: where to.
        policy: the rule that decides.
        duration_s: simulated time of the whole run.
        clock: seconds, monotonic; paces the display.

    """

    def __init__(self, console: Console, policy: str, duration_s: float, clock: Callable[[], float]) -> None:
        self._console = console
        self._policy = policy
        self._duration_s = duration_s
        self._clock = clock
        self._next_s = clock()
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        self._console.print(
            f"An emulated engine for {self._duration_s:g} s, under a sidecar with policy {self._policy}.",
            soft_wrap=True,
        )
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, run: EngineRun) -> None:
        """Called after every step; draws when it is time."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        if self._live is not None:
            self._next_s = now_s + REFRESH_S
            self._live.update(self._panel(run), refresh=True)
        else:
            self._next_s = now_s + LINE_S
            self._console.print(status_line(run), soft_wrap=True)

    def _panel(self, run: EngineRun) -> Group:
        bar = ProgressBar(total=self._duration_s, completed=run.end_s[-1], width=60)
        return Group(bar, _facts(run), Text("Last changes of tier:", style="bold"), _changes(run))


def status_line(run: EngineRun) -> str:
    """Where the run stands, in a line."""
    return (
        f"{run.end_s[-1]:5.1f} s  batch {run.batch_size[-1]:>3}  num_steps {run.num_steps[-1]}  "
        f"{run.recent_rate(RATE_WINDOW_S):6.0f} tokens/s  {run.switches} switches"
    )


def changes_of_tier(run: EngineRun, count: int) -> list[tuple[float, int, int, int]]:
    """The last changes, newest first: time in s, batch size, num_steps before and after."""
    changes = []
    for step in range(len(run.num_steps) - 1, 0, -1):
        before, after = run.num_steps[step - 1], run.num_steps[step]
        if before != after:
            changes.append((run.end_s[step], run.batch_size[step], before, after))
        if len(changes) == count:
            break
    return changes


def _facts(run: EngineRun) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right", min_width=8)
    table.add_row("time", f"{run.end_s[-1]:.1f} s")
    table.add_row("batch size", str(run.batch_size[-1]))
    table.add_row("num_steps", str(run.num_steps[-1]))
    table.add_row("output rate", f"{run.recent_rate(RATE_WINDOW_S):.0f} tokens/s")
    table.add_row("steps", str(len(run.end_s)))
    table.add_row("switches", str(run.switches))
    table.add_row("round trip p50", f"{run.round_trip_ms(0.5):.2f} ms" if run.round_trips_ms else "-")
    return table


def _changes(run: EngineRun) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("time", "batch size", "num_steps"):
        table.add_column(column, justify="right")
    for at_s, batch_size, before, after in changes_of_tier(run, SHOWN_CHANGES):
        table.add_row(f"{at_s:.1f} s", str(batch_size), f"{before} -> {after}")
    for _ in range(SHOWN_CHANGES - table.row_count):
        table.add_row("", "", "")
    return table
