"""What must hold for a server of SGLang 0.5.9 to be governed, and which of its workers is live."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping

from specgov.policies.types import PolicyError
from specgov.sglang_plugin.checks import Problem, why_idle
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.fallback import fallback_rule
from specgov.sglang_plugin.settings import Settings
from specgov.sglang_plugin.versions import ServerFacts

WORKER_V1 = "sglang.srt.speculative.eagle_worker.EAGLEWorker"
WORKER_V2 = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
OVERLAP_VARIABLE = "SGLANG_ENABLE_SPEC_V2"
"""What alone decides between the two: SGLang sets --disable-overlap-schedule by it (server_args.py:2370)."""
NOT_RUN = (
    "SGLang 0.5.9 under Specgov was run on a CPU only. On a GPU a step at num_steps 0 has no CUDA graph for "
    "the target: it costs no memory, and time where launching kernels takes longer than running them"
)
"""What an operator must know before the start."""

TARGETS: dict[str, tuple[str, ...]] = {
    "sglang.srt.server_args.ServerArgs.check_server_args": ("self",),
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker": ("self", "server_args"),
    f"{WORKER_V1}.forward_batch_generation": ("self", "batch"),
    f"{WORKER_V1}.draft": ("self", "batch"),
    f"{WORKER_V2}.forward_batch_generation": ("self", "model_worker_batch"),
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft": ("self", "model_worker_batch"),
    "sglang.srt.speculative.eagle_info.EagleVerifyInput.prepare_for_v2_verify": (
        "self",
        "req_to_token_pool",
        "batch",
        "target_worker",
    ),
    "sglang.srt.managers.scheduler.broadcast_pyobj": ("data", "rank", "dist_group", "src"),
    "sglang.srt.managers.scheduler.Scheduler.recv_requests": ("self",),
    "sglang.srt.managers.scheduler.Scheduler.process_batch_result": ("self", "batch", "result"),
    "sglang.srt.managers.scheduler.Scheduler.event_loop_normal": ("self",),
    "sglang.srt.managers.scheduler.Scheduler.event_loop_overlap": ("self",),
    "sglang.srt.managers.scheduler.Scheduler.event_loop_normal_disagg_decode": ("self",),
    "sglang.srt.managers.scheduler.Scheduler.event_loop_overlap_disagg_decode": ("self",),
}
"""Every function that is wrapped or stood in for, and the parameters that it must have in front."""


def missing_targets() -> list[str]:
    """Those that the installed SGLang lacks; imports the modules that hold them."""
    missing = []
    for target in TARGETS:
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError, ValueError):
            missing.append(target)
    return missing


def check_start(settings: Settings, facts: ServerFacts, environment: Mapping[str, str]) -> None:
    """Check a server's arguments before its model is loaded.

    Raises:
        PluginError: it could not be governed; the message lists what to change.

    """
    if why_idle(facts) is not None:
        return
    if problems := start_problems(settings, facts, environment):
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise PluginError(
            f"Specgov cannot govern this server (or unset SPECGOV_TARGET to start without it):\n{listed}"
        )


def start_problems(settings: Settings, facts: ServerFacts, environment: Mapping[str, str]) -> list[Problem]:
    """All that keeps a server with these resolved arguments from being governed; empty where it can be."""
    found = (
        (
            facts.algorithm not in ("EAGLE", "EAGLE3"),
            Problem(
                f"--speculative-algorithm {facts.algorithm} cannot change its steps", "use EAGLE or EAGLE3"
            ),
        ),
        (
            facts.topk not in (None, 1),
            Problem(
                f"--speculative-eagle-topk is {facts.topk}",
                "drafts must be a chain: give --speculative-eagle-topk 1 with --speculative-num-steps K and "
                "--speculative-num-draft-tokens K+1 (SGLang chooses a tree where it is given none)",
            ),
        ),
        (
            facts.dp_attention,
            Problem("--enable-dp-attention", "run replicas with --dp-size and without DP attention"),
        ),
        (
            facts.multi_layer_eagle,
            Problem("--enable-multi-layer-eagle has a worker of its own", "leave it out"),
        ),
        (facts.two_batch_overlap, Problem("--enable-two-batch-overlap splits steps", "leave it out")),
        (facts.pdmux, Problem("--enable-pdmux has a loop of its own", "leave it out")),
        (
            facts.pp_size > 1,
            Problem(f"--pp-size is {facts.pp_size}", "pipeline stages could not agree on a tier: use 1"),
        ),
        (
            environment.get("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "").strip().lower() in _TRUE,
            Problem(
                "SGLANG_ENABLE_OVERLAP_PLAN_STREAM plans a step before its tier is known", "leave it unset"
            ),
        ),
    )
    return [problem for holds, problem in found if holds] or _tier_problems(settings, facts)


def tiers_of(facts: ServerFacts) -> tuple[int, ...]:
    """The tiers of a server: no drafts, and the number of draft steps that it was started with."""
    return (0, facts.num_steps or 0)


def worker_words(worker: str, environment: Mapping[str, str]) -> str:
    """A worker's name, and what in the environment makes it the live one."""
    value = environment.get(OVERLAP_VARIABLE, "").strip()
    setting = f"{OVERLAP_VARIABLE}={value}" if value else f"{OVERLAP_VARIABLE} is not set"
    overlap = "on" if worker == WORKER_V2 else "off"
    return f"{worker.rpartition('.')[2]}: the overlap loop is {overlap}, since {setting}"


def _tier_problems(settings: Settings, facts: ServerFacts) -> list[Problem]:
    has = tiers_of(facts)
    tiers = settings.tiers or has
    listed = ", ".join(map(str, has))
    if unknown := sorted(set(tiers) - set(has)):
        wanted = ", ".join(map(str, unknown))
        return [
            Problem(
                f"SPECGOV_TIERS names {wanted}, but on SGLang 0.5.9 this server has {listed}",
                "leave SPECGOV_TIERS unset, or start with another --speculative-num-steps",
            )
        ]
    if settings.mode == "active":
        try:
            fallback_rule(settings.fallback, tiers)
        except PolicyError as error:
            return [Problem(f"SPECGOV_FALLBACK: {error}", f"name tiers that this server has: {listed}")]
    return []


_TRUE = ("1", "true", "yes", "y", "t")
