"""The stage of ``specgov replay`` from a decision log: its batches, contexts, acceptance and step costs.

What it assumes:

- The batches and contexts are those of the log whatever the rule does: no rule gets through a queue faster.
- A draft is accepted with the probability seen around its step at its position (``report.model``), the same
  for every request of the step; requests are not told apart, since the log does not.
- A position that was never drafted is accepted as often as the deepest one that was.
- Step times are calibrated from the log where it has enough settled steps of tier 0 and another, else those
  of the engine's profile.
- The load comes by the clock: each range of batch sizes has the time that the server did spend in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specgov.controller.cli.counterfactual import Outcome, Stage, Visits, make_stage, outcome
from specgov.controller.cli.errors import CliError
from specgov.controller.cli.report import step_time_of
from specgov.controller.report.model import windowed_acceptance
from specgov.controller.report.steps import LogContentError, Steps, gather
from specgov.env.calibration import CalibrationError, calibrate
from specgov.env.logged_rows import read_rows
from specgov.env.logged_steps import read_decision_log
from specgov.policies.types import EngineSpec, StepTime

MOST_STEPS = 5000
LEAST_LIKELY, MOST_LIKELY = 0.1587, 0.8413
"""The middle 68 %: a standard deviation to each side."""
WHAT_RAN = "what ran"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LoggedStage:
    """The stage, what the log's own tiers would bring on it, and what it rests on, in words.

    ``usable_steps``: how many the log has of the engine with its tiers; the stage may have fewer, or more.
    """

    stage: Stage
    usable_steps: int
    what_ran: Outcome
    assumptions: str


def logged_stage(
    path: str,
    engine: str,
    profile: str,
    steps: int | Literal["all"] | None,
    lag: int | None,
    seed: int,
    acceptance: Callable[[int], Floats] | None = None,
) -> LoggedStage:
    """Make a stage of a log.

    Args:
        path: the log.
        engine: which of its engines; empty where there is one.
        profile: step times to use; empty: the log's, else the engine's profile's.
        steps: how many to play, left out or repeated evenly; None: all, but no more than ``MOST_STEPS``.
        lag: decision lag in steps; None: as in the log.
        seed: of all that chance decides.
        acceptance: by position for a number of positions, instead of the log's.

    Raises:
        CliError: the log cannot be used; the message says why.
        RecordingError: it cannot be read.

    """
    logged, with_other_tiers = _one_engine(path, engine)
    step_time, source = _step_time(path, logged, profile)
    deepest, beyond = logged.tiers[-1], None
    if acceptance is None:
        by_step, beyond = _acceptance(logged)
    else:
        by_step = np.broadcast_to(acceptance(deepest), (len(logged), deepest))
    octaves = np.floor(np.log2(np.maximum(logged.batch_size, 1))).astype(np.int64)
    every = Visits(logged.batch_size, logged.sum_seq_len_tokens, octaves)
    count = _count(steps, len(logged))
    at = np.arange(count) * len(logged) // count
    spec = _spec(logged, lag)
    sigma = _sigma(logged, step_time)
    stage = make_stage(every.scaled(count), spec, step_time, by_step[at], sigma, seed, tells_apart=False)
    ran = logged.tier_index[at]
    stage = replace(stage, spent=stage.expected_ms[np.arange(count), ran])
    said = [f"step times {source}", "the log's batches and contexts whatever a rule does"]
    if acceptance is None:
        said.append("acceptance by position as seen around each step, alike for all its requests")
    if beyond is not None:
        said.append(f"positions beyond {beyond} were never drafted and are taken to be as that one")
    if with_other_tiers:
        tiers = ",".join(map(str, logged.tiers))
        said.append(f"the engine's steps with tiers {tiers} alone, {with_other_tiers} with others left out")
    return LoggedStage(stage, len(logged), outcome(stage, WHAT_RAN, ran), "; ".join(said))


def _count(steps: int | Literal["all"] | None, usable: int) -> int:
    """How many to play."""
    if steps is None:
        return min(usable, MOST_STEPS)
    return usable if steps == "all" else steps


def _one_engine(path: str, engine: str) -> tuple[Steps, int]:
    """The engine's steps, and how many more it made with other tiers."""
    try:
        found = gather(read_rows([path]))
    except LogContentError as error:
        raise CliError(f"replay: {error}") from error
    wanted = [steps for steps in found if engine in ("", steps.name)]
    names = ", ".join(sorted({steps.name for steps in found}))
    if not names:
        raise CliError(f"replay: {path} holds no steps")
    if len({steps.name for steps in wanted}) != 1:
        raise CliError(f"replay: {path} holds the engines {names}: name one with --engine")
    longest = max(wanted, key=len)  # of the same engine with other tiers
    return longest, sum(map(len, wanted)) - len(longest)


def _step_time(path: str, steps: Steps, profile: str) -> tuple[StepTime, str]:
    if not profile:
        try:
            return calibrate([read_decision_log(path)]).step_time, "calibrated from the log"
        except CalibrationError:
            pass  # a log of a rule that kept to a few tiers: the usual case
    step_time, name = step_time_of(steps.engine, profile)
    if step_time is None:
        raise CliError(
            f"replay: {path} has too few settled steps to calibrate step times from, and no profile of its "
            "engine is known: give one with --profile"
        )
    return step_time, f"of the profile {name}"


def _acceptance(steps: Steps) -> tuple[Floats, int | None]:
    """By step and position, (S, P), and the deepest position that was drafted if it is not the last."""
    by_step = windowed_acceptance(steps)
    known = np.flatnonzero(np.isfinite(by_step).all(axis=0))
    if not len(known):
        raise CliError("replay: the log has no step with drafts, so nothing is known of acceptance: state it "
                       "with --acceptance")  # fmt: skip
    deepest = int(known[-1])
    by_step[:, deepest + 1 :] = by_step[:, deepest : deepest + 1]
    return by_step, None if deepest == by_step.shape[1] - 1 else deepest + 1


def _spec(steps: Steps, lag: int | None) -> EngineSpec:
    row = steps.engine
    warm = row.get("draft_kv_stays_warm")
    return EngineSpec(
        tiers=steps.tiers,
        graph_batch_sizes=tuple(row.get("graph_batch_sizes") or ()),
        max_running_requests=int(row.get("max_running_requests") or steps.batch_size.max()),
        decision_lag_steps=int(row.get("decision_lag_steps") or 1) if lag is None else lag,
        draft_kv_stays_warm=True if warm is None else bool(warm),
    )


def _sigma(steps: Steps, step_time: StepTime) -> float:
    """Scatter of the log of single steps' times about what they cost."""
    timed = steps.timed
    if not timed.any():
        return 0.0
    expected = step_time.step_ms(
        steps.batch_size[timed], steps.num_steps[timed], steps.sum_seq_len_tokens[timed]
    )
    low, high = np.quantile(np.log(steps.ms[timed] / expected), [LEAST_LIKELY, MOST_LIKELY])
    return float(high - low) / 2


def is_log(path: str) -> bool:
    """Whether ``path`` is a decision log and not a recording of steps."""
    from specgov.env.logged_rows import is_decision_log

    return is_decision_log(path if "://" in path else Path(path))
