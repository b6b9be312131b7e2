"""Steps out of the sidecar's decision log (JSON lines, schema version 1).

The log of one engine, or of several of one kind: where they name different models, machines or
tensor-parallel sizes, their steps do not belong into one profile, and the log is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgov.env.recording import Recording, RecordingError, Row, digest, filtered

SCHEMA = "specgov.decision_log"
SCHEMA_VERSION = 1

KIND = ("engine", "model", "draft", "gpu", "tensor_parallel_size", "graph_batch_sizes")
"""Engines that differ in one of these do not share step times."""


def parse_decision_log(text: str, path: Path) -> Recording:
    """The steps of a decision log; ``path`` names it in errors. A last line that is cut short is left out.

    Raises:
        RecordingError: not a decision log of this schema, or of engines that differ in kind.

    """
    rows: dict[str, list[Row]] = {}
    engines: list[dict[str, Any]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not text.endswith("\n"):
                break
            raise RecordingError(f"{where}: not a line of JSON ({error})") from error
        _check_header(entry, number, where)
        if entry.get("kind") == "engine":
            engines.append(entry)
        elif entry.get("kind") == "step":
            rows.setdefault(str(entry.get("engine_id")), []).append(logged_step(entry, where))
    if not rows:
        raise RecordingError(f"{path}: holds no steps")
    kinds = {json.dumps({key: engine.get(key) for key in KIND}, sort_keys=True) for engine in engines}
    if len(kinds) > 1:
        raise RecordingError(
            f"{path}: holds engines that differ in {', '.join(KIND)}; split the log by engine_id first"
        )
    in_order = [row for engine_rows in rows.values() for row in engine_rows]
    return filtered(path.name, digest(text), True, in_order, engines[0] if engines else None)


def require_one_kind(recordings: Sequence[Recording]) -> None:
    """Whether the decision logs among ``recordings`` belong into one profile.

    Raises:
        RecordingError: their engines differ in kind.

    """
    logs = [recording for recording in recordings if recording.engine]
    for log in logs[1:]:
        if unlike := [key for key in KIND if log.engine.get(key) != logs[0].engine.get(key)]:
            raise RecordingError(
                f"{logs[0].name} and {log.name} are of engines that differ in {', '.join(unlike)}"
            )


def logged(recordings: Sequence[Recording], key: str) -> Any:
    """What a decision log says of its engine; none where no one does."""
    return next((recording.engine[key] for recording in recordings if recording.engine.get(key)), None)


def logged_engine(recordings: Sequence[Recording]) -> str:
    """The engine and its version, empty where no decision log names them."""
    parts = (logged(recordings, "engine"), logged(recordings, "engine_version"))
    return "-".join(str(part) for part in parts if part)


def _check_header(entry: Any, number: int, where: str) -> None:
    if not isinstance(entry, dict):
        raise RecordingError(f"{where}: expected a JSON object")
    if number > 1 and entry.get("kind") != "log":
        return
    if entry.get("schema") != SCHEMA:
        raise RecordingError(f"{where}: not a decision log (its first line should say {SCHEMA!r})")
    if entry.get("schema_version") != SCHEMA_VERSION:
        raise RecordingError(
            f"{where}: decision log of schema version {entry.get('schema_version')!r}, "
            f"this release reads {SCHEMA_VERSION}"
        )


def logged_step(entry: dict[str, Any], where: str) -> Row:
    """A step out of the log's row for it; ``where`` names the row in errors.

    Raises:
        RecordingError: a field is missing or is no number.

    """
    try:
        step_ms = entry["step_ms"]
        return Row(
            step_id=int(entry["step_id"]),
            is_decode=True,
            batch_size=int(entry["batch_size"]),
            num_steps=int(entry["num_steps"]),
            sum_seq_len_tokens=int(entry["sum_seq_len_tokens"]),
            step_ms=None if step_ms is None else float(step_ms),
            padded_batch_size=int(entry["padded_batch_size"]),
            warm_up="warm_up" in entry["flags"],
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise RecordingError(f"{where}: {what}") from error
