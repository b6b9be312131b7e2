"""``specgov demo``: sidecar, emulated engine, live table, comparison, picture."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import UsageError

if TYPE_CHECKING:
    from specgov.controller.cli.demo_report import StepTrace
    from specgov.controller.cli.engine_run import EngineRun
    from specgov.env.scenario import Scenario

ENGINE_ID = "demo"


def demo(
    *,
    policy: str = "greedy",
    duration_s: Annotated[float | None, options.option("SECONDS")] = None,
    plot: Path = Path("specgov-demo.svg"),
    decision_log: Path = Path("specgov-demo.jsonl"),
    seed: int = 0,
) -> None:
    """See Specgov work: a minute, no GPU.

    For example: specgov demo --policy threshold:32:3

    A sidecar on a temporary socket governs an emulated engine: an H200 that serves Llama 3.1 8B, with
    measured step times, in real time. Concurrency goes 1, 2, 4 ... 256 ... 4, 2, 1, and the requests turn
    from code to creative text half-way. Afterwards the same requests are played to fixed rules, for
    comparison, and a picture is saved. What is accepted of the drafts is simulated.

    Args:
        policy: The sidecar's decision rule.
        duration_s: Length of the run; the load is stretched to it. Default: half a minute.
        plot: Where the picture goes (SVG).
        decision_log: Where the sidecar's decision log goes, for specgov report.
        seed: Of the requests.

    """
    from specgov.controller.cli.emulate import find_scenario

    if seed < 0 or (duration_s is not None and duration_s <= 0):
        raise UsageError("demo: --duration-s must be above 0, --seed 0 or more")
    for option, path in (("--plot", plot), ("--decision-log", decision_log)):
        if not path.parent.is_dir():
            raise UsageError(f"demo: {option} {path}: there is no folder {path.parent}")
    _require_policy(policy)
    scenario = stretched(find_scenario("demo"), duration_s)
    run = _govern(scenario, policy, seed, decision_log)
    statics, threshold = _hindsight(scenario, seed)
    _report(scenario, run, run.trace(policy), statics, threshold, plot)
    output.console().print(
        f"Decision log: {decision_log}; specgov report {decision_log} makes a page of it", soft_wrap=True
    )


def _require_policy(text: str) -> None:
    from specgov.policies.registry import parse_policy
    from specgov.policies.types import PolicyError

    try:
        parse_policy(text)
    except PolicyError as error:
        raise UsageError(f"demo: {error}") from error


def stretched(scenario: Scenario, duration_s: float | None) -> Scenario:
    """The scenario with all its times in proportion, so that it lasts ``duration_s``; itself for None."""
    if duration_s is None:
        return scenario
    table, factor = scenario.table, duration_s / scenario.duration_s

    def stretch(part: str) -> object:
        starts_s = tuple(factor * start_s for start_s in getattr(table, part).start_s)
        return getattr(table, part).model_copy(update={"start_s": starts_s})

    changed = {"duration_s": duration_s, "arrivals": stretch("arrivals"), "mix": stretch("mix")}
    return dataclasses.replace(scenario, table=table.model_copy(update=changed))


def _govern(scenario: Scenario, policy: str, seed: int, decision_log: Path) -> EngineRun:
    """Run the engine under the sidecar's decisions, in real time; an older log makes room for the new one."""
    from specgov.controller.cli.demo_view import DemoView
    from specgov.controller.cli.engine_run import run_engine
    from specgov.controller.cli.sidecar_process import sidecar_process
    from specgov.env.emulated import Pace

    with tempfile.TemporaryDirectory(prefix="specgov-") as folder:
        log = Path(folder) / "decisions.jsonl"
        options = ["--policy", policy, "--seed", str(seed), "--decision-log", str(log)]
        with (
            sidecar_process(Path(folder), options) as target,
            DemoView(output.console(redraws=True), policy, scenario.duration_s, time.monotonic) as view,
        ):
            run = run_engine(
                scenario,
                target,
                Pace(),
                engine_id=ENGINE_ID,
                seed=seed,
                duration_s=scenario.duration_s,
                on_step=view.show,
            )
        shutil.move(log, decision_log)
        return run


def _hindsight(scenario: Scenario, seed: int) -> tuple[list[StepTrace], StepTrace]:
    """The static rules, and the best threshold rule, on the same requests."""
    from specgov.controller.cli.demo_report import best
    from specgov.controller.cli.hindsight import play_fixed_rules, static_rules, threshold_rules

    statics, thresholds = static_rules(scenario.engine), threshold_rules(scenario.engine)
    output.console().print(f"Now the same requests under {len(statics) + len(thresholds)} fixed rules.")
    with output.progress() as progress:
        task = progress.add_task("simulated seconds", total=round(scenario.duration_s, 1))
        traces = play_fixed_rules(
            scenario,
            statics + thresholds,
            seed,
            scenario.duration_s,
            lambda reached_s: progress.update(task, completed=round(reached_s, 1)),
        )
    chosen = best(traces[len(statics) :])
    name = f"{chosen.name} (best of {len(thresholds)} thresholds)"
    return traces[: len(statics)], dataclasses.replace(chosen, name=name)


def _report(
    scenario: Scenario,
    run: EngineRun,
    policy: StepTrace,
    statics: list[StepTrace],
    threshold: StepTrace,
    plot: Path,
) -> None:
    from specgov.controller.cli.demo_report import best, summary_table, svg
    from specgov.controller.cli.emulate import round_trip_text

    console = output.console()
    console.print(f"Output rate over {scenario.duration_s:g} s, the same requests for each:")
    console.print(summary_table(policy, statics, threshold))
    p50_ms, p99_ms = (run.round_trip_ms(q) if run.round_trips_ms else None for q in (0.5, 0.99))
    console.print(
        f"{policy.name}: {policy.switches} switches in {len(run.end_s)} steps, "
        f"{run.own_rule_steps} of them by the engine's own rule.\n"
        f"From report to decision: {round_trip_text(p50_ms, p99_ms)}.",
        soft_wrap=True,
    )
    profile = scenario.profile
    title = f"{policy.name} on an emulated {profile.hardware}, {profile.model}"
    shown = [statics[0], best([*statics, threshold])]
    plot.write_text(svg(title, scenario.duration_s, policy, shown), encoding="utf-8")
    console.print(f"Picture: {plot}", soft_wrap=True)
