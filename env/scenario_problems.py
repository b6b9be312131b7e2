"""What is wrong with a scenario file, as a user reads it: file, line, field, and what to write instead."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from specgov.env.scenario_schema import FieldError, ScenarioTable
from specgov.env.toml_lines import line_of

Location = tuple[str | int, ...]

_TABLE_EXPECTED = {"model_type", "model_attributes_type", "dict_type"}
_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)$")


def not_toml(error: tomllib.TOMLDecodeError, where: str) -> str:
    """The message for a text that is not TOML; the parser names the line at the message's end."""
    message = str(error)
    if found := _POSITION.search(message):
        return f"{where}:{found[1]}: not TOML: {message[: found.start()]} (column {found[2]})"
    return f"{where}: not TOML: {message}"


def problems(error: ValidationError, text: str, where: str, name: str) -> str:
    """A line for each mistake in the scenario ``name`` of ``text``; ``where`` names the text.

    A table that is wrong only because of what is wrong within it has none.
    """
    details = error.errors()
    places = [detail["loc"] for detail in details]
    return "\n".join(
        _problem(detail, text, where, name)
        for detail, place in zip(details, places, strict=True)
        if not any(len(other) > len(place) and other[: len(place)] == place for other in places)
    )


def _problem(detail: ErrorDetails, text: str, where: str, name: str) -> str:
    raw: Location = detail["loc"]
    location = tuple(part for at, part in enumerate(raw) if not (at == 1 and raw[0] == "arrivals"))
    if len(raw) == 1 and raw[0] == "arrivals" and detail["type"].startswith("union_tag"):
        location = ("arrivals", "kind")
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        location += cause.path
    line = line_of(text, (name, *location))
    field = ".".join(str(part) for part in (name, *location))
    return f"{where}:{line}: {field}: {_message(detail)}"


def _message(detail: ErrorDetails) -> str:
    kind, given = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return _unknown(str(detail["loc"][-1]), _fields_around(detail["loc"]))
    if kind in ("missing", "union_tag_not_found"):
        return "Field required"
    if kind == "union_tag_invalid":
        return f"there is no {detail['ctx']['tag']!r}; there are {detail['ctx']['expected_tags']}"
    if kind in _TABLE_EXPECTED:
        return f"must be a table, not {given!r}"
    if kind == "tuple_type":
        return (
            "must be a list: [[...]] begins a table of one"
            if isinstance(given, dict)
            else f"must be a list, not {given!r}"
        )
    message = str(detail["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.removesuffix(", unable to parse string as a number")
    return message if kind == "value_error" else f"{message}, not {given!r}"


def _unknown(field: str, known: Sequence[str]) -> str:
    meant = difflib.get_close_matches(field, known, n=1)
    return (
        f"unknown field: did you mean {meant[0]}?"
        if meant
        else f"unknown field; there are {', '.join(known)}"
    )


def _fields_around(location: Location) -> list[str]:
    """The names that the table has in which ``location`` stands, which is pydantic's, with union tags."""
    tables: list[type[BaseModel]] = [ScenarioTable]
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        if len(tables) > 1:
            tables = [table for table in tables if part in get_args(table.model_fields["kind"].annotation)]
        else:
            tables = _tables_in(tables[0].model_fields[part].annotation)
    return list(tables[0].model_fields)


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables_in(argument)]
