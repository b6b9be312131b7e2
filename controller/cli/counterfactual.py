"""Decision rules on the step costs of a recording, or on a decision log.

The recording says which batch sizes and contexts were run and what a step costs; what would have been
accepted is stated (``logged_stage.py`` takes both from a decision log). So every figure here is
counterfactual: what a rule would choose and what that would bring if steps cost what the recording says and
drafts were accepted as stated.

A run of the recording (its steps at one batch size) stands for a stretch of time in proportion to its steps,
or in a decision log (whose runs are octaves of batch size) to the time that they took.
Within a run the output rate is its expected tokens over its expected time; over runs it is the mean weighted
by those stretches. The tier with the largest ``E[tok | k] / T(k)`` is then best at each step, whatever is
done at the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specgov.policies.model import expected_accept_length
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, EngineSpec, PolicyContext, StepObservation, StepTime

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Visits:
    """The steps to play, shape (S,): batch size, sum of sequence lengths, the run that each belongs to."""

    batch_sizes: Ints
    sum_seq_len_tokens: Ints
    runs: Ints

    def scaled(self, steps: int) -> Visits:
        """The same pattern in ``steps`` steps: visits repeated or left out evenly."""
        index = np.arange(steps) * len(self.batch_sizes) // steps
        return Visits(self.batch_sizes[index], self.sum_seq_len_tokens[index], self.runs[index])


@dataclass(frozen=True, slots=True)
class Stage:
    """What all rules are played on. Costs and acceptance are the same for each; so are the draws.

    ``expected_tokens`` and ``expected_ms``, shape (S, number of tiers), are the whole batch's; ``noise`` (S,)
    multiplies the duration that rules observe; ``depths``, for each step, is how many drafts of each request
    would be accepted in a row. ``tells_apart``: whether rules see which request is which. ``spent`` (S,) is
    the share of the clock that a step stands for; None: all alike.
    """

    visits: Visits
    engine: EngineSpec
    step_time: StepTime
    expected_tokens: Floats
    expected_ms: Floats
    noise: Floats
    depths: list[NDArray[np.uint8]]
    seed: int
    tells_apart: bool = True
    spent: Floats | None = None

    @property
    def tiers(self) -> tuple[int, ...]:
        """The engine's."""
        return self.engine.tiers


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rule fared; ``tier_index`` (S,) points into the tiers, ``run_tokens_per_s`` is by run."""

    policy: str
    tier_index: Ints
    run_tokens_per_s: Floats
    output_tokens_per_s: float

    @property
    def switches(self) -> int:
        """Steps whose tier differs from that of the step before."""
        return int(np.count_nonzero(np.diff(self.tier_index)))

    def tier_shares(self, n_tiers: int) -> Floats:
        """Share of steps at each tier."""
        return np.bincount(self.tier_index, minlength=n_tiers) / len(self.tier_index)


def make_stage(
    visits: Visits,
    engine: EngineSpec,
    step_time: StepTime,
    acceptance: Floats,
    noise_sigma: float,
    seed: int,
    *,
    tells_apart: bool = True,
) -> Stage:
    """Work out costs and tokens of every tier at every step, and draw what chance decides.

    Args:
        visits: the steps.
        engine: its tiers and decision lag.
        step_time: what a step costs.
        acceptance: P(draft i accepted | those before it were), shape (K,) or (S, K), K at least the largest
            tier.
        noise_sigma: of the lognormal scatter of observed durations.
        seed: of the draws.
        tells_apart: whether rules see which request is which.

    """
    tiers = np.asarray(engine.tiers)
    rng = np.random.default_rng([seed, 0])
    by_step = np.broadcast_to(acceptance[..., : tiers[-1]], (len(visits.batch_sizes), tiers[-1]))
    accept_length = expected_accept_length(by_step)[:, tiers]
    depths = [_depths(rng, int(size), each) for size, each in zip(visits.batch_sizes, by_step, strict=True)]
    return Stage(
        visits,
        engine,
        step_time,
        visits.batch_sizes[:, None] * accept_length,
        step_time.step_ms(visits.batch_sizes[:, None], tiers[None, :], visits.sum_seq_len_tokens[:, None]),
        np.exp(noise_sigma * rng.standard_normal(len(visits.batch_sizes))),
        depths,
        seed,
        tells_apart,
    )


def _depths(rng: np.random.Generator, batch_size: int, acceptance: Floats) -> NDArray[np.uint8]:
    accepted = rng.random((batch_size, len(acceptance))) < acceptance
    return np.asarray(np.logical_and.accumulate(accepted, axis=1).sum(axis=1, dtype=np.uint8))


def play(stage: Stage, policy_text: str, advance: Callable[[int], None] = lambda _: None) -> Outcome:
    """Let a rule decide step after step, with the engine's decision lag.

    Args:
        stage: what to play on.
        policy_text: the rule, as the registry reads it.
        advance: called now and then with the number of steps done since.

    Raises:
        PolicyError: no such rule, or not for this engine.

    """
    now_s = 0.0
    rng = np.random.default_rng([stage.seed, 1])
    context = PolicyContext(stage.engine, rng, lambda: now_s, stage.step_time)
    policy = make_policy(policy_text, context)
    index_of = {tier: index for index, tier in enumerate(stage.tiers)}
    tier_index = np.empty(len(stage.depths), dtype=np.int64)
    lag = max(1, stage.engine.decision_lag_steps)
    choices = deque([policy.choose(_first_view(stage))] * lag, maxlen=lag)
    for step, batch_size in enumerate(stage.visits.batch_sizes):
        num_steps = choices[0].num_steps_for(int(batch_size))
        tier_index[step] = index_of[num_steps]
        seen = _observation(stage, step, num_steps, tier_index[step])
        now_s += (seen.step_ms or 0.0) / 1000.0
        policy.observe(seen)
        choices.append(policy.choose(BatchView.of(seen)))
        if step % 100 == 99:
            advance(100)
    return outcome(stage, policy_text, tier_index)


def play_oracle(stage: Stage) -> Outcome:
    """The tier with the largest expected output rate at every step."""
    return outcome(stage, ORACLE, np.argmax(stage.expected_tokens / stage.expected_ms, axis=1))


def outcome(stage: Stage, policy: str, tier_index: Ints) -> Outcome:
    """What the tiers that were chosen would bring."""
    steps = np.arange(len(tier_index))
    runs, run_of_step = np.unique(stage.visits.runs, return_inverse=True)
    tokens = np.bincount(run_of_step, stage.expected_tokens[steps, tier_index], len(runs))
    ms = np.bincount(run_of_step, stage.expected_ms[steps, tier_index], len(runs))
    rates = 1000.0 * tokens / ms
    weights = np.bincount(run_of_step, stage.spent, len(runs))
    return Outcome(policy, tier_index, rates, float(rates @ weights / weights.sum()))


def run_batch_sizes(stage: Stage) -> list[int]:
    """The smallest batch size of each run, in the order of ``run_tokens_per_s``."""
    sizes, runs = stage.visits.batch_sizes, stage.visits.runs
    return [int(sizes[runs == run].min()) for run in np.unique(runs)]


def _first_view(stage: Stage) -> BatchView:
    return BatchView(int(stage.visits.batch_sizes[0]), int(stage.visits.sum_seq_len_tokens[0]))


def _observation(stage: Stage, step: int, num_steps: int, tier_index: int) -> StepObservation:
    batch_size = int(stage.visits.batch_sizes[step])
    sum_tokens = int(stage.visits.sum_seq_len_tokens[step])
    shown = batch_size if stage.tells_apart else 0
    return StepObservation(
        step_id=step + 1,
        batch_size=batch_size,
        num_steps=num_steps,
        accepted=np.minimum(stage.depths[step], np.uint8(num_steps)),
        slots=np.arange(shown, dtype=np.uint16),
        generations=np.full(shown, stage.visits.runs[step] % 256, dtype=np.uint8),
        sum_seq_len_tokens=sum_tokens,
        max_seq_len_tokens=-(-sum_tokens // batch_size),
        step_ms=float(stage.expected_ms[step, tier_index] * stage.noise[step]),
    )
