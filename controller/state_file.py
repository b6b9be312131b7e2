"""One engine's saved state as a file: a line that says what it is, then a safetensors file.

    specgov.state VERSION SHA256-OF-THE-REST
    <safetensors: the arrays, and a JSON document under the metadata key "document">

In the document an array is ``{"array": NAME}``. Without its first line it is a file that any safetensors
reader opens. Nothing in it is ever executed. A file is replaced as a whole or not at all: it is written
beside its place, brought to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

SCHEMA = "specgov.state"
SCHEMA_VERSION = 1
LARGEST_BYTES = 256 * 2**20
"""More than any engine's state has: 65,536 requests at 8 draft positions take 25 MB."""

_LARGEST_FIRST_LINE = 128


class StateFileError(ValueError):
    """A file is no state that this release can read; the message says what is wrong with it."""


def to_bytes(document: Mapping[str, Any]) -> bytes:
    """The file's content; ``document`` holds None, numbers, texts, arrays, lists and dicts.

    Raises:
        ValueError: a number in it is not finite, or it holds something else.

    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    text = json.dumps(_without_arrays(document, arrays), separators=(",", ":"), allow_nan=False)
    rest = save(arrays, {"document": text})
    return f"{SCHEMA} {SCHEMA_VERSION} {hashlib.sha256(rest).hexdigest()}\n".encode() + rest


def from_bytes(content: bytes) -> dict[str, Any]:
    """The document that ``to_bytes`` was given, tuples as lists.

    Raises:
        StateFileError: it is damaged, of another kind, or written by a newer release.

    """
    first, _, rest = content[:_LARGEST_FIRST_LINE].partition(b"\n")
    words = first.decode("ascii", errors="replace").split(" ")
    if len(words) != 3 or words[0] != SCHEMA or not words[1].isdecimal():
        raise StateFileError(f"it does not begin with {SCHEMA!r}")
    if int(words[1]) != SCHEMA_VERSION:
        raise StateFileError(f"it is of version {words[1]}, and this release reads version {SCHEMA_VERSION}")
    rest = content[len(first) + 1 :]
    if hashlib.sha256(rest).hexdigest() != words[2]:
        raise StateFileError("its checksum does not fit: it was cut short or changed")
    try:
        arrays = load(rest)
        length = int.from_bytes(rest[:8], "little")
        document = json.loads(json.loads(rest[8 : 8 + length])["__metadata__"]["document"])
        filled = _with_arrays(document, arrays)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateFileError(f"its content is none of ours: {type(error).__name__}: {error}") from error
    if not isinstance(filled, dict):
        raise StateFileError("its document is no object")
    return filled


def read(path: Path) -> dict[str, Any]:
    """The document in a file.

    Raises:
        StateFileError: it is none that can be used.
        OSError: it cannot be read.

    """
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise StateFileError(f"it has {size} bytes, and no state has more than {LARGEST_BYTES}")
    return from_bytes(path.read_bytes())


def write(path: Path, content: bytes) -> None:
    """Put a file in its place at once; after an error the older one still stands there.

    Raises:
        OSError: the disk does not take it.

    """
    beside = path.with_name(f"{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk.

    Raises:
        OSError: the disk does not take them.

    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without_arrays(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """``value`` with its arrays moved to ``arrays``."""
    if isinstance(value, np.ndarray):
        name = f"a{len(arrays)}"
        arrays[name] = np.ascontiguousarray(value)
        return {"array": name}
    if isinstance(value, Mapping):
        return {name: _without_arrays(inner, arrays) for name, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list | np.ndarray):
        return [_without_arrays(inner, arrays) for inner in value]
    return value


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"array"}:
            return arrays[value["array"]]
        return {name: _with_arrays(inner, arrays) for name, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_with_arrays(inner, arrays) for inner in value]
    return value
