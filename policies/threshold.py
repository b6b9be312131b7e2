"""Speculate below a batch size, and not at or above it.

Formula: num_steps = K if batch size < B else 0.
Source: the option that engines offered first, such as vLLM's ``speculative_disable_by_batch_size``.
Regimes: right where acceptance is stable and B was found by benchmarking this very model, draft and GPU.
Blind to acceptance, so it keeps a useless draft on, and to context length.
Defaults: B = 32, a middling value with no measurement behind it; K is the engine's largest tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from specgov.policies.tiers import require_tiers, tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, StepObservation


@final
class Threshold:
    """num_steps K below batch size B, 0 at and above it: threshold:B:K."""

    name: ClassVar[str] = "threshold"
    version: ClassVar[str] = "1"

    @dataclass(frozen=True, slots=True)
    class Config:
        """``batch_size``: the first without speculation; ``num_steps``: the tier below, None the largest."""

        batch_size: int = 32
        num_steps: int | None = None

        def __post_init__(self) -> None:
            if self.batch_size < 1:
                raise PolicyError(f"batch_size must be 1 or more, not {self.batch_size}")
            if self.num_steps is not None and self.num_steps < 0:
                raise PolicyError(f"num_steps must be 0 or more, not {self.num_steps}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        engine = context.engine
        num_steps = engine.tiers[-1] if config.num_steps is None else config.num_steps
        require_tiers(engine, [0, num_steps])
        starts = [(1, num_steps), (config.batch_size, 0)]
        self._choice = Choice(tier_ranges(engine, starts), propensity=1.0)

    def observe(self, step: StepObservation) -> None:
        """Nothing is learnt."""

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002 the protocol's signature
        """The two ranges; one where B is 1 or above the engine's largest batch size."""
        return self._choice

    def forget(self) -> None:
        """There is nothing to forget."""

    def estimates(self) -> dict[str, float]:
        """None."""
        return {}
