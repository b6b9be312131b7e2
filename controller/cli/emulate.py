"""``specgov emulate``: play an engine against a running sidecar."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from specgov.controller.cli import options, output, remote
from specgov.controller.cli.errors import UsageError

if TYPE_CHECKING:
    from specgov.controller.cli.engine_run import EngineRun
    from specgov.env.emulated import Pace
    from specgov.env.scenario import Scenario


def emulate(
    *,
    load: Annotated[str, options.shown("NAME|FILE[:NAME]")] = "demo",
    target: remote.Target = None,
    duration_s: Annotated[float | None, options.option("SECONDS")] = None,
    speed: float = 1.0,
    fast: bool = False,
    engine_id: str = "emulated",
    seed: int = 0,
    json: bool = False,
) -> None:
    """Play an engine against a running sidecar, over the real client and real gRPC, without a GPU.

    For example: specgov emulate --load quiet_chat --duration-s 30

    Step times come from measurements (the scenario's profile), requests and what is accepted of their drafts
    from a seeded simulation. In another shell, specgov engines watch shows the steps. Exit code 3 if no
    sidecar answers.

    Args:
        load: A scenario: a bundled one by name, a TOML file, or demo.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.
        duration_s: Simulated time to play; default: the scenario's duration.
        speed: Simulated seconds a second; 1 is real time.
        fast: As fast as possible, waiting for the decision on each step: the same seed gives the same run.
        engine_id: The engine's name at the sidecar.
        seed: Of all that chance decides.
        json: Print JSON.

    """
    from specgov.controller.cli.engine_run import run_engine
    from specgov.env.emulated import Pace

    if not speed > 0 or seed < 0 or (duration_s is not None and not 0 < duration_s < math.inf):  # NaN too
        raise UsageError("emulate: --speed and --duration-s must be above 0, --seed 0 or more")
    if not engine_id:
        raise UsageError("emulate: --engine-id is empty")
    scenario = find_scenario(load)
    played_s = scenario.duration_s if duration_s is None else duration_s
    where = remote.grpc_target(remote.target_or_default(target))
    remote.require_serving(where)
    pace = Pace(lockstep=True, speed=None) if fast else Pace(speed=speed)
    with output.progress() as progress:
        task = progress.add_task(f"{scenario.name}, simulated seconds", total=round(played_s, 1))

        def show(run: EngineRun) -> None:
            progress.update(task, completed=round(min(run.end_s[-1], played_s), 1))

        run = run_engine(
            scenario, where, pace, engine_id=engine_id, seed=seed, duration_s=played_s, on_step=show
        )
    facts = summary(scenario, run, pace)
    if json:
        output.print_json(facts)
    else:
        _print(facts)


def find_scenario(load: str) -> Scenario:
    """The demo's scenario, a bundled one by name, or one of a file.

    Raises:
        ScenarioError: there is none, or the file is wrong.

    """
    from importlib.resources import files

    from specgov.env.scenario import load_scenario, parse_scenario

    if load == "demo":
        text = (files("specgov.controller.cli") / "demo.toml").read_text(encoding="utf-8")
        return parse_scenario(text, "demo.toml")
    return load_scenario(load)


def summary(scenario: Scenario, run: EngineRun, pace: Pace) -> dict[str, Any]:
    """What came of a run, by name."""
    trace = run.trace("")
    tiers, counts = np.unique(trace.num_steps, return_counts=True)
    stats = run.stats
    return {
        "scenario": scenario.name,
        "profile": scenario.profile.name,
        "lockstep": pace.lockstep,
        "simulated_s": trace.end_s[-1] if len(trace.end_s) else 0.0,
        "steps": len(trace.end_s),
        "output_tokens_per_s": trace.output_tokens_per_s,
        "switches": trace.switches,
        "tier_shares": {
            str(tier): count / len(trace.end_s) for tier, count in zip(tiers, counts, strict=True)
        },
        "steps_by_own_rule": run.own_rule_steps,
        "round_trip_ms_p50": run.round_trip_ms(0.5) if run.round_trips_ms else None,
        "round_trip_ms_p99": run.round_trip_ms(0.99) if run.round_trips_ms else None,
        "reports_dropped": stats.dropped if stats else 0,
        "reconnects": stats.reconnects if stats else 0,
    }


def _print(facts: dict[str, Any]) -> None:
    shares = ", ".join(f"{100 * share:.0f} % at {tier}" for tier, share in facts["tier_shares"].items())
    lines = [
        ("scenario", f"{facts['scenario']}, step times of {facts['profile']}"),
        ("played", f"{facts['simulated_s']:.1f} simulated seconds, {facts['steps']} steps"),
        ("output rate", f"{facts['output_tokens_per_s']:.0f} tokens/s"),
        ("num_steps", f"{shares}; {facts['switches']} switches"),
        (
            "by its own rule",
            f"{facts['steps_by_own_rule']} steps (no fresh decision, or one in mode shadow)",
        ),
        ("round trip", round_trip_text(facts["round_trip_ms_p50"], facts["round_trip_ms_p99"])),
        ("stream", f"{facts['reports_dropped']} reports dropped, {facts['reconnects']} reconnects"),
    ]
    console = output.console()
    for name, text in lines:
        console.print(f"{name:<16} {text}", soft_wrap=True)


def round_trip_text(p50_ms: float | None, p99_ms: float | None) -> str:
    """Both quantiles, or that there are none."""
    if p50_ms is None or p99_ms is None:
        return "no decision came back"
    return f"p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms"
