"""``specgov tune peers``: the evaluation's opponents at their best on its training scenarios."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import UsageError

OutputPath = Annotated[Path, tyro.conf.arg(name="output", aliases=["-o"], metavar="FILE.json")]


def tune_peers(
    *,
    suite: Annotated[str, options.shown("NAME|FILE[:NAME]")] = "standard",
    time_scale: float = 0.125,
    seed: int = 1000,
    output_path: OutputPath = Path("tuned_peers.json"),
) -> None:
    """Tune threshold, schedule and SGLang's adaptive rule on a suite's training scenarios, for each model.

    For example: specgov tune peers -o env/tuned_peers.json

    What specgov evaluate plays as threshold_tuned, schedule_tuned and ema_tuned. The scenarios' scripts are
    hurried, and the seed is none that an evaluation uses, so that nothing is tuned on what it is judged by.

    Args:
        suite: Whose training scenarios.
        time_scale: Of the scenarios' scripts.
        seed: Of the simulated requests.
        output_path: Where to write what was found.

    """
    from specgov.env.scenario import Scenario, load_scenario
    from specgov.env.suite import faster, load_suite
    from specgov.env.tuning import Tuner
    from specgov.policies.profile import load_profile, profile_names

    names = load_suite(suite).train_scenarios
    if not names or time_scale <= 0 or seed < 0:
        raise UsageError("tune peers: the suite needs train_scenarios, --time-scale > 0, --seed >= 0")
    profiles: dict[str, dict[str, Any]] = {}
    with output.progress() as progress:
        for name in profile_names():
            profile = load_profile(name)

            def on_profile(scenario: Scenario, profile: Any = profile) -> Scenario:
                hurried = faster(scenario.table, time_scale)
                return dataclasses.replace(scenario, profile=profile, table=hurried)

            task = progress.add_task(f"tune peers, {name}, candidates", total=None)
            scenarios = [on_profile(load_scenario(scenario)) for scenario in names]
            tuner = Tuner(scenarios, seed, None, lambda played, task=task: progress.advance(task, played))
            found = {"threshold": tuner.threshold(), "schedule": tuner.schedule(), "ema": tuner.ema()}
            profiles[name] = {kind: tuned.parameters for kind, tuned in found.items()}
            profiles[name]["score"] = {kind: round(tuned.score, 5) for kind, tuned in found.items()}
            profiles[name]["plays"] = {kind: tuned.plays for kind, tuned in found.items()}
    command = f"specgov tune peers --suite {suite} --time-scale {time_scale:g} --seed {seed}"
    document = {"command": command, "scenarios": list(names), "profiles": profiles}
    output_path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    output.console(stderr=True).print(f"tune peers: written to {output_path}", soft_wrap=True)
