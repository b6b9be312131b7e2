"""What must hold before a server starts: found here, where SGLang would only warn or crash later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgov.policies.types import PolicyError
from specgov.sglang_plugin.fallback import fallback_rule
from specgov.sglang_plugin.settings import Settings
from specgov.sglang_plugin.versions import INITIAL_MUST_BE_LARGEST, OLDEST, ServerFacts, Version


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def why_idle(facts: ServerFacts) -> str | None:
    """Why the plugin has nothing to do on this server, though nothing is wrong; None where it has."""
    if facts.disaggregation == "prefill":
        return "a prefill worker makes no decode steps"
    if facts.algorithm is None:
        return "the server does not speculate (no --speculative-algorithm)"
    return None


def start_problems(
    settings: Settings,
    facts: ServerFacts,
    version: Version,
    engine_tiers: Sequence[int],
    unsupported_reason: str | None = None,
) -> list[Problem]:
    """All that keeps the plugin from working on this server; empty where it will.

    Args:
        settings: the plugin's.
        facts: the server's resolved arguments.
        version: SGLang's.
        engine_tiers: the union of the tiers in the server's adaptive config.
        unsupported_reason: SGLang's own words for why the arguments cannot be adaptive.

    """
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return [Problem("this SGLang cannot turn speculation off in a step", f"use SGLang {oldest} or newer")]
    problems = _unsupported(facts)
    if not facts.adaptive and not problems:
        problems = [
            Problem(f"adaptive speculation is not live ({unsupported_reason})", "change that argument")
            if unsupported_reason
            else Problem("adaptive speculation is not on", "add --speculative-adaptive")
        ]
    return problems + _tier_problems(settings, facts, version, engine_tiers)


def _unsupported(facts: ServerFacts) -> list[Problem]:
    found = _conflicts(facts)
    # Where adaptive is off for another reason SGLang may have chosen topk itself.
    if facts.topk not in (None, 1) and (facts.adaptive or not found):
        remedy = "adaptive tiers need 1: give --speculative-adaptive and --speculative-eagle-topk 1"
        found.append(Problem(f"--speculative-eagle-topk is {facts.topk}", remedy))
    return found


def _conflicts(facts: ServerFacts) -> list[Problem]:
    found = (
        (
            facts.algorithm not in ("EAGLE", "EAGLE3"),
            Problem(
                f"--speculative-algorithm {facts.algorithm} cannot change its steps",
                "use EAGLE or EAGLE3",
            ),
        ),
        (
            facts.dp_attention,
            Problem(
                "--enable-dp-attention switches adaptive tiers off",
                "run replicas with --dp-size and without DP attention",
            ),
        ),
        (
            facts.multi_layer_eagle,
            Problem("--enable-multi-layer-eagle switches adaptive tiers off", "leave it out"),
        ),
        (
            facts.two_batch_overlap,
            Problem("--enable-two-batch-overlap switches adaptive tiers off", "leave it out"),
        ),
        (facts.pdmux, Problem("--enable-pdmux switches adaptive tiers off", "leave it out")),
        (
            facts.pp_size > 1,
            Problem(f"--pp-size is {facts.pp_size}", "pipeline stages could not agree on a tier: use 1"),
        ),
        (
            facts.lora,
            Problem(
                "LoRA does not go together with adaptive tiers", "leave --enable-lora and --lora-paths out"
            ),
        ),
    )
    return [problem for holds, problem in found if holds]


def _tier_problems(
    settings: Settings, facts: ServerFacts, version: Version, engine_tiers: Sequence[int]
) -> list[Problem]:
    problems = []
    largest = max(engine_tiers)
    first, last = INITIAL_MUST_BE_LARGEST
    if first <= version <= last and facts.num_steps != largest:
        problems.append(
            Problem(
                f"--speculative-num-steps is {facts.num_steps}, and this SGLang sizes a buffer for it",
                f"start with the largest tier, {largest}, and --speculative-num-draft-tokens {largest + 1}",
            )
        )
    tiers = settings.tiers or tuple(engine_tiers)
    if unknown := sorted(set(tiers) - set(engine_tiers)):
        problems.append(
            Problem(
                f"SPECGOV_TIERS names {_listed(unknown)}, but the server prepares {_listed(engine_tiers)}",
                "add the tier to the file of --speculative-adaptive-config, or leave it out of SPECGOV_TIERS",
            )
        )
    elif settings.mode == "active":
        try:
            fallback_rule(settings.fallback, tiers)
        except PolicyError as error:
            problems.append(Problem(f"SPECGOV_FALLBACK: {error}", "name tiers that the server prepares"))
    return problems


def _listed(tiers: Sequence[int]) -> str:
    return ", ".join(map(str, tiers))
