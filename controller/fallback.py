"""What an engine gets in place of a rule that failed."""

from __future__ import annotations

from typing import ClassVar, final

from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, EngineSpec, Reason, StepObservation


@final
class Fallback:
    """The engine's smallest tier at every step, marked as a fallback.

    That is no speculation on most engines: never fast, but never slow either, whatever the draft is worth.
    """

    name: ClassVar[str] = "fallback"
    version: ClassVar[str] = "1"

    def __init__(self, engine: EngineSpec) -> None:
        ranges = tier_ranges(engine, [(1, engine.tiers[0])])
        self._choice = Choice(ranges, Reason.FALLBACK, propensity=1.0)

    def observe(self, step: StepObservation) -> None:
        """Nothing is learnt."""

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002 the protocol's signature
        """The smallest tier."""
        return self._choice

    def forget(self) -> None:
        """There is nothing to forget."""

    def estimates(self) -> dict[str, float]:
        """None."""
        return {}
