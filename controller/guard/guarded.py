"""A policy and its guard as one rule, for simulations: what a sidecar with the guard on decides."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.guard import Guard
from specgov.policies.types import BatchView, Choice, Policy, StepObservation


@final
class Guarded:
    """Decides as the policy does behind the guard, every step having followed one of its decisions.

    Attributes: guard: what it did. cause: why the newest choice is not the policy's own.

    """

    def __init__(self, policy: Policy, guard: Guard) -> None:
        self.name = policy.name
        self.version = policy.version
        self.guard = guard
        self.cause = GuardCause.NONE
        self._policy = policy

    def observe(self, step: StepObservation) -> None:
        """Learn from a step, where the guard admits it."""
        if self.guard.admit(step, followed=True, reports_dropped=0):
            self._policy.observe(step)

    def choose(self, batch: BatchView) -> Choice:
        """The policy's choice, or what the guard sends in its place."""
        choice, self.cause = self.guard.decide(self._policy, batch)
        return replace(choice, reason=self.cause.reason) if self.cause else choice

    def forget(self) -> None:
        """The weights changed."""
        self.guard.draft_changed()
        self._policy.forget()

    def estimates(self) -> dict[str, float]:
        """The policy's."""
        return self._policy.estimates()
