"""Looks at the SGLang of this environment, and at a server's arguments, without starting the server.

SGLang is imported inside the functions only. What it prints meanwhile is kept from the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import inspect
import io
import os
import pkgutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgov.sglang_plugin import versions
from specgov.sglang_plugin.check_wheel import short_name
from specgov.sglang_plugin.compatibility import KnownFunction, compatibility, satisfies
from specgov.sglang_plugin.report import Check
from specgov.sglang_plugin.settings import CONFIG_VARIABLE, TARGET_VARIABLE
from specgov.sglang_plugin.versions import ServerFacts, Version

PLUGIN_GROUP = "sglang.srt.plugins"
ADAPTIVE_WORKER = "EAGLEWorkerV2"
"""The one worker class that can change its tier."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A server's arguments: SGLang's record of them, what they come to, and SGLang's refusal if there is one.

    ``facts`` are None where the arguments could not even be read; ``resolved`` says whether SGLang got to the
    end of working out what was left open.
    """

    record: Any
    facts: ServerFacts | None
    resolved: bool
    refusal: str


def registration(environment: Mapping[str, str]) -> Check:
    """Whether SGLang will load the plugin."""
    name = "plugin"
    points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    if not any(point.value == "specgov.sglang_plugin.plugin:load" for point in points):
        return Check.failed(
            name, "not among the installed plugins of SGLang", "pip install specgov into SGLang's environment"
        )
    allowed = environment.get("SGLANG_PLUGINS", "").strip()
    if allowed and "specgov" not in (each.strip() for each in allowed.split(",")):
        return Check.failed(name, f"SGLANG_PLUGINS={allowed} leaves it out", "add specgov to SGLANG_PLUGINS")
    return Check.fine(name, "installed, and SGLang loads it")


def hooks(version: Version) -> list[Check]:
    """One check for each function that is wrapped or implemented: imported, and its signature compared."""
    used = (each for each in compatibility().functions if each.use in ("wrap", "implement"))
    return [_hook(each) for each in used if each.is_in(version)]


def load_other_plugins() -> None:
    """What SGLang's launcher does first, without us: plugins may change what arguments come to."""
    from sglang.srt.plugins import load_plugins

    switches = (TARGET_VARIABLE, CONFIG_VARIABLE)
    ours = {name: os.environ.pop(name) for name in switches if name in os.environ}
    try:
        load_plugins()
    finally:
        os.environ.update(ours)


def read_arguments(arguments: Sequence[str]) -> Arguments:
    """Read and resolve a server's arguments as its launcher would; this reads the models' configurations."""
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    record: Any = None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            record = prepare_server_args(list(arguments))
            if hasattr(record, "resolve_once"):
                record.resolve_once()
    except SystemExit:
        last = (said.getvalue().strip().splitlines() or ["SGLang's command line shows its help"])[-1]
        return Arguments(None, None, False, last)
    except Exception as error:  # noqa: BLE001 whatever SGLang raises is what there is to say
        if record is None:  # up to 0.5.18 reading is resolving
            parser = argparse.ArgumentParser()
            ServerArgs.add_cli_args(parser)
            record = parser.parse_args(list(arguments))
        return Arguments(record, versions.facts_of(record), False, in_short(error))
    return Arguments(record, versions.server_facts(record), True, _own_check(record))


def worker(arguments: Arguments) -> Check:
    """Which class makes the decode steps under these arguments, and by which of them."""
    facts = arguments.facts
    if facts is None or facts.algorithm is None:
        return Check.skipped("worker", "the server does not speculate")
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        kind = SpeculativeAlgorithm.from_string(facts.algorithm).create_worker(arguments.record)
    except Exception as error:  # noqa: BLE001 whatever SGLang raises is what there is to say
        return Check.failed(
            "worker", f"SGLang cannot say: {in_short(error)}", "run the doctor on the server's machine"
        )
    name = getattr(kind, "__name__", str(kind))
    why = f"--speculative-algorithm {facts.algorithm}"
    why += " with --enable-multi-layer-eagle" if facts.multi_layer_eagle else ""
    where = f"{name} ({getattr(kind, '__module__', '?')}), by {why}"
    if name == ADAPTIVE_WORKER:
        return Check.fine("worker", f"{where}; the same with the overlap scheduler and without")
    return Check.failed(
        "worker", f"{where}, cannot change its tier", f"use arguments that lead to {ADAPTIVE_WORKER}"
    )


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keep what is printed meanwhile; SGLang says much on its way."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said


def in_short(error: BaseException) -> str:
    """An exception's words on one line of at most 300 characters; without any, the line that raised it."""
    text = " ".join(str(error).split()) or _where(error)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _where(error: BaseException) -> str:
    name = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return name
    last = frames[-1]
    return f"{name} in {Path(last.filename).name}, line {last.lineno}: {last.line}".removesuffix(": ")


def _own_check(record: Any) -> str:
    """SGLang's last check of its arguments before it starts; "" where it has nothing against them."""
    try:
        record.check_server_args()
    except Exception as error:  # noqa: BLE001 whatever SGLang raises is what there is to say
        return in_short(error)
    return ""


def _hook(known: KnownFunction) -> Check:
    name, target_name = "hook" if known.use == "wrap" else "policy", short_name(known.name)
    try:
        target = pkgutil.resolve_name(known.name)
        has = parameters(target)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        return Check.failed(
            name, f"{known.name} is not there: {in_short(error)} ({known.role})", _HOOK_REMEDY
        )
    if not satisfies(has, known):
        needs = ", ".join(known.needs)
        return Check.failed(
            name, f"{target_name}({has}) is not what the plugin needs: ({needs})", _HOOK_REMEDY
        )
    return Check.fine(name, f"{target_name}({has})")


def parameters(target: Any) -> str:
    """A function's parameters as ``compatibility.toml`` writes them; of a property, its getter's."""
    if isinstance(target, functools.cached_property):
        target = target.func
    elif isinstance(target, property):
        target = target.fget
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(target).parameters.values()]
    return str(inspect.Signature(bare))[1:-1]


_HOOK_REMEDY = "use a release that this Specgov knows, or a newer Specgov; until then unset SPECGOV_TARGET"
