"""``specgov tune peers``: the evaluation's opponents at their best on its training scenarios."""

from __future__ import annotations

import dataclasses
import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import UsageError

OutputPath = Annotated[Path, tyro.conf.arg(name="output", aliases=["-o"], metavar="FILE.json")]

SEED = 1000
"""None that an evaluation uses, so that nothing is tuned on what it is judged by."""


def tune_peers(
    *,
    suite: Annotated[str, options.shown("NAME|FILE[:NAME]")] = "standard",
    time_scale: float = 0.05,
    least_s: float = 6.0,
    jobs: int = 0,
    output_path: OutputPath = Path("tuned_peers.json"),
) -> None:
    """Tune threshold, schedule and SGLang's adaptive rule on a suite's training scenarios, for each model.

    For example: specgov tune peers -o env/tuned_peers.json

    What specgov evaluate plays as threshold_tuned, schedule_tuned and ema_tuned. A quarter of an hour.

    Args:
        suite: Whose training scenarios.
        time_scale: Of the scenarios' scripts: 0.05 = in a twentieth of the time.
        least_s: Simulated time that a scenario lasts at least.
        jobs: Processes; 0 = one for each core.
        output_path: Where to write what was found.

    """
    from specgov.env.suite import load_suite
    from specgov.policies.profile import profile_names

    scenarios = load_suite(suite).train_scenarios
    if not scenarios or time_scale <= 0 or least_s <= 0 or jobs < 0:
        raise UsageError(
            "tune peers: the suite needs train_scenarios, --time-scale and --least-s must be above 0, --jobs "
            "0 or more"
        )
    names = profile_names()
    tune = partial(tune_profile, scenarios=scenarios, time_scale=time_scale, least_s=least_s)
    profiles: dict[str, Any] = {}
    with (
        output.progress() as progress,
        ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool,
    ):
        task = progress.add_task("tune peers, profiles", total=len(names))
        for name, found in zip(names, pool.map(tune, names), strict=True):
            profiles[name] = found
            progress.advance(task)
    command = f"specgov tune peers --suite {suite} --time-scale {time_scale:g} --least-s {least_s:g}"
    document = {"command": command, "scenarios": list(scenarios), "profiles": profiles}
    output_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    output.console(stderr=True).print(f"tune peers: written to {output_path}", soft_wrap=True)


def tune_profile(
    profile: str, scenarios: tuple[str, ...], time_scale: float, least_s: float
) -> dict[str, Any]:
    """The best parameters by kind of rule, their scores, and how many candidates were played."""
    from specgov.env.scenario import Scenario, load_scenario
    from specgov.env.suite import faster
    from specgov.env.tuning import Tuner
    from specgov.policies.profile import load_profile

    loaded = load_profile(profile)

    def hurried(scenario: Scenario) -> Scenario:
        scale = max(time_scale, least_s / scenario.duration_s)
        return dataclasses.replace(scenario, profile=loaded, table=faster(scenario.table, scale))

    tuner = Tuner([hurried(load_scenario(name)) for name in scenarios], SEED)
    threshold, schedule, ema = tuner.threshold(), tuner.schedule(), tuner.ema()
    return {
        "threshold": threshold.parameters,
        "schedule": schedule.parameters,
        "ema": ema.parameters,
        "score": [round(tuned.score, 5) for tuned in (threshold, schedule, ema)],
        "plays": [tuned.plays for tuned in (threshold, schedule, ema)],
    }
