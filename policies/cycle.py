"""Each tier for some steps in turn, whatever happens: for measuring what steps cost.

Formula: num_steps = tiers[(step // N) mod number of tiers].
Source: how step times are recorded for a profile; a step counts once its tier has settled.
Regimes: never a rule to serve with. ``specgov sglang profile`` uses it.
Defaults: N = 16 steps, of which the first three or four settle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, Reason, StepObservation


@final
class Cycle:
    """Each tier for N steps in turn: cycle:N."""

    name: ClassVar[str] = "cycle"
    version: ClassVar[str] = "1"

    @dataclass(frozen=True, slots=True)
    class Config:
        """``steps``: how many each tier is kept for."""

        steps: int = 16

        def __post_init__(self) -> None:
            if self.steps < 1:
                raise PolicyError(f"steps must be 1 or more, not {self.steps}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        engine = context.engine
        self._steps = config.steps
        self._choices = tuple(
            Choice(tier_ranges(engine, [(1, tier)]), Reason.EXPLORATION, propensity=1.0)
            for tier in engine.tiers
        )

    def observe(self, step: StepObservation) -> None:
        """Nothing is learnt."""

    def choose(self, batch: BatchView) -> Choice:
        """The tier whose turn it is at the batch's step."""
        return self._choices[batch.step_id // self._steps % len(self._choices)]

    def forget(self) -> None:
        """There is nothing to forget."""

    def estimates(self) -> dict[str, float]:
        """None."""
        return {}
