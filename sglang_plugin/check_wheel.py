"""Judges a wheel of SGLang by ``compatibility.toml``: whether all that the plugin needs is there.

As a program, where nothing but Specgov's plugin is installed: ``python -m
specgov.sglang_plugin.check_wheel FILE``.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from specgov.sglang_plugin import report, v059, versions
from specgov.sglang_plugin.compatibility import (
    Compatibility,
    KnownClass,
    KnownFunction,
    compatibility,
    satisfies,
)
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.report import Check
from specgov.sglang_plugin.wheel import Wheel, signature

_REMEDY = "keep the plugin off with this release, or use one that it knows"


def check_wheel(path: Path) -> list[Check]:
    """One check for the release, and one for each function and class that the plugin needs of it.

    Raises:
        PluginError: the file is not a wheel of SGLang.

    """
    known = compatibility()
    with Wheel(path) as wheel:
        if wheel.package.lower() != "sglang":
            raise PluginError(f"{path}: a wheel of {wheel.package}, not of SGLang")
        version = versions.parse_version(wheel.version)
        checks = [_release(wheel.version, version, known)]
        if version < versions.OLDEST:
            return checks
        checks += [_function(wheel, each, version) for each in known.functions if each.is_in(version)]
        checks += [_class(wheel, each) for each in known.classes if each.is_in(version)]
    return checks


def _release(text: str, version: versions.Version, known: Compatibility) -> Check:
    if version == v059.RELEASE:
        return Check.skipped(
            "release", f"{text} has no plugins: specgov sglang doctor checks the hooks that launch sets there"
        )
    if version < versions.OLDEST:
        oldest = ".".join(map(str, versions.OLDEST))
        return Check.failed(
            "release", f"{text} cannot turn speculation off in a step", f"use {oldest} or newer"
        )
    if version in known.releases:
        return Check.fine("release", f"{text} is among those that were read")
    return Check.fine("release", f"{text} is not among those that were read; judged by what the plugin needs")


def _function(wheel: Wheel, known: KnownFunction, version: versions.Version) -> Check:
    name = short_name(known.name)
    found = wheel.find(known.name)
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return Check.failed(name, f"{known.name} is gone ({known.role}){_moved(wheel, known.name)}", _REMEDY)
    parameters, listed = signature(found), known.signature_in(version)
    if not satisfies(parameters, known):
        return Check.failed(
            name,
            f"({parameters}) is not what the plugin needs: ({', '.join(known.needs)}) ({known.role})",
            _REMEDY,
        )
    changed = "" if parameters == listed else f", which was ({listed}); still what the plugin needs"
    return Check.fine(name, f"({parameters}){changed}")


def _class(wheel: Wheel, known: KnownClass) -> Check:
    name = short_name(known.name)
    attributes = wheel.attributes(known.name)
    if attributes is None:
        return Check.failed(name, f"{known.name} is gone{_moved(wheel, known.name)}", _REMEDY)
    if missing := sorted(set(known.attributes) - attributes):
        return Check.failed(name, f"lacks {', '.join(missing)}", _REMEDY)
    more = (
        sorted(a for a in attributes - set(known.attributes) if not a.startswith("_")) if known.only else []
    )
    if more:
        return Check.failed(name, f"has {', '.join(more)} too, which the plugin does not implement", _REMEDY)
    return Check.fine(name, ", ".join(known.attributes) or "there")


def short_name(dotted: str) -> str:
    """A name without its modules: from the first capital on, or the last part."""
    parts = dotted.split(".")
    first = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[first:])


def _moved(wheel: Wheel, dotted: str) -> str:
    modules = wheel.elsewhere(dotted)
    return f"; moved to {', '.join(modules)}?" if modules else ""


def main(arguments: list[str]) -> int:
    """Print the checks of the wheel that is named; 0 where all pass, 1 where not, 2 for wrong usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m specgov.sglang_plugin.check_wheel FILE\n")
        return 2
    try:
        checks = check_wheel(Path(arguments[0]))
    except PluginError as error:
        sys.stderr.write(f"specgov: {error}\n")
        return 1
    return report.print_checks(checks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
