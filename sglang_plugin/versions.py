"""What differs between SGLang releases, and where the plugin takes hold of them: the one place that knows.

SGLang is imported inside the functions only, so that the rest can be used where it is not installed.
Sources: the wheels of SGLang 0.5.14 to 0.5.23.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
import re
import sys
from dataclasses import dataclass
from typing import Any

from specgov.sglang_plugin.errors import PluginError

Version = tuple[int, int, int]

OLDEST: Version = (0, 5, 14)
"""The first with tier 0 (no speculation) among the adaptive tiers."""
NEWEST: Version = (0, 5, 23)
"""The newest that was tried."""
INITIAL_MUST_BE_LARGEST: tuple[Version, Version] = ((0, 5, 16), (0, 5, 18))
"""These releases size a buffer for the initial tier."""

POLICY_CLASS = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
RESULTS = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
BROADCAST = (
    "sglang.srt.managers.scheduler_components.request_receiver."
    "SchedulerRequestReceiver._broadcast_reqs_across_ranks"
)
EVENT_LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
START_CHECK = "sglang.srt.server_args.ServerArgs.check_server_args"
TARGETS = (POLICY_CLASS, RESULTS, BROADCAST, EVENT_LOOP, START_CHECK)
"""Every place that the plugin hooks."""

SWITCH_LOGGER = "sglang.srt.speculative.eagle_worker_v2"

PAUSES = frozenset({"PauseGenerationReqInput", "ReleaseMemoryOccupationReqInput"})
RESUMES = frozenset({"ContinueGenerationReqInput", "ResumeMemoryOccupationReqInput"})
WEIGHT_UPDATES = frozenset(
    {
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "UpdateWeightsFromTensorReqInput",
        "UpdateWeightsFromIPCReqInput",
        "EndWeightUpdateReqInput",
    }
)
"""Class names of the requests that pause, resume and change the engine; they come with the broadcast."""

HEALTH_CHECK_ID = "HEALTH_CHECK"
"""How ids of health checks begin (``HEALTH_CHECK_RID_PREFIX`` in sglang/srt/constants.py)."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server's arguments come to, once SGLang has resolved them."""

    algorithm: str | None
    adaptive: bool
    adaptive_config: str | None
    num_steps: int | None
    topk: int | None
    dp_attention: bool
    multi_layer_eagle: bool
    two_batch_overlap: bool
    pdmux: bool
    lora: bool
    tp_size: int
    pp_size: int
    dp_size: int
    disaggregation: str
    model: str
    draft: str
    port: int
    skips_warm_up: bool


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a scheduler process stands; ``dp_rank`` is None where there is one replica only."""

    tp_rank: int
    tp_size: int
    dp_rank: int | None


def installed_version() -> str:
    """SGLang's version as its package says.

    Raises:
        PluginError: SGLang is not installed.

    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise PluginError("SGLang is not installed in this environment") from error


def parse_version(text: str) -> Version:
    """The first three numbers of a version; suffixes such as .post1 and rc1 are left out.

    Raises:
        PluginError: ``text`` does not begin with three numbers.

    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise PluginError(f"SGLang's version {text!r} is not known to this plugin")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch)


def missing_targets() -> list[str]:
    """The hook targets that the installed SGLang lacks; imports the modules that hold them."""
    return [target for target in TARGETS if not _resolves(target)]


def server_facts(server_args: Any) -> ServerFacts:
    """Read SGLang's arguments; from 0.5.16 on resolution keeps what it decides apart from the record."""
    return facts_of(_resolved_view(server_args))


def facts_of(view: Any) -> ServerFacts:
    """Read arguments as they stand, resolved or not; what is not there has its default."""

    def read(name: str, default: Any = None) -> Any:
        return getattr(view, name, default)

    size = read(
        "attn_dp_size"
    )  # from 0.5.22 on it is what --enable-dp-attention comes to; a descriptor before
    attention_replicas = size if isinstance(size, int) else 1
    return ServerFacts(
        algorithm=read("speculative_algorithm"),
        adaptive=bool(read("speculative_adaptive", False)),
        adaptive_config=read("speculative_adaptive_config"),
        num_steps=read("speculative_num_steps"),
        topk=read("speculative_eagle_topk"),
        dp_attention=bool(read("enable_dp_attention", False)) or attention_replicas > 1,
        multi_layer_eagle=bool(read("enable_multi_layer_eagle", False)),
        two_batch_overlap=bool(read("enable_two_batch_overlap", False)),
        pdmux=bool(read("enable_pdmux", False)),
        lora=bool(read("enable_lora", False) or read("lora_paths")),
        tp_size=int(read("tp_size", 1) or 1),
        pp_size=int(read("pp_size", 1) or 1),
        dp_size=int(read("dp_size", 1) or 1),
        disaggregation=str(read("disaggregation_mode", "null") or "null"),
        model=str(read("model_path", "") or ""),
        draft=str(read("speculative_draft_model_path", "") or ""),
        port=int(read("port", 0) or 0),
        skips_warm_up=bool(read("skip_server_warmup", False)),
    )


def adaptive_unsupported_reason(server_args: Any) -> str | None:
    """SGLang's own words for why these arguments cannot be adaptive; None where they can."""
    from sglang.srt.speculative.adaptive_spec_params import adaptive_unsupported_reason as reason

    text = reason(server_args)
    return None if text is None else str(text)


def engine_tiers(adaptive_config: str | None) -> tuple[int, ...]:
    """The union of the tiers in SGLang's adaptive config, its default one for None; ascending."""
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    return tuple(resolve_candidate_steps_from_config(adaptive_config))


def ranks_of(scheduler: Any) -> Ranks:
    """The scheduler's place: as itself says in 0.5.9, its ``ps`` up to 0.5.20, then the runtime context."""
    layout = getattr(scheduler, "ps", None)
    if layout is None:
        try:
            from sglang.srt.runtime_context import get_parallel
        except ImportError:
            layout = scheduler
        else:
            layout = get_parallel()
    several = int(getattr(layout, "dp_size", 1) or 1) > 1
    dp_rank = getattr(layout, "dp_rank", None)
    return Ranks(int(layout.tp_rank), int(layout.tp_size), dp_rank if several else None)


def switch_records(server_args: Any) -> list[list[Any]]:
    """SGLang's growing records of settings that it changed, of (source, settings) each.

    None up to 0.5.15, two of the server's arguments in 0.5.16, one of the runtime context from 0.5.17 on.
    """
    holders: list[tuple[Any, str]] = [
        (server_args, "_resolved_overrides"),
        (server_args, "_runtime_mutations"),
    ]
    try:
        from sglang.srt.runtime_context import get_context
    except ImportError:
        pass
    else:
        holders.append((get_context(), "_overrides_log"))
    records = (getattr(holder, name, None) for holder, name in holders)
    return [record for record in records if isinstance(record, list)]


def kv_use_ratio(scheduler: Any) -> float | None:
    """The share of the KV cache in use, 0..1; None where it cannot be had."""
    observer = getattr(scheduler, "pool_stats_observer", None)
    if observer is not None:
        ratio = observer.get_pool_stats().full_token_usage
    elif hasattr(scheduler, "_get_token_info"):  # 0.5.9: tokens in use, their share, ...
        ratio = scheduler._get_token_info()[1]
    else:
        return None
    return min(1.0, max(0.0, float(ratio)))


def draft_kv_stays_warm(environment: Any) -> bool:
    """Whether SGLang brings the draft's KV cache up to date in steps at num_steps 0."""
    skipped = environment.get("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "").strip().lower()
    return skipped not in ("1", "true", "yes", "y")


def gpu_name() -> str:
    """The accelerator's name as torch says; "" without one. Imports nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name())


def _resolved_view(server_args: Any) -> Any:
    try:
        from sglang.srt.arg_groups.overrides import resolved_view
    except ImportError:
        return server_args
    return resolved_view(server_args)


def _resolves(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError):
        return False
    return True
