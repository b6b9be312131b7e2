"""What the plugin needs of SGLang, by release: ``compatibility.toml``, and how a find is judged by it.

Needs neither SGLang nor anything beside the standard library.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from specgov.sglang_plugin.versions import PAUSES, RESUMES, WEIGHT_UPDATES, Version, parse_version

REQUESTS_MODULE = "sglang.srt.managers.io_struct"
"""Where SGLang keeps the classes of its requests."""


@dataclass(frozen=True, slots=True)
class Known:
    """Something in SGLang, by its dotted name, in the releases ``since`` to ``until``, both included."""

    name: str
    since: Version | None
    until: Version | None

    def is_in(self, version: Version) -> bool:
        """Whether the release has it; one newer than all that were read is taken for the newest of them."""
        return (self.since is None or version >= self.since) and (self.until is None or version <= self.until)


@dataclass(frozen=True, slots=True)
class KnownFunction(Known):
    """A function, a method or a property; ``signatures`` by the release that introduced them, ascending.

    ``use``: the plugin wraps it, calls it, implements it in its place, or relies on it.
    """

    use: str
    role: str
    needs: tuple[str, ...]
    signatures: dict[Version, str] = field(default_factory=dict)

    def signature_in(self, version: Version) -> str:
        """The signature in a release, without annotations."""
        return [text for first, text in self.signatures.items() if first <= version][-1]


@dataclass(frozen=True, slots=True)
class KnownClass(Known):
    """A class and attributes that its objects have; ``only``: they must have no other public ones."""

    attributes: tuple[str, ...] = ()
    only: bool = False


@dataclass(frozen=True, slots=True)
class Compatibility:
    """All of ``compatibility.toml``."""

    releases: tuple[Version, ...]
    functions: tuple[KnownFunction, ...]
    classes: tuple[KnownClass, ...]


@cache
def compatibility() -> Compatibility:
    """What is known; the requests that ``versions`` names are among the classes, listed there or not."""
    text = resources.files("specgov.sglang_plugin").joinpath("compatibility.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    classes = tuple(_class(entry) for entry in document["class"])
    requests = {f"{REQUESTS_MODULE}.{name}" for name in PAUSES | RESUMES | WEIGHT_UPDATES}
    in_every_release = sorted(requests - {known.name for known in classes})
    return Compatibility(
        releases=tuple(parse_version(release) for release in document["releases"]),
        functions=tuple(_function(entry) for entry in document["function"]),
        classes=(*classes, *(KnownClass(name, None, None) for name in in_every_release)),
    )


def satisfies(parameters: str, function: KnownFunction) -> bool:
    """Whether a signature without annotations has what the plugin's use of the function needs."""
    named, open_ended, needs = _parse(parameters), "*" in _stars(parameters), function.needs
    names = tuple(name for name, _ in named)
    if open_ended and len(names) <= len(needs):
        return names == needs[: len(names)]
    if names[: len(needs)] != needs:
        return False
    rest = named[len(needs) :]
    if function.use == "implement":
        return not rest and not _stars(parameters)
    return function.use != "call" or all(is_optional for _, is_optional in rest)


def _parse(parameters: str) -> list[tuple[str, bool]]:
    """Names of the parameters, without stars, and whether each has a default."""
    return [(p.partition("=")[0], "=" in p) for p in _split(parameters) if not p.startswith("*") and p != "/"]


def _stars(parameters: str) -> set[str]:
    """``*`` where any further positional arguments are taken, ``**`` where any named ones are."""
    return {"**" if p.startswith("**") else "*" for p in _split(parameters) if p.startswith("*") and p != "*"}


def _split(parameters: str) -> list[str]:
    """The parameters of a signature; commas inside brackets belong to a default."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(parameters):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(parameters[start:index].strip())
            start = index + 1
    last = parameters[start:].strip()
    return [*parts, last] if last else parts


def _function(entry: dict[str, Any]) -> KnownFunction:
    return KnownFunction(
        **_bounds(entry),
        use=entry["use"],
        role=entry["role"],
        needs=tuple(_split(entry["needs"])),
        signatures={parse_version(first): text for first, text in entry["signatures"].items()},
    )


def _class(entry: dict[str, Any]) -> KnownClass:
    return KnownClass(**_bounds(entry), attributes=tuple(entry["attributes"]), only=entry.get("only", False))


def _bounds(entry: dict[str, Any]) -> dict[str, Any]:
    since, until = (entry.get(key) for key in ("since", "until"))
    return {
        "name": entry["name"],
        "since": None if since is None else parse_version(since),
        "until": None if until is None else parse_version(until),
    }
