"""How ``specgov top`` looks: a table as wide as there is room for, in ASCII: any terminal shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specgov.controller.cli.top_state import Row, TopState

ENOUGH_FOR_REASONS = 19
IDLE_S = 3.0
"""A connected engine without a step for so long is shown as idle."""
LINES_AROUND = 4
"""Heading, the table's head and its rule, and the last line."""


@dataclass(frozen=True, slots=True)
class Column:
    """``least_columns``: the terminal's width from which on it is shown."""

    title: str
    width: int
    text: Callable[[Row], str]
    least_columns: int = 0
    left: bool = False


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mode(row: Row) -> str:
    if not row.connected:
        return "gone"
    if row.policy_failure:
        return "FAILED"
    return "GUARD" if row.guard else row.mode


def _batch(row: Row) -> str:
    if row.connected and row.idle_s is not None and row.idle_s >= IDLE_S:
        return "idle"
    return _number(row.batch_size, "d")


def _gain(row: Row) -> str:
    if row.gain is None:
        return "-"
    return f"{100 * row.gain:+.{1 if abs(row.gain) < 0.9995 else 0}f}%"


def _reasons(row: Row) -> str:
    return _shares(row.reason_shares, " ").replace("exploration", "explore")


def _shares(shares: Sequence[tuple[object, float]], separator: str) -> str:
    return " ".join(f"{value}{separator}{100 * share:.0f}" for value, share in shares if share >= 0.005)


COLUMNS = (
    Column("engine", 12, lambda row: row.engine_id, left=True),
    Column("model", 16, lambda row: row.model or "-", 150, left=True),
    Column("policy", 12, lambda row: row.policy, 110, left=True),
    Column("mode", 6, _mode, left=True),
    Column("batch", 5, _batch),
    Column("wait", 5, lambda row: _number(row.waiting_requests, "d"), 110),
    Column("KV%", 4, lambda row: _number(row.kv_use_ratio and 100 * row.kv_use_ratio, ".0f"), 130),
    Column("k", 2, lambda row: _number(row.num_steps, "d")),
    Column("accept", 6, lambda row: _number(row.accept_length, ".2f")),
    Column("ms/step", 7, lambda row: _number(row.step_ms, ".2f"), 110),
    Column("steps/s", 7, lambda row: _number(row.steps_per_s, ".0f"), 124),
    Column("tok/s", 6, lambda row: _number(row.output_tokens_per_s, ".0f")),
    Column("gain~", 6, _gain),
    Column("lag", 4, lambda row: _number(row.lag_steps, "g")),
    Column("rt ms", 5, lambda row: _number(row.round_trip_ms, ".2f")),
    Column("lost", 5, lambda row: str(row.reports_lost), 124),
    Column("k:% of steps", 28, lambda row: _shares(row.tier_shares, ":"), 180, left=True),
    Column("reasons, %", 14, _reasons, left=True),
)


def screen(state: TopState, target: str, time_of_day: str, columns: int, lines: int | None) -> Group:
    """All of it, for a terminal of so many columns and lines (None: as many as it takes)."""
    rows = state.rows()
    notes = _notes(state, rows, columns)
    room = len(rows) if lines is None else max(1, lines - LINES_AROUND - len(notes))
    hidden = len(rows) - room
    if hidden > 0:
        rows = rows[: room - 1]
        notes = [Text(f"and {hidden + 1} more engines: specgov engines list"), *notes]
    parts: list[Text | Table] = [_heading(state, target, time_of_day, columns)]
    if rows:
        parts.append(_table(rows, columns, dim=bool(state.problem)))
    elif state.ever_listed:
        parts.append(Text("no engine has connected yet"))
    return Group(*parts, *notes)


def _heading(state: TopState, target: str, time_of_day: str, columns: int) -> Text:
    rows = state.rows()
    connected = sum(row.connected for row in rows)
    rate = sum(row.output_tokens_per_s or 0.0 for row in rows)
    right = f"{connected}/{len(rows)} engines  {rate:.0f} tok/s  last {state.window_s:g} s  {time_of_day}"
    left = cut(f"specgov {target}", max(7, columns - len(right) - 2))
    return Text(f"{left:<{max(0, columns - len(right))}}{right}"[:columns], style="bold", no_wrap=True)


def _notes(state: TopState, rows: Sequence[Row], columns: int) -> list[Text]:
    """What needs an eye, a line each."""
    said: list[str] = []
    if state.problem:
        said.append(f"no answer for {state.problem_for_s():.0f} s, trying again: {state.problem}")
    elif state.watch_problem:
        said.append(f"steps cannot be followed, trying again: {state.watch_problem}")
    said += [f"{row.engine_id}: policy failed: {row.policy_failure}" for row in rows if row.policy_failure]
    said += [f"{row.engine_id}: the guard does not ask the policy: {row.guard}" for row in rows if row.guard]
    return [Text(cut(line, columns), style="bold red", no_wrap=True) for line in said]


def _table(rows: Sequence[Row], columns: int, *, dim: bool) -> Table:
    shown = [column for column in COLUMNS if column.least_columns <= columns]
    *fixed, last = shown
    # The first column grows with the longest id while the last, which takes what is left, keeps enough.
    room = columns - sum(column.width + 1 for column in fixed)
    longest = max(len(row.engine_id) for row in rows)
    more = min(max(0, longest - fixed[0].width), max(0, room - ENOUGH_FOR_REASONS))
    widths = {column.title: column.width for column in fixed}
    widths |= {fixed[0].title: fixed[0].width + more, last.title: max(1, room - more)}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for column in shown:
        width = widths[column.title]
        justify: Literal["left", "right"] = "left" if column.left else "right"
        table.add_column(Text(cut(column.title, width)), width=width, no_wrap=True, justify=justify)
    names = short_names([row.engine_id for row in rows], widths[fixed[0].title])
    for row, name in zip(rows, names, strict=True):
        style = "red" if row.policy_failure or row.guard else ("dim" if dim or not row.connected else "")
        cells = [name, *(cut(column.text(row), widths[column.title]) for column in shown[1:])]
        table.add_row(*map(Text, cells), style=style)
    return table


def plain_lines(state: TopState, time_of_day: str) -> list[str]:
    """A line an engine, for what is no terminal."""
    if state.problem:
        return [f"{time_of_day}  {state.problem}"]
    lines = []
    for row in state.rows():
        facts = [f"{column.title} {column.text(row).strip() or '-'}" for column in COLUMNS[1:]]
        lines.append("  ".join((time_of_day, row.engine_id, *facts)))
        if row.policy_failure:
            lines.append(f"{time_of_day}  {row.engine_id}  policy failed: {row.policy_failure}")
        if row.guard:
            lines.append(f"{time_of_day}  {row.engine_id}  the guard does not ask the policy: {row.guard}")
    return lines or [f"{time_of_day}  no engine has connected yet"]


def short_names(names: Sequence[str], width: int) -> list[str]:
    """The names in at most ``width`` characters: their ends, or head and end where the ends are the same.

    Names made of host and port differ at the end.
    """
    if all(len(name) <= width for name in names):
        return [cut(name, width) for name in names]
    by_end = [name if len(name) <= width else "~" + name[1 - width :] for name in names]
    if len(set(by_end)) < len(set(names)):
        head = width // 2
        by_end = [
            name if len(name) <= width else f"{name[:head]}~{name[head + 1 - width :]}" for name in names
        ]
    return [cut(name, width) for name in by_end]


def cut(text: str, width: int) -> str:
    """``text`` in printable characters, at most ``width`` of them; a ~ at the end says that it was cut."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= width else shown[: width - 1] + "~"
