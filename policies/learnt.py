"""What a rule has learnt, as plain data: taken from one rule, put into a new one of the same kind.

A class whose objects learn derives from ``Learnt`` and annotates in its body every attribute that steps
change and that is not made again from the others: those annotations are what is taken, and what is checked
when it is put back. So a rule that was restored decides as the one that it was taken from would have, draws
of its generator included.

``capture`` takes numbers, texts, arrays, generators, sequences, dataclasses and ``Learnt`` objects; what it
returns shares nothing with the rule and holds only None, booleans, numbers, texts, arrays, lists and dicts.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args, get_origin

import numpy as np

GROWS = "grows"
"""Marks, as in ``Annotated[Floats, GROWS]``, an array whose shape depends on what was seen."""

_SCALARS = (bool, int, float, str)


class Learnt:
    """Base of what learns: the annotations in a subclass's body name what is learnt."""


class LearntError(ValueError):
    """What is to be put into a rule does not fit it; the message says where."""


def capture(value: Any) -> Any:
    """``value`` as plain data; quick, since whoever learns waits for it.

    Raises:
        TypeError: it holds something that cannot be captured.

    """
    if value is None or isinstance(value, _SCALARS):
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple | deque):
        if all(isinstance(item, _SCALARS) for item in _flat(value)):
            return list(value)
        return [capture(item) for item in value]
    if isinstance(value, Learnt) or dataclasses.is_dataclass(value):
        kind: Any = type(value)
        return {name: capture(getattr(value, name)) for name in _hints(kind)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8).copy()
    if isinstance(value, np.random.Generator):
        return dict(value.bit_generator.state)
    raise TypeError(f"{type(value).__name__} cannot be captured")


def restore(learnt: Learnt, captured: Any) -> None:
    """Put what ``capture`` took into a newly made object; after an error it is of no use any more.

    Raises:
        LearntError: it is from an object of another kind or shape, or it is damaged.

    """
    _into(learnt, captured, type(learnt).__name__)


def _flat(sequence: list[Any] | tuple[Any, ...] | deque[Any]) -> typing.Iterable[Any]:
    """The first element, or what is in it: sequences hold elements of one kind."""
    first = next(iter(sequence), ())
    return first if isinstance(first, tuple) else (first,) if not isinstance(first, list) else ([],)


def _into(learnt: Learnt, captured: Any, where: str) -> None:
    kind: Any = type(learnt)
    hints = _hints(kind)
    _require(isinstance(captured, Mapping) and set(captured) == set(hints), where, "other attributes")
    for name, hint in hints.items():
        before = getattr(learnt, name, None)
        setattr(learnt, name, _value(hint, captured[name], before, f"{where}.{name}"))


def _value(hint: Any, captured: Any, before: Any, where: str) -> Any:
    """The value of type ``hint`` that was captured; ``before`` is what stands in its place."""
    grows = get_origin(hint) is Annotated and GROWS in get_args(hint)
    kind = get_args(hint)[0] if grows else hint
    if isinstance(kind, types.UnionType) or get_origin(kind) is typing.Union:
        if captured is None:
            return None
        kind = next(part for part in get_args(kind) if part is not type(None))
    origin: Any = get_origin(kind) or kind
    if origin is np.ndarray:
        return _array(kind, captured, None if grows else before, where)
    if origin in (list, tuple, deque):
        return _sequence(origin, get_args(kind), captured, before, where)
    if issubclass(origin, Learnt):
        _require(isinstance(before, origin), where, "nothing to put it into")
        _into(before, captured, where)
        return before
    if hasattr(origin, "__dataclass_fields__"):
        hints = _hints(origin)
        _require(isinstance(captured, Mapping) and set(captured) == set(hints), where, "other fields")
        return origin(**{n: _value(h, captured[n], None, f"{where}.{n}") for n, h in hints.items()})
    if origin is np.random.Generator:
        return _generator(captured, before, where)
    return _scalar(origin, captured, where)


def _scalar(kind: type[Any], captured: Any, where: str) -> Any:
    if kind is bytes:
        _require(isinstance(captured, np.ndarray) and captured.dtype == np.uint8, where, "no bytes")
        return captured.tobytes()
    expected = {float: (float, int), bool: (bool,)}.get(
        kind, (int,) if issubclass(kind, enum.Enum) else (kind,)
    )
    fits = isinstance(captured, expected) and (kind is bool or not isinstance(captured, bool))
    _require(fits, where, f"no {kind.__name__}")
    try:
        return kind(captured)
    except ValueError as error:
        raise LearntError(f"{where}: {error}") from error


def _array(kind: Any, captured: Any, before: Any, where: str) -> Any:
    dtype = get_args(get_args(kind)[1])[0]
    _require(isinstance(captured, np.ndarray) and captured.dtype == dtype, where, f"no {dtype.__name__}s")
    if isinstance(before, np.ndarray):
        _require(captured.shape == before.shape, where, f"shape {captured.shape}, not {before.shape}")
    return captured.copy()


def _sequence(origin: type[Any], kinds: tuple[Any, ...], captured: Any, before: Any, where: str) -> Any:
    _require(isinstance(captured, list | tuple), where, "no sequence")
    if origin is tuple and Ellipsis not in kinds:
        _require(len(captured) == len(kinds), where, f"{len(captured)} elements")
        return tuple(_value(k, c, None, where) for k, c in zip(kinds, captured, strict=True))
    standing = list(before or ())
    if standing and isinstance(standing[0], Learnt | deque):
        _require(len(captured) == len(standing), where, f"{len(captured)} elements, not {len(standing)}")
    else:
        standing = [None] * len(captured)
    values = (_value(kinds[0], c, b, where) for c, b in zip(captured, standing, strict=True))
    return deque(values, before.maxlen if before is not None else None) if origin is deque else origin(values)


def _generator(captured: Any, before: Any, where: str) -> Any:
    try:
        before.bit_generator.state = captured
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise LearntError(f"{where}: not the state of this generator: {error}") from error
    return before


def _require(holds: bool, where: str, problem: str) -> None:
    if not holds:
        raise LearntError(f"{where}: {problem}")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The annotated attributes of a class and its bases, those of classes themselves left out."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}
