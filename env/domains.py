"""Random servers and loads to train on: what a policy must cope with on hardware that it has not seen.

A domain is a scenario and what the policy's estimates start from, which need not be true. Drawn are:

- step times: the recorded Llama profile, or a roofline of a random model and machine, times a smooth error in
  batch size and depth; the noise of single steps;
- what is believed of them: the truth (half of the domains), the profile before the error, or the recorded
  Llama profile whatever the server is;
- the engine: tiers, decision lag, KV capacity, whether tier 0 leaves the draft cold;
- the load: closed loops, steady, bursty or swinging arrivals, kinds of requests and their lengths, and how
  acceptance moves while they run.

The recorded Qwen3 profile and the bundled scenarios are never drawn: they are what policies are tested on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.acceptance_classes import CLASSES
from specgov.env.scenario import Scenario, load_scenario
from specgov.env.scenario_schema import ScenarioTable
from specgov.policies.profile import Profile, load_profile
from specgov.policies.step_time import Coefficients, ParametricStepTime, StepGrid, StepNoise
from specgov.policies.step_time.specs import DRAFTS, HARDWARE, MODELS
from specgov.policies.types import StepTime

RECORDED = "h200-llama-3.1-8b"
"""The profile that training may see."""
LOG = "log:"
"""Before the path of a decision log that is to be trained on."""

TIER_SETS: tuple[tuple[int, ...], ...] = (
    (0, 1, 2, 3, 5, 7), (0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 3, 7), (0, 1, 3), (0, 3), (1, 3, 5), (0, 2, 4)
)  # fmt: skip
_TIER_WEIGHTS = (0.3, 0.15, 0.15, 0.15, 0.1, 0.05, 0.1)
_LARGEST_MEAN_BATCH = 96.0


@dataclass(frozen=True)
class Domain:
    """A server with its load, and the step times that the policy's estimates start from."""

    scenario: Scenario
    believed: StepTime


def domain_of(name_or_path: str) -> Domain:
    """A scenario as it stands, or a decision log (``log:PATH``); its profile is believed and true."""
    if name_or_path.startswith(LOG):
        from specgov.env.logged_domain import domain_of_log

        return domain_of_log(name_or_path.removeprefix(LOG))
    scenario = load_scenario(name_or_path)
    return Domain(scenario, scenario.profile.step_time)


def random_domain(rng: np.random.Generator, open_loop: bool = False) -> Domain:
    """A domain drawn with ``rng``; with ``open_loop`` requests come at their own pace."""
    base = load_profile(RECORDED)
    if rng.random() < 0.5:
        base = _roofline(base, rng)
    true = _distorted(base, rng)
    believed = (true, base, load_profile(RECORDED))[rng.choice(3, p=(0.5, 0.35, 0.15))]
    noise = StepNoise(float(np.exp(rng.uniform(np.log(0.01), np.log(0.1)))))
    table = ScenarioTable.model_validate(_table(rng, true, open_loop))
    scenario = Scenario("random", table, replace(true, noise=noise), Path())
    return Domain(scenario, believed.step_time.with_graph_batch_sizes(true.graph_batch_sizes))


def _roofline(recorded: Profile, rng: np.random.Generator) -> Profile:
    """A random model on a random machine, on the recorded profile's grid."""
    model = str(rng.choice(sorted(MODELS)))
    machine = str(rng.choice(sorted(HARDWARE)))
    tensor_parallel_size = int(rng.choice([4, 8])) if "70b" in model else int(rng.choice([1, 1, 2]))
    plain = Coefficients()
    factors = np.exp(rng.normal(0.0, 0.25, 4))
    coefficients = replace(
        plain,
        fixed_ms=plain.fixed_ms * factors[0],
        draft_pass_ms=plain.draft_pass_ms * factors[1],
        draft_extend_ms=plain.draft_extend_ms * factors[2],
        token_us=plain.token_us * factors[3],
        compute_efficiency=float(rng.uniform(0.4, 0.75)),
        memory_efficiency=float(rng.uniform(0.7, 0.92)),
        novelty=float(rng.uniform(0.1, 0.9)),
    )
    step_time = ParametricStepTime(
        MODELS[model], DRAFTS[model], HARDWARE[machine], tensor_parallel_size, coefficients
    )
    context, batch, tier = np.meshgrid(*_axes(recorded.grid), indexing="ij")
    return replace(recorded, grid=_grid(recorded.grid, step_time.step_ms(batch, tier, batch * context)))


def _distorted(profile: Profile, rng: np.random.Generator) -> Profile:
    """The profile with step times that are off by a smooth factor of batch size and depth."""
    _, batch, tier = np.meshgrid(*_axes(profile.grid), indexing="ij")
    depth = np.log2(1.0 + tier) / 3.0
    size = np.log2(batch) / 8.0
    error = rng.normal(0.0, 0.3) + rng.normal(0.0, 0.15) * depth + rng.normal(0.0, 0.15) * size
    error = error + rng.normal(0.0, 0.15) * depth * size
    return replace(profile, grid=_grid(profile.grid, profile.grid.step_ms * np.exp(error)))


def _axes(grid: StepGrid) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    return grid.context_tokens, grid.batch_sizes, grid.num_steps


def _grid(like: StepGrid, step_ms: NDArray[np.float64]) -> StepGrid:
    for axis in range(3):
        step_ms = np.maximum.accumulate(step_ms, axis=axis)
    return replace(like, step_ms=step_ms)


def _table(rng: np.random.Generator, profile: Profile, open_loop: bool) -> dict[str, Any]:
    output_tokens = float(np.exp(rng.uniform(np.log(60), np.log(600))))
    return {
        "tests": "A random server and load.",
        "profile": profile.name,
        "duration_s": 1e6,
        "engine": {
            "max_running_requests": int(rng.choice([64, 128, 256])),
            "kv_capacity_tokens": int(rng.choice([0, 300_000, 800_000])),
            "tiers": TIER_SETS[rng.choice(len(TIER_SETS), p=_TIER_WEIGHTS)],
            "decision_lag_steps": int(rng.choice([1, 2], p=(0.3, 0.7))),
            "transport_lag_steps": int(rng.choice([0, 1, 2], p=(0.2, 0.6, 0.2))),
            "draft_kv_stays_warm": bool(rng.random() < 0.85),
        },
        "arrivals": _arrivals(rng, profile, output_tokens, open_loop),
        "classes": [_class(rng, output_tokens) for _ in range(rng.integers(1, 4))],
        "acceptance": _acceptance(rng),
    }


def _class(rng: np.random.Generator, output_tokens: float) -> dict[str, Any]:
    kind: dict[str, Any] = {"acceptance": str(rng.choice(sorted(CLASSES)))}
    if rng.random() < 0.5:
        first, decay = rng.uniform(0.15, 0.97), rng.uniform(0.85, 1.05)
        kind = {"conditional_acceptance": np.clip(first * decay ** np.arange(7), 0.0, 0.99).tolist()}
    return kind | {
        "share": float(rng.uniform(0.2, 1.0)),
        "prompt": {
            "median_tokens": float(np.exp(rng.uniform(np.log(100), np.log(3000)))),
            "sigma": float(rng.uniform(0.3, 0.9)),
            "max_tokens": 16_384,
        },
        "output": {
            "median_tokens": output_tokens * float(np.exp(rng.normal(0, 0.4))),
            "sigma": float(rng.uniform(0.3, 0.9)),
            "max_tokens": 4096,
        },
    }


def _arrivals(
    rng: np.random.Generator, profile: Profile, output_tokens: float, open_loop: bool
) -> dict[str, Any]:
    batch = float(np.exp(rng.uniform(0.0, np.log(_LARGEST_MEAN_BATCH))))
    if not open_loop and rng.random() < 0.6:
        if rng.random() < 0.5:
            return {"kind": "closed", "concurrency": round(batch)}
        other = max(1, round(min(batch * float(np.exp(rng.normal(0, 1.2))), 160)))
        period_s = float(rng.uniform(2, 12))
        return {
            "kind": "closed",
            "concurrency": [max(1, round(batch)), other],
            "start_s": [0, period_s / 2],
            "period_s": period_s,
            "interpolate": bool(rng.random() < 0.5),
            "random_phase": True,
        }
    # The rate that keeps about `batch` requests running when a step brings two tokens a request.
    step_s = float(profile.step_time.step_ms(round(batch), 2, round(batch) * 800)) * 1e-3
    rate_rps = batch / (output_tokens / 2.0 * step_s)
    gaps = {"gaps": "gamma", "cv": float(rng.uniform(1, 4))}
    if rng.random() < 0.5:
        return {"kind": "steady", "rate_rps": rate_rps} | gaps
    period_s = float(rng.uniform(3, 15))
    return {
        "kind": "pieces",
        "rate_rps": [rate_rps, rate_rps * float(np.exp(rng.normal(0, 0.7)))],
        "start_s": [0, period_s / 2],
        "period_s": period_s,
        "random_phase": True,
    } | gaps


def _acceptance(rng: np.random.Generator) -> dict[str, Any]:
    shifts = []
    if rng.random() < 0.3:
        shift = {"at_s": float(rng.uniform(2, 12)), "log_hazard": float(rng.normal(0, 0.7))}
        shifts.append(shift | {"ramp_s": float(rng.choice([0.0, 3.0]))})
    return {
        "shifts": shifts,
        "regime_spread": float(rng.uniform(0, 0.5)) if rng.random() < 0.5 else 0.0,
        "regime_s": float(rng.uniform(2, 15)),
        "cold_log_hazard": float(rng.uniform(0.3, 1.2)),
    }
