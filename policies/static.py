"""The same tier at every step.

Formula: num_steps = K.
Source: what an engine does whose speculation is fixed at start-up.
Regimes: right where the batch size and the acceptance hardly change; the yardstick for every other rule.
Defaults: K is the engine's largest tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from specgov.policies.tiers import require_tiers, tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, StepObservation


@final
class Static:
    """Always the same num_steps: static:K."""

    name: ClassVar[str] = "static"
    version: ClassVar[str] = "1"

    @dataclass(frozen=True, slots=True)
    class Config:
        """``num_steps``: the tier; None is the engine's largest."""

        num_steps: int | None = None

        def __post_init__(self) -> None:
            if self.num_steps is not None and self.num_steps < 0:
                raise PolicyError(f"num_steps must be 0 or more, not {self.num_steps}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        engine = context.engine
        num_steps = engine.tiers[-1] if config.num_steps is None else config.num_steps
        require_tiers(engine, [num_steps])
        self._choice = Choice(tier_ranges(engine, [(1, num_steps)]), propensity=1.0)

    def observe(self, step: StepObservation) -> None:
        """Nothing is learnt."""

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002 the protocol's signature
        """The one tier."""
        return self._choice

    def forget(self) -> None:
        """There is nothing to forget."""

    def estimates(self) -> dict[str, float]:
        """None."""
        return {}
