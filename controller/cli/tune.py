"""``specgov tune``: the best settings that the simulator finds, for operators who run no sidecar."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.emulate import find_scenario
from specgov.controller.cli.errors import UsageError

if TYPE_CHECKING:
    from specgov.env.scenario import Scenario
    from specgov.env.tuning import Tuner

ProfileName = Annotated[str, options.shown("NAME|FILE")]
Scenarios = Annotated[str, options.shown("NAME|FILE[:NAME][,...]")]
OutputPath = Annotated[Path | None, tyro.conf.arg(name="output", aliases=["-o"], metavar="FILE.json")]

DEFAULT_SCENARIOS = "quiet_chat,day_and_night,saturated_batch,mixed_classes"


def sglang(
    *,
    profile: ProfileName,
    scenario: Scenarios = DEFAULT_SCENARIOS,
    seed: int = 0,
    duration_s: float = 15.0,
    output_path: OutputPath = None,
) -> None:
    """Find the best configuration of SGLang's own adaptive speculation for a profile.

    For example: specgov tune sglang --profile h200-llama-3.1-8b -o adaptive.json

    For SGLang's --speculative-adaptive-config. Its rule follows acceptance within the tiers of each
    batch-size slot; what is searched for are the slots' tiers and the rule's options.

    Args:
        profile: A bundled profile's name (specgov profiles list), or a file.
        scenario: What to be good at on average: bundled scenarios or files, separated by commas.
        seed: Of the simulated requests.
        duration_s: Simulated time that each candidate is tried for.
        output_path: Where to write the configuration; default: standard output.

    """

    def search(tuner: Tuner) -> tuple[Any, float]:
        found = tuner.ema()
        return found.parameters, found.score

    _tune("tune sglang", profile, scenario, seed, duration_s, output_path, search)


def vllm(
    *,
    profile: ProfileName,
    scenario: Scenarios = DEFAULT_SCENARIOS,
    seed: int = 0,
    duration_s: float = 15.0,
    output_path: OutputPath = None,
) -> None:
    """Find the best number of draft tokens by batch size for a profile, in vLLM's format.

    For example: specgov tune vllm --profile h200-llama-3.1-8b -o dynamic.json

    The two keys written belong into vLLM's --speculative-config, beside the method and the draft model.

    Args:
        profile: A bundled profile's name (specgov profiles list), or a file.
        scenario: What to be good at on average: bundled scenarios or files, separated by commas.
        seed: Of the simulated requests.
        duration_s: Simulated time that each candidate is tried for.
        output_path: Where to write the schedule; default: standard output.

    """

    def search(tuner: Tuner) -> tuple[Any, float]:
        found = tuner.schedule()
        return vllm_document(found.parameters, tuner.engine.largest_batch_size), found.score

    _tune("tune vllm", profile, scenario, seed, duration_s, output_path, search)


def threshold(
    *,
    profile: ProfileName,
    scenario: Scenarios = DEFAULT_SCENARIOS,
    seed: int = 0,
    duration_s: float = 15.0,
    output_path: OutputPath = None,
) -> None:
    """Find the best batch size up to which to speculate, and with how many draft steps, for a profile.

    For example: specgov tune threshold --profile h200-llama-3.1-8b

    Args:
        profile: A bundled profile's name (specgov profiles list), or a file.
        scenario: What to be good at on average: bundled scenarios or files, separated by commas.
        seed: Of the simulated requests.
        duration_s: Simulated time that each candidate is tried for.
        output_path: Where to write the result; default: standard output.

    """

    def search(tuner: Tuner) -> tuple[Any, float]:
        found = tuner.threshold()
        return {"policy": found.parameters}, found.score

    _tune("tune threshold", profile, scenario, seed, duration_s, output_path, search)


def vllm_document(schedule: str, largest_batch_size: int) -> dict[str, Any]:
    """A tuned ``schedule:B=K:...`` in the format of vLLM's dynamic speculative decoding.

    Source: https://docs.vllm.ai/en/latest/features/speculative_decoding/dynamic_speculative_decoding/
    """
    starts = [tuple(map(int, part.split("="))) for part in schedule.split(":")[1:]]
    ends = [first - 1 for first, _ in starts[1:]] + [largest_batch_size]
    ranges = [[first, end, tier] for (first, tier), end in zip(starts, ends, strict=True)]
    return {
        "num_speculative_tokens": max(tier for _, _, tier in ranges),
        "num_speculative_tokens_per_batch_size": ranges,
    }


def _tune(
    command: str,
    profile: str,
    scenarios: str,
    seed: int,
    duration_s: float,
    output_path: Path | None,
    search: Callable[[Tuner], tuple[Any, float]],
) -> None:
    from specgov.env.tuning import Tuner

    if seed < 0 or duration_s <= 0:
        raise UsageError(f"{command}: --duration-s must be above 0, --seed 0 or more")
    on = with_profile([find_scenario(name.strip()) for name in scenarios.split(",")], profile)
    with output.progress() as progress:
        task = progress.add_task(f"{command}, candidates", total=None)
        tuner = Tuner(on, seed, duration_s, lambda played: progress.advance(task, played))
        document, score = search(tuner)
        statics = [f"static:{tier}" for tier in tuner.engine.tiers]
        static_scores = dict(zip(statics, tuner.scores(statics).tolist(), strict=True))
    text = json.dumps(document, indent=2) + "\n"
    if output_path is None:
        sys.stdout.write(text)
    else:
        output_path.write_text(text, encoding="utf-8")
    best = max(static_scores, key=lambda rule: static_scores[rule])
    gain = 100 * (math.exp(score - static_scores[best]) - 1)
    output.console(stderr=True).print(
        f"{command}: {math.exp(score):.1f} output tokens a request-second in the simulator, "
        f"{gain:+.1f} % against {best}" + (f"; written to {output_path}" if output_path else ""),
        soft_wrap=True,
    )


def with_profile(scenarios: list[Scenario], profile: str) -> list[Scenario]:
    """The scenarios on the server of ``profile``, with all its tiers.

    Raises:
        ProfileError: there is no such profile.

    """
    from specgov.policies.profile import load_profile

    loaded = load_profile(profile)
    return [dataclasses.replace(scenario, profile=loaded) for scenario in scenarios]
