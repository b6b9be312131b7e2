"""``specgov replay``: the policies on the step costs of a recording, or on a decision log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from specgov.controller.cli.counterfactual import Floats, Outcome, Stage

USUAL_LAG_STEPS = 3
"""Two steps in SGLang's overlap loop, and one for the way to the sidecar and back."""
USUAL_STEPS = 2200
"""Of a recording."""


def replay(
    files: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE ...]")],
    /,
    *,
    policies: Annotated[
        tuple[str, ...],
        tyro.conf.arg(metavar="POLICY [POLICY ...]", aliases=["--policy"], help_behavior_hint=""),
    ] = (),
    acceptance: Annotated[str, options.option("CLASS|P[,P...]")] = "",
    steps: Annotated[str, options.option("N|all")] = "",
    lag: Annotated[int | None, options.option("N")] = None,
    engine: Annotated[str, options.option("ENGINE")] = "",
    profile: Annotated[str, options.option("NAME|FILE.json")] = "",
    seed: int = 0,
    json: bool = False,
) -> None:
    """Compare the policies on the step costs of a recording, or on a decision log.

    For example: specgov replay steps.csv --acceptance code --policies static:0 threshold:64:3 ema
    or: specgov replay decisions.jsonl --policy static:3

    This is counterfactual: a recording says what steps cost, not what would have been accepted. Acceptance is
    that of a named class, or stated by position, the same for every request; on a decision log it is by
    default what was seen around each step at each position. Each policy decides in this process, on the
    file's batch sizes and contexts, and sees the same draws. A log's batches stay as they were, whatever a
    policy does.

    Args:
        files: Recordings of decode steps, in the format that specgov calibrate reads, or decision logs.
        policies: Decision rules; default: every rule with its defaults, and static at each tier.
        acceptance: A class of requests (chat, code, ...), or P(draft accepted | the drafts before it were)
            by position. Default: chat; of a decision log, what was seen.
        steps: Steps to play, or all. Of more steps in the file some are left out evenly, and the output says
            how many; fewer are repeated. Default: 2200; of a decision log, all up to 5000.
        lag: Steps between the newest result that a decision knows and the step that it applies to. Default:
            3, two in SGLang's overlap loop and one for the way; of a decision log, the engine's.
        engine: Which engine of a decision log.
        profile: Step times for a decision log. Default: calibrated from it, else its engine's profile.
        seed: Of all that chance decides.
        json: Print JSON.

    """
    if not files:
        raise UsageError("replay: name at least one recording or decision log")
    if (lag is not None and lag < 1) or seed < 0:
        raise UsageError("replay: --lag must be 1 or more, --seed 0 or more")
    count = _step_count(steps)
    results = []
    for file in files:
        played = _play(file, acceptance, count, lag, engine, profile, seed)
        results.append(
            dataclasses.replace(played, outcomes=[*played.outcomes, *_play_all(played.stage, policies)])
        )
    if json:
        output.print_json([_as_json(result) for result in results])
        return
    for result in results:
        _print(result)


def _step_count(text: str) -> int | Literal["all"] | None:
    if text in ("", "all"):
        return "all" if text else None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"replay: --steps takes a number from 1 on, or all, not {text!r}")
    return options.non_negative("replay: --steps", int(text))


@dataclasses.dataclass(frozen=True)
class Played:
    """A file, the stage that was made of it, what it rests on in words, and how the rules fared.

    ``usable_steps``: how many the file has; the stage has fewer where some are left out.
    """

    file: str
    stage: Stage
    usable_steps: int
    acceptance: str
    assumptions: str
    outcomes: list[Outcome]


def _play(
    file: str,
    acceptance: str,
    steps: int | Literal["all"] | None,
    lag: int | None,
    engine: str,
    profile: str,
    seed: int,
) -> Played:
    """The stage; of a decision log what ran is an outcome already."""
    from specgov.controller.cli.logged_stage import is_log, logged_stage

    if is_log(file):
        stated = partial(acceptance_by_position, acceptance) if acceptance else None
        found = logged_stage(file, engine, profile, steps, lag, seed, stated)
        label = acceptance or "logged"
        return Played(file, found.stage, found.usable_steps, label, found.assumptions, [found.what_ran])
    if engine or profile:
        raise UsageError("replay: --engine and --profile are for decision logs")
    acceptance = acceptance or "chat"
    stage, usable = _stage(Path(file), acceptance, steps or USUAL_STEPS, lag or USUAL_LAG_STEPS, seed)
    return Played(file, stage, usable, acceptance, "what would have been accepted is not recorded", [])


def _stage(
    file: Path, acceptance: str, steps: int | Literal["all"], lag: int, seed: int
) -> tuple[Stage, int]:
    """The stage of a recording, and how many usable steps that has."""
    from specgov.controller.cli.counterfactual import make_stage
    from specgov.controller.cli.recorded_costs import read_costs
    from specgov.policies.types import EngineSpec

    costs = read_costs(file)
    probabilities = acceptance_by_position(acceptance, costs.tiers[-1])
    largest = int(costs.visits.batch_sizes.max())
    engine = EngineSpec(costs.tiers, max_running_requests=largest, decision_lag_steps=lag)
    usable = len(costs.visits.batch_sizes)
    visits = costs.visits.scaled(usable if steps == "all" else steps)
    return make_stage(visits, engine, costs.step_time, probabilities, costs.noise_sigma, seed), usable


def acceptance_by_position(text: str, positions: int) -> Floats:
    """P(draft i accepted | those before it were), shape (positions,), of a named class or as stated.

    Beyond the last stated position its value is held.

    Raises:
        UsageError: neither a class nor probabilities.

    """
    from specgov.env.acceptance_classes import CLASSES

    if text in CLASSES:
        survival = np.exp(-CLASSES[text].hazard(positions))
        before = np.concatenate([[1.0], survival[:-1]])
        conditional: Floats = np.divide(survival, before, out=np.zeros(positions), where=before > 0)
        return conditional
    if text[:1].isalpha():
        raise UsageError(f"--acceptance: there is no class {text!r}; there are {', '.join(CLASSES)}")
    stated = options.numbers("--acceptance", text, float)
    if any(not 0 <= probability <= 1 for probability in stated):
        raise UsageError(f"--acceptance takes probabilities from 0 to 1, not {text!r}")
    return np.asarray((stated + stated[-1:] * positions)[:positions])


def _play_all(stage: Stage, policies: Sequence[str]) -> list[Outcome]:
    from specgov.controller.cli.counterfactual import play, play_oracle
    from specgov.policies.registry import policy_names
    from specgov.policies.types import PolicyError

    chosen = policies or [
        *(f"static:{tier}" for tier in stage.tiers),
        *(name for name in policy_names() if name != "static"),
    ]
    outcomes = []
    with output.progress() as progress:
        task = progress.add_task("", total=len(chosen) * len(stage.depths))
        for policy in chosen:
            progress.update(task, description=policy)
            try:
                outcomes.append(play(stage, policy, lambda steps: progress.advance(task, steps)))
            except PolicyError as error:
                raise UsageError(f"replay: {error}") from error
    return [*outcomes, play_oracle(stage)]


def _as_json(played: Played) -> dict[str, Any]:
    from specgov.controller.cli.counterfactual import run_batch_sizes

    stage = played.stage
    return {
        "recording": played.file,
        "counterfactual": True,
        "acceptance": played.acceptance,
        "assumptions": played.assumptions,
        "steps": len(stage.depths),
        "usable_steps": played.usable_steps,
        "decision_lag_steps": stage.engine.decision_lag_steps,
        "seed": stage.seed,
        "tiers": list(stage.tiers),
        "batch_sizes": run_batch_sizes(stage),
        "policies": [
            {
                "policy": outcome.policy,
                "switches": outcome.switches,
                "tier_shares": outcome.tier_shares(len(stage.tiers)).tolist(),
                "output_tokens_per_s": outcome.output_tokens_per_s,
                "output_tokens_per_s_by_batch_size": outcome.run_tokens_per_s.tolist(),
            }
            for outcome in played.outcomes
        ],
    }


def _print(played: Played) -> None:
    stage, outcomes = played.stage, played.outcomes
    console = output.console()
    console.print(
        f"{Path(played.file).name}: its step costs with acceptance {played.acceptance}. Counterfactual: "
        f"{played.assumptions}. Decision lag {stage.engine.decision_lag_steps} steps, seed {stage.seed}.",
        soft_wrap=True,
    )
    if said := _other_steps(len(stage.depths), played.usable_steps):
        console.print(said, soft_wrap=True)
    console.print(_summary_table(stage, outcomes))
    console.print("Expected output rate by batch size, in % of the oracle's:")
    console.print(_batch_table(stage, outcomes))


def _other_steps(played: int, usable: int) -> str:
    """What a user must know where not each step of the file was played once; else nothing."""
    if played < usable:
        return (
            f"Played {played} of its {usable} usable steps: {usable - played} are left out, evenly, so that "
            "a rule has fewer steps to learn from. --steps all plays every one."
        )
    return f"Played {played} steps: its {usable} usable ones, repeated evenly." if played > usable else ""


def _summary_table(stage: Stage, outcomes: Sequence[Outcome]) -> Table:
    best = outcomes[-1].output_tokens_per_s
    rows = [
        (
            outcome.policy,
            len(outcome.tier_index),
            outcome.switches,
            *(f"{100 * share:.0f} %" for share in outcome.tier_shares(len(stage.tiers))),
            f"{outcome.output_tokens_per_s:.0f}",
            f"{100 * outcome.output_tokens_per_s / best:.1f} %",
        )
        for outcome in outcomes
    ]
    shares = [f"k={tier}" for tier in stage.tiers]
    return output.table(("policy", "decisions", "switches", *shares, "tokens/s", "of oracle"), rows)


def _batch_table(stage: Stage, outcomes: Sequence[Outcome]) -> Table:
    from specgov.controller.cli.counterfactual import run_batch_sizes

    oracle = outcomes[-1].run_tokens_per_s
    rows: list[tuple[object, ...]] = [
        (outcome.policy, *(f"{100 * rate:.0f}" for rate in outcome.run_tokens_per_s / oracle))
        for outcome in outcomes[:-1]
    ]
    rows.append(("oracle, tokens/s", *(f"{rate:.0f}" for rate in oracle)))
    columns = ("batch size", *map(str, run_batch_sizes(stage)))
    return output.table(columns, rows)
