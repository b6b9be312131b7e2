"""``specgov simulate``: a rule on a simulated server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specgov.controller.cli import options, output
from specgov.controller.cli.emulate import find_scenario
from specgov.controller.cli.errors import UsageError

if TYPE_CHECKING:
    from specgov.controller.cli.simulated_run import SimulatedRun
    from specgov.env.scenario import Scenario


def simulate(
    *,
    scenario: Annotated[str, options.shown("NAME|FILE[:NAME]")] = "mixed_classes",
    policy: str = "threshold",
    seed: int = 0,
    duration_s: Annotated[float | None, options.option("SECONDS")] = None,
    plot: Annotated[Path | None, options.option("FILE.svg")] = None,
    trajectory: Annotated[Path | None, options.option("FILE.csv")] = None,
    json: bool = False,
) -> None:
    """Run a policy on a simulated server: what the server would have produced, and how fast.

    For example: specgov simulate --scenario flash_crowd --policy threshold:64:3 --seed 1

    The policy decides in this process, with the scenario's decision lag. The same seed brings the same
    requests to every policy. A picture and the steps are saved as well.

    Args:
        scenario: A bundled scenario (specgov scenarios list), or a TOML file.
        policy: A decision rule, as in static:3 or threshold:64:3.
        seed: Of all that chance decides.
        duration_s: Simulated time; default: the scenario's.
        plot: Where to save the picture; default: simulate-SCENARIO-POLICY-SEED.svg.
        trajectory: Where to save the steps; default: the same name with .csv.
        json: Print JSON.

    """
    from specgov.controller.cli.simulated_run import simulate_policy

    if seed < 0 or (duration_s is not None and duration_s <= 0):
        raise UsageError("simulate: --duration-s must be above 0, --seed 0 or more")
    found = find_scenario(scenario)
    until_s = found.duration_s if duration_s is None else duration_s
    with output.progress() as progress:
        task = progress.add_task(f"{found.name}, {policy}, simulated seconds", total=round(until_s, 1))
        run = simulate_policy(
            found, policy, seed, until_s, lambda now_s: progress.update(task, completed=round(now_s, 1))
        )
    name = f"simulate-{found.name}-{policy}-{seed}".replace(":", "-").replace("/", "-")
    picture = plot or Path(f"{name}.svg")
    steps = trajectory or Path(f"{name}.csv")
    picture.write_text(run.svg(), encoding="utf-8")
    run.write_csv(steps)
    if json:
        output.print_json(run.summary() | {"plot": str(picture), "trajectory": str(steps)})
    else:
        _print(found, run, picture, steps)


def _print(scenario: Scenario, run: SimulatedRun, picture: Path, steps: Path) -> None:
    console = output.console()
    facts = run.summary()
    console.print(f"{scenario.name}: {scenario.tests}", soft_wrap=True)
    span = f"{facts['steps']} steps in {facts['simulated_s']:.1f} simulated seconds"
    console.print(f"{run.policy}, seed {run.seed}: {span}", soft_wrap=True)
    console.print(f"output rate  {facts['output_tokens_per_s']:.0f} tokens/s")
    spent = ", ".join(f"{100 * share:.0f} % {what}" for what, share in facts["time_shares"].items())
    console.print(f"time         {spent}")
    counts = [(facts[f"requests_{key}"], words) for key, words in _REQUESTS.items()]
    console.print("requests     " + ", ".join(f"{count} {words}" for count, words in counts), soft_wrap=True)
    console.print(f"tiers        {facts['tier_switches']} switches")
    columns = ("", "p50", "p90", "p99")
    latencies = [(name, *(_ms(facts[key][column]) for column in columns[1:])) for name, key in _LATENCIES]
    console.print(output.table(columns, latencies))
    shares = [
        (f"k={tier}", f"{100 * share['time']:.1f} %", f"{100 * share['steps']:.1f} %")
        for tier, share in facts["tiers"].items()
    ]
    console.print(output.table(("tier", "time", "steps"), shares))
    console.print(f"picture: {picture}   steps: {steps}", soft_wrap=True)


_REQUESTS = {"finished": "finished", "waiting_at_end": "waiting at the end", "retracted": "retracted"}
_LATENCIES = (("time per output token, ms", "tpot_ms"), ("time to first token, ms", "ttft_ms"))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
