"""``specgov train`` and ``specgov export``: a policy network from the simulator, and its bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import CliError, UsageError

if TYPE_CHECKING:
    from specgov.env.training import Progress, Recipe

Folder = Annotated[Path, tyro.conf.arg(name="output", aliases=["-o"], metavar="FOLDER")]

EXTRA = "specgov train needs torch and Stable-Baselines3: pip install 'specgov[train]'"


def train(
    *,
    output_path: Folder,
    policy: Literal["ppo"] = "ppo",
    scenario: Annotated[str, options.option("random|NAME|FILE[:NAME][,...]")] = "",
    log: Annotated[tuple[str, ...], options.option("LOG [LOG ...]")] = (),
    reward: Literal["rate", "latency", "slo"] = "rate",
    seed: int = 0,
    steps: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    time_limit_s: Annotated[float | None, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="")] = None,
    n_envs: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    without_estimates: bool = False,
    tensorboard: Annotated[Path | None, options.option("FOLDER")] = None,
    resume: bool = False,
) -> None:
    """Train a policy network in the simulator.

    For example: specgov train --policy ppo --reward rate --seed 0 -o out/ppo
    or: specgov train --log decisions.jsonl -o out/mine

    The folder holds the recipe, the last checkpoint, and the policy that did best on the evaluation split;
    specgov export makes a bundle of the latter. It ends when nothing improves any more, or when steps or
    time are used up.

    Args:
        output_path: Where to keep the run.
        policy: What to train.
        scenario: What to train on: random servers and loads, scenarios, or both, separated by commas.
            Default: random; with --log, the logs alone.
        log: Decision logs to train on: their step times, batches over time and acceptance.
        reward: What counts: output rate, latency, or tokens of requests that met their targets.
        seed: Of all that chance decides.
        steps: Decisions to train on; default: the recipe's.
        time_limit_s: Wall time; default: the recipe's, 0 = none.
        n_envs: Simulated servers at a time, up to 1024; default: the recipe's.
        without_estimates: Hide the estimators from the network, to see what they are worth.
        tensorboard: Where to write files for TensorBoard.
        resume: Continue the folder's run; the other options must be as before.

    """
    del policy  # there is one
    run_exists = (output_path / "run.json").exists()
    if run_exists and not resume:
        raise UsageError(f"train: {output_path} holds a run: name another folder, or continue with --resume")
    if resume and not run_exists:
        raise UsageError(f"train: {output_path} holds no run to resume")
    if seed < 0:
        raise UsageError("train: --seed must be 0 or more")
    try:
        from specgov.env.training import Recipe, Run
    except ImportError as error:
        raise CliError(f"{EXTRA} ({error})") from error

    plain = Recipe()
    recipe = Recipe(
        scenarios=scenarios_of(scenario, log),
        reward=reward,
        seed=seed,
        steps=plain.steps if steps is None else steps,
        time_limit_s=plain.time_limit_s if time_limit_s is None else time_limit_s or None,
        n_envs=plain.n_envs if n_envs is None else n_envs,
        without_estimates=without_estimates,
    )
    with output.progress() as progress:
        task = progress.add_task("train", total=100)

        def tell(now: Progress) -> None:
            note = f"train, {now.steps} steps, best {100 * now.best_score:+.2f} %"
            progress.update(task, completed=round(100 * _share(now, recipe)), description=note)

        end = Run(recipe, output_path, _command(), tensorboard).train(tell)
    output.console().print(
        f"{end.steps} steps in {end.seconds:.0f} s, {end.evaluations} evaluations; the best policy is "
        f"{100 * end.best_score:+.2f} % against following the model on the evaluation split; it is in "
        f"{output_path / 'best'}",
        soft_wrap=True,
    )


def scenarios_of(scenario: str, logs: tuple[str, ...]) -> tuple[str, ...]:
    """The recipe's scenarios: those that are named, random ones where nothing is, and the logs."""
    named = scenario or ("" if logs else "random")
    return (*(name.strip() for name in named.split(",") if name.strip()), *(f"log:{path}" for path in logs))


def export(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    *,
    output_path: Folder,
    scenario: Annotated[str, options.shown("all|NAME|FILE[:NAME][,...]")] = "all",
    steps: int = 300,
) -> None:
    """Make a bundle of a run's best policy, with its scores by scenario.

    For example: specgov export out/ppo -o my-policy

    The scores are shares of the best output rate that any tier could have had, step by step, for the policy
    and for the model that it starts from.

    Args:
        run: The folder of specgov train.
        output_path: The bundle's folder; its last part is the bundle's name.
        scenario: What to score it on: the bundled scenarios, or some, separated by commas.
        steps: Decode steps of each.

    """
    try:
        from specgov.env.export import export_run
    except ImportError as error:
        raise CliError(f"{EXTRA} ({error})") from error
    from specgov.env.scenario import scenario_names

    names = scenario_names() if scenario == "all" else [name.strip() for name in scenario.split(",")]
    with output.progress() as progress:
        task = progress.add_task("export, scenarios", total=len(names))
        card = export_run(run, output_path, names, steps, lambda: progress.advance(task))
    size = sum(path.stat().st_size for path in output_path.iterdir())
    output.console().print(
        f"{output_path}: bundle {card.name}, {size / 1000:.0f} kB; use it with --policy ppo:{output_path}",
        soft_wrap=True,
    )


def show(
    bundle: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="BUNDLE")] = "default",
    /,
    *,
    json: bool = False,
) -> None:
    """Show what a policy bundle is: network, training, scores. It is checked as the sidecar would.

    For example: specgov policy show default

    Args:
        bundle: A bundle of the package, or a bundle's folder.
        json: Print JSON.

    """
    from dataclasses import asdict

    from specgov.policies.bundle import load_bundle, readable

    card = load_bundle(bundle).card
    if json:
        output.print_json(asdict(card))
    else:
        sys.stdout.write(readable(card))


def _share(now: Progress, recipe: Recipe) -> float:
    """How much of the run is over at most."""
    by_time = now.seconds / recipe.time_limit_s if recipe.time_limit_s else 0.0
    return min(1.0, max(now.steps / recipe.steps, by_time))


def _command() -> str:
    return " ".join(["specgov", *sys.argv[1:]])
