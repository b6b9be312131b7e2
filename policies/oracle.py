"""The tier with the largest true output rate at each step: what no rule that must learn can know.

Formula: k maximises ``E[tok | k] / T(k)`` with the true expectations of the batch that is about to decode.
Source: the decision model of ``model.py``; the greedy step of a fractional objective (Dinkelbach, "On
nonlinear fractional programming", Management Science 1967, is why the long-run optimum weighs a step by
``E[tok] - lambda T`` instead).
Regimes: the per-step optimum, and so the yardstick where a step's choice has no later effect. It looks one
step ahead: where a tier leaves cold drafts, a switch costs time, or faster requests empty the batch sooner, a
rule that plans can beat it.
Defaults: none. It is in no registry, since truth exists in a simulator only: the simulator makes it with a
function that tells. Without decision lag (the engine's ``decision_lag_steps`` of 1) the truth is that of the
very step; with more it is that of the batch formed when the decision was made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, StepObservation

Floats = NDArray[np.float64]

TruthSource: TypeAlias = Callable[[], tuple[Floats, Floats]]
"""Expected output tokens of the whole batch and expected step time in ms, each by tier: shape (tiers,)."""


def best_tiers(tiers: NDArray[Any], expected_tokens: Floats, expected_ms: Floats) -> NDArray[np.int64]:
    """The rate-optimal num_steps of many batches at once, the smaller where two are equal.

    Args:
        tiers: num_steps of each tier, ascending, shape (T,).
        expected_tokens: of the whole batch by tier, shape (..., T).
        expected_ms: of the step, same shape; where it is 0 (an empty batch) the smallest tier is returned.

    Returns:
        shape (...).

    """
    rate = np.divide(expected_tokens, expected_ms, out=np.zeros_like(expected_tokens), where=expected_ms > 0)
    return np.asarray(np.asarray(tiers, np.int64)[np.argmax(rate, axis=-1)])


@final
class Oracle:
    """The tier with the largest true output rate, told by a simulator.

    Args:
        context: the engine.
        truth: asked at every choice.

    """

    name: ClassVar[str] = "oracle"
    version: ClassVar[str] = "1"

    def __init__(self, context: PolicyContext, truth: TruthSource) -> None:
        self._engine = context.engine
        self._tiers = np.asarray(context.engine.tiers)
        self._truth = truth

    def observe(self, step: StepObservation) -> None:
        """There is nothing to learn."""

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002 the truth is of the real batch
        """One tier for every batch size: the best for the batch that the truth speaks of."""
        tokens, ms = self._truth()
        tier = int(best_tiers(self._tiers, tokens, ms))
        return Choice(
            tier_ranges(self._engine, [(1, tier)]), propensity=1.0, expected_tokens=tokens, expected_ms=ms
        )

    def forget(self) -> None:
        """There is nothing to forget."""

    def estimates(self) -> dict[str, float]:
        """None."""
        return {}
