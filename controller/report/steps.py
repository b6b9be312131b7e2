"""A log's steps as columns, one set for each engine, gathered row by row.

A step is joined with two decisions: the one that it followed, by its id, which gives its propensity; and the
newest that was made before it, whose estimates are what the model expected of it without having seen it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.controller.report.events import Event, EventLog

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

REMEMBERED_DECISIONS = 1024
UNKNOWN = -1


class LogContentError(ValueError):
    """Rows that do not make sense; the message says which."""


@dataclass(frozen=True)
class Steps:
    """The decode steps of one engine with one set of tiers, shape (S,) or as said; warm-up is left out.

    Attributes:
        engine: the engine's newest row.
        tiers: its tiers, T of them; ``positions`` P is the largest.
        time_s: wall clock.
        batch_size, num_steps, sum_seq_len_tokens, waiting_requests: of the step.
        tokens: output tokens of live requests.
        ms: the step's time, NaN where not valid.
        own_rule: whether it followed the engine's own rule.
        propensity: of the tier that ran, NaN where not known or where the guard chose.
        decided: the newest decision's tier, -1 where there was none.
        survived: (S, P + 1) live requests with at least 0, 1, ... P accepted drafts.
        expected_tokens, expected_ms: (S, T) as expected before the step, NaN where not known.
        events: what people should know of, in order.

    """

    engine: Mapping[str, Any]
    tiers: tuple[int, ...]
    policies: tuple[str, ...]
    time_s: Floats
    batch_size: Ints
    num_steps: Ints
    sum_seq_len_tokens: Ints
    waiting_requests: Ints
    tokens: Ints
    ms: Floats
    own_rule: NDArray[np.bool_]
    propensity: Floats
    decided: Ints
    survived: NDArray[np.uint16]
    expected_tokens: Floats
    expected_ms: Floats
    events: tuple[Event, ...]
    events_left_out: int
    reports_dropped: int

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def name(self) -> str:
        """The engine's id."""
        return str(self.engine["engine_id"])

    @property
    def timed(self) -> NDArray[np.bool_]:
        """Which steps have a time, (S,)."""
        return np.isfinite(self.ms)

    @property
    def tier_index(self) -> Ints:
        """Where the step's num_steps stands among the tiers, (S,)."""
        return np.searchsorted(np.array(self.tiers), self.num_steps).astype(np.int64)


@dataclass
class _Columns:
    """What grows while rows come; compact, so that a million steps take some 100 MB."""

    engine: dict[str, Any]
    tiers: tuple[int, ...]
    events: EventLog = field(default_factory=EventLog)
    policies: dict[str, None] = field(default_factory=dict)
    numbers: dict[str, array[Any]] = field(
        default_factory=lambda: {
            name: array(code)
            for name, code in (
                ("time_s", "d"), ("batch_size", "i"), ("num_steps", "h"), ("sum_seq_len_tokens", "q"),
                ("waiting_requests", "i"), ("tokens", "i"), ("ms", "f"), ("own_rule", "b"),
                ("propensity", "f"), ("decided", "h"), ("survived", "H"), ("expected_tokens", "f"),
                ("expected_ms", "f"),
            )
        }
    )  # fmt: skip
    decisions: dict[int, dict[str, Any]] = field(default_factory=dict)
    newest: dict[str, Any] | None = None
    newest_batch: int = 0
    reports_dropped: int = 0

    @property
    def positions(self) -> int:
        return self.tiers[-1]

    def remember(self, decision: dict[str, Any] | None, batch_size: int) -> None:
        """A decision was made for a batch."""
        if decision is None:
            return
        self.newest, self.newest_batch = decision, batch_size
        self.decisions[decision["decision_id"]] = decision
        if len(self.decisions) > REMEMBERED_DECISIONS:
            del self.decisions[next(iter(self.decisions))]
        self.policies.setdefault(decision["policy"])

    def add(self, row: dict[str, Any]) -> None:
        """A step; the decision in its row was made after it."""
        num_steps, batch_size, accepted = row["num_steps"], row["batch_size"], row["accepted"]
        if num_steps not in self.tiers:
            raise LogContentError(f"a step at num_steps {num_steps}, but the engine's tiers are {self.tiers}")
        put = self.numbers
        put["time_s"].append(row["time_s"])
        put["batch_size"].append(batch_size)
        put["num_steps"].append(num_steps)
        put["sum_seq_len_tokens"].append(row["sum_seq_len_tokens"])
        put["waiting_requests"].append(row["waiting_requests"])
        put["tokens"].append(sum((depth + 1) * count for depth, count in enumerate(accepted)))
        put["ms"].append(float("nan") if row["step_ms"] is None else row["step_ms"])
        put["own_rule"].append(row["followed_decision_id"] == 0)
        followed = self.decisions.get(row["followed_decision_id"])
        propensity = None if followed is None else _propensity(followed, num_steps)
        put["propensity"].append(float("nan") if propensity is None else propensity)
        put["decided"].append(UNKNOWN if self.newest is None else self.newest["num_steps"])
        put["survived"].extend(_survived(accepted, self.positions))
        self._add_estimates(batch_size)
        self.reports_dropped += row["reports_dropped"]
        self.events.step(row, followed)

    def _add_estimates(self, batch_size: int) -> None:
        decision = self.newest or {}
        tokens, ms = decision.get("expected_tokens"), decision.get("expected_ms")
        if not self.newest_batch or not tokens or not ms or len(tokens) != len(self.tiers):
            tokens = ms = [None] * len(self.tiers)
        scale = batch_size / max(self.newest_batch, 1)
        nan = float("nan")
        self.numbers["expected_tokens"].extend(nan if value is None else scale * value for value in tokens)
        self.numbers["expected_ms"].extend(nan if value is None else value for value in ms)

    def steps(self) -> Steps:
        """The columns as arrays, in the order of time."""
        columns = {name: np.array(values) for name, values in self.numbers.items()}
        order = np.argsort(columns["time_s"], kind="stable")
        shape = {
            "survived": self.positions + 1,
            "expected_tokens": len(self.tiers),
            "expected_ms": len(self.tiers),
        }
        kinds = {"own_rule": np.bool_, "survived": np.uint16}
        arrays: dict[str, Any] = {}
        for name, values in columns.items():
            column = values.reshape(-1, shape[name]) if name in shape else values
            floats = np.float64 if values.dtype.kind == "f" else np.int64
            arrays[name] = column[order].astype(kinds.get(name, floats))
        return Steps(
            self.engine,
            self.tiers,
            tuple(self.policies),
            **arrays,
            events=self.events.all(),
            events_left_out=self.events.left_out,
            reports_dropped=self.reports_dropped,
        )


def gather(rows: Iterable[tuple[str, dict[str, Any]]]) -> list[Steps]:
    """The steps of every engine in ``rows``, which come with where they stand.

    Engines without steps are left out; one whose tiers change is one more.

    Raises:
        LogContentError: a row lacks a field or contradicts its engine's; the message says where.

    """
    engines: dict[tuple[str, tuple[int, ...]], _Columns] = {}
    present: dict[str, _Columns] = {}
    for where, row in rows:
        try:
            kind = row["kind"]
            if kind == "engine":
                key = (row["engine_id"], tuple(row["tiers"]))
                columns = engines.setdefault(key, _Columns(row, key[1]))
                _begin(columns, row)
                present[row["engine_id"]] = columns
            elif kind in ("step", "decision"):
                _take(_of(present, row), row)
        except KeyError as error:
            raise LogContentError(f"{where}: the field {error} is missing") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise LogContentError(f"{where}: {error}") from error
    return [columns.steps() for columns in engines.values() if columns.numbers["time_s"]]


def _begin(columns: _Columns, row: dict[str, Any]) -> None:
    """A stream began, or a file, which repeats the rows of the engines that are known."""
    if columns.engine is not row and columns.engine["time_s"] == row["time_s"]:
        return
    columns.events.stream(row, again=columns.engine is not row)
    columns.engine = row
    columns.decisions.clear()
    columns.newest = None


def _of(present: dict[str, _Columns], row: dict[str, Any]) -> _Columns:
    engine_id = row["engine_id"]
    if engine_id not in present:
        raise LogContentError(f"no row before it says which tiers the engine {engine_id!r} has")
    return present[engine_id]


def _take(columns: _Columns, row: dict[str, Any]) -> None:
    if row["kind"] == "decision":
        columns.remember(row["decision"], 0)
        columns.events.decision(row)
        return
    if "warm_up" not in row["flags"]:
        columns.add(row)
    columns.remember(row["decision"], row["batch_size"])
    columns.events.decision(row)


def _propensity(followed: dict[str, Any], num_steps: int) -> float | None:
    """Of the tier that ran; None where it was not the draw's, but the guard's or another batch size's."""
    drawn = followed.get("guard_cause") is None and followed["reason"] not in ("guard", "fallback")
    propensity: float | None = followed["propensity"]
    return propensity if drawn and followed["num_steps"] == num_steps else None


def _survived(accepted: list[int], positions: int) -> list[int]:
    """How many requests had at least 0, 1, ... ``positions`` accepted drafts."""
    counts = [0] * (positions + 1)
    total = 0
    for depth in range(len(accepted) - 1, -1, -1):
        total += accepted[depth]
        counts[depth] = min(total, 65_535)
    return counts
