"""Steps out of the sidecar's decision log (``specgov.env.logged_rows`` says what is read).

The log of one engine, or of several of one kind: where they name different models, machines or
tensor-parallel sizes, their steps do not belong into one profile, and the log is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgov.env.logged_prefill import Interruptions
from specgov.env.logged_rows import LogFile, log_files
from specgov.env.recording import Recording, RecordingError, Row, filtered

KIND = ("engine", "model", "draft", "gpu", "tensor_parallel_size", "graph_batch_sizes")
"""Engines that differ in one of these do not share step times."""


def read_decision_log(path: str | Path) -> Recording:
    """The steps of a decision log: a file, a folder of parts, or a URL.

    Raises:
        RecordingError: not a decision log of a known schema, or of engines that differ in kind.

    """
    rows: dict[str, list[Row]] = {}
    interruptions: dict[str, Interruptions] = {}
    engines: list[dict[str, Any]] = []
    files = log_files([path])
    for file in files:
        for where, entry in file.rows():
            if entry.get("kind") == "engine":
                engines.append(entry)
            elif entry.get("kind") == "step":
                engine_id = str(entry.get("engine_id"))
                rows.setdefault(engine_id, []).append(logged_step(entry, where))
                interruptions.setdefault(engine_id, Interruptions()).add(entry)
    if not rows:
        raise RecordingError(f"{path}: holds no steps")
    kinds = {json.dumps({key: engine.get(key) for key in KIND}, sort_keys=True) for engine in engines}
    if len(kinds) > 1:
        raise RecordingError(
            f"{path}: holds engines that differ in {', '.join(KIND)}; split the log by engine_id first"
        )
    in_order = [row for engine_rows in rows.values() for row in engine_rows]
    name = Path(str(path)).name
    found = [each for of_engine in interruptions.values() for each in of_engine.found]
    return filtered(name, _digest(files), True, in_order, engines[0] if engines else None, found)


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


def _digest(files: Sequence[LogFile]) -> str:
    """Identifies the log's contents: the files' bytes in their order."""
    digest = hashlib.sha256()
    for each in files:
        with each.open() as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


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
            after_prefill="after_prefill" in entry["flags"],
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise RecordingError(f"{where}: {what}") from error
