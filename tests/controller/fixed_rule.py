"""A rule that does what a test says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from specgov.policies.types import BatchView, Choice, Reason, StepObservation, TierRange


@dataclass
class Fixed:
    """A rule that chooses one tier with a stated probability, and counts what it sees."""

    name: ClassVar[str] = "fixed"
    version: ClassVar[str] = "1"

    num_steps: int
    propensity: float | None = 1.0
    observed: int = 0
    forgot: int = 0
    fails: set[str] = field(default_factory=set)

    def observe(self, step: StepObservation) -> None:
        if "observe" in self.fails:
            raise ArithmeticError("seen")
        self.observed += 1

    def choose(self, batch: BatchView) -> Choice:
        if "choose" in self.fails:
            raise ArithmeticError("chosen")
        return Choice((TierRange(1, 64, self.num_steps),), Reason.POLICY, self.propensity)

    def forget(self) -> None:
        if "forget" in self.fails:
            raise ArithmeticError("forgotten")
        self.forgot += 1

    def estimates(self) -> dict[str, float]:
        return {"k": float(self.num_steps)}
