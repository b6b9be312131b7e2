"""The doctor's checks on SGLang 0.5.9: the hooks, the arguments, and which worker is live."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping, Sequence

from specgov.sglang_plugin import engine_probe
from specgov.sglang_plugin.check_wheel import short_name
from specgov.sglang_plugin.checks import why_idle
from specgov.sglang_plugin.engine_probe import Arguments
from specgov.sglang_plugin.report import Check
from specgov.sglang_plugin.settings import Settings
from specgov.sglang_plugin.v059 import checks
from specgov.sglang_plugin.v059.governor import STEPS_WITHOUT_DRAFTS


def diagnose(arguments: Sequence[str], settings: Settings, environment: Mapping[str, str]) -> list[Check]:
    """Every check of this release's own, in the order in which things happen at a server's start."""
    found = [
        Check.fine("SGLang", f"0.5.9, which must be started with specgov sglang launch. {checks.NOT_RUN}")
    ]
    with engine_probe.quiet():
        found += [_hook(target, needs) for target, needs in checks.TARGETS.items()]
        read = engine_probe.read_arguments(arguments)
        if read.facts is None:
            return [
                *found,
                Check.failed("arguments", read.refusal, "see python -m sglang.launch_server --help"),
            ]
        if read.refusal:
            refused = f"SGLang refuses them: {read.refusal}"
            return [*found, Check.failed("arguments", refused, "change that argument")]
        found.append(Check.fine("arguments", "SGLang accepts them"))
        if (idle := why_idle(read.facts)) is not None:
            if read.facts.algorithm is None:
                remedy = "add --speculative-algorithm and a draft model"
                return [*found, Check.failed("governed", idle, remedy)]
            return [*found, Check.skipped("governed", f"nothing to do: {idle}")]
        found.append(worker(read))
    problems = checks.start_problems(settings, read.facts, environment)
    found += [Check.failed("governed", problem.what, problem.remedy) for problem in problems]
    if not problems:
        tiers = ", ".join(map(str, checks.tiers_of(read.facts)))
        found.append(Check.fine("governed", f"tiers {tiers}, starting with {read.facts.num_steps}"))
    return found


def worker(read: Arguments) -> Check:
    """Which class makes the decode steps, by what, and whether hooks go there."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    try:
        kind = SpeculativeAlgorithm.from_string(read.record.speculative_algorithm).create_worker(read.record)
    except Exception as error:  # noqa: BLE001 whatever SGLang raises is what there is to say
        said = f"SGLang cannot say: {engine_probe.in_short(error)}"
        return Check.failed("worker", said, "run the doctor on the server's machine")
    live = f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', kind)}"
    words = checks.worker_words(live, os.environ)  # there SGLang reads it, and for some models sets it
    if live in STEPS_WITHOUT_DRAFTS:
        return Check.fine("worker", f"{words}; the hooks go on it and on no other")
    known = " or ".join(name.rpartition(".")[2] for name in STEPS_WITHOUT_DRAFTS)
    return Check.failed(
        "worker", f"{words}; it cannot change its steps", f"use arguments that lead to {known}"
    )


def _hook(target: str, needs: tuple[str, ...]) -> Check:
    name = short_name(target)
    try:
        has = engine_probe.parameters(pkgutil.resolve_name(target))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        return Check.failed("hook", f"{target} is not there: {engine_probe.in_short(error)}", _REMEDY)
    names = tuple(part.partition("=")[0].strip() for part in has.split(","))
    if names[: len(needs)] != needs:
        return Check.failed(
            "hook", f"{name}({has}) is not what the hooks need: ({', '.join(needs)})", _REMEDY
        )
    return Check.fine("hook", f"{name}({has})")


_REMEDY = "this is not SGLang 0.5.9 as released: install that, or unset SPECGOV_TARGET"
