"""What a model expects of every tier at every step: the rule's own estimates, else a profile's and the log's.

The rule's own were written before the step and are taken as they are. Otherwise step times are a profile's,
and acceptance is that of the stretch of ``WINDOW_STEPS`` steps around the step, by position, pooled over
requests and drawn a little towards the whole log's. A position that was never drafted is not known, and so
are the tiers that reach it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specgov.controller.report.steps import Steps
from specgov.policies.model import expected_accept_length
from specgov.policies.types import StepTime

Floats = NDArray[np.float64]

WINDOW_STEPS = 512
PRIOR_DRAFTS = 50.0
"""How many drafts the whole log's acceptance is worth within a stretch."""
LEAST_SHARE = 0.5
"""The rule's own estimates are used where at least so many steps have them."""
_CHUNK_STEPS = 65_536


@dataclass(frozen=True)
class Model:
    """Expected output tokens and duration, (S, T), NaN where not known; ``source`` says whose in words."""

    tokens: Floats
    ms: Floats
    source: str

    @cached_property
    def rate(self) -> Floats:
        """Tokens per second, (S, T)."""
        return 1000.0 * self.tokens / self.ms

    @cached_property
    def best(self) -> Floats:
        """The largest rate that any tier promises, (S,); NaN where no tier is known."""
        rate = self.rate
        known = np.isfinite(rate).any(axis=1)
        return np.where(known, np.max(np.where(np.isfinite(rate), rate, -np.inf), axis=1), np.nan)


def model_of(steps: Steps, step_time: StepTime | None, profile_name: str = "") -> Model | None:
    """The model for an engine's steps; None where there is neither estimate nor profile."""
    own = np.isfinite(steps.expected_ms).any(axis=1)
    if own.mean() >= LEAST_SHARE:
        return Model(steps.expected_tokens, steps.expected_ms, "the policy's own estimates before each step")
    if step_time is None:
        return None
    ms = np.empty(steps.expected_ms.shape)
    tiers = np.array(steps.tiers)[None, :]
    for start in range(0, len(steps), _CHUNK_STEPS):
        part = slice(start, start + _CHUNK_STEPS)
        batch, context_tokens = steps.batch_size[part, None], steps.sum_seq_len_tokens[part, None]
        ms[part] = step_time.step_ms(batch, tiers, context_tokens)
    tokens = steps.batch_size[:, None] * accept_lengths(steps)[:, list(steps.tiers)]
    return Model(tokens, ms, f"profile {profile_name}, and the acceptance seen around each step")


def spent_ms(steps: Steps, model: Model | None) -> Floats:
    """The steps' times, (S,): measured where valid, else as the model expects them at the tier that ran.

    At large batches hardly a step has a valid time, since requests join at each: without the model's those
    batches would count too little. NaN where neither is known.
    """
    if model is None:
        return steps.ms
    return np.where(steps.timed, steps.ms, model.ms[np.arange(len(steps)), steps.tier_index])


def conditional_acceptance(steps: Steps) -> tuple[Floats, NDArray[np.int64]]:
    """P(draft accepted | those before it were) by position, and how many drafts that rests on, (P,) each."""
    at_risk, accepted = _counts(steps)
    drafts = at_risk.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return accepted.sum(axis=0) / drafts, drafts


def windowed_acceptance(steps: Steps) -> Floats:
    """P(draft accepted | those before it were) by position around each step, (S, P); NaN if never drafted."""
    overall, _ = conditional_acceptance(steps)
    starts = np.arange(0, len(steps), WINDOW_STEPS)
    at_risk, accepted = (np.add.reduceat(counts, starts, axis=0) for counts in _counts(steps))
    pooled = (accepted + PRIOR_DRAFTS * overall) / (at_risk + PRIOR_DRAFTS)
    return np.repeat(pooled, WINDOW_STEPS, axis=0)[: len(steps)]


def accept_lengths(steps: Steps) -> Floats:
    """Expected accept length at every num_steps 0..P around each step, (S, P + 1); NaN where not known."""
    return expected_accept_length(windowed_acceptance(steps))


def _counts(steps: Steps) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Drafts verified whose predecessors were accepted, and those of them that were accepted, (S, P)."""
    survived = steps.survived.astype(np.int64)
    drafted = np.arange(1, survived.shape[1])[None, :] <= steps.num_steps[:, None]
    return survived[:, :-1] * drafted, survived[:, 1:] * drafted
