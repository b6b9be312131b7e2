"""Why the guard steps in; the values are the wire protocol's."""

from __future__ import annotations

import enum

from specgov.policies.types import Reason


class GuardCause(enum.IntEnum):
    """Why a decision is not the policy's own; NONE where it is."""

    NONE = 0
    IMPOSSIBLE_REPORT = 1
    STEP_TIME = 2
    ZERO_ACCEPTANCE = 3
    REPORTS_STOPPED = 4
    CLOCK_STEPPED = 5
    STALE = 6
    OUTPUT_RATE = 7
    THRASHING = 8
    BUDGET = 9
    LATENCY = 10
    POLICY_FAILED = 11

    @property
    def word(self) -> str:
        """As it stands in logs and in a metric's label."""
        return self.name.lower()

    @property
    def is_alarm(self) -> bool:
        """Whether it says that the engine's signals are broken, so that nothing may be learnt from them."""
        return GuardCause.IMPOSSIBLE_REPORT <= self <= GuardCause.CLOCK_STEPPED

    @property
    def stands(self) -> bool:
        """Whether it lasts for some time, in which the policy is not asked."""
        return self.is_alarm or self in (GuardCause.STALE, GuardCause.OUTPUT_RATE)

    @property
    def reason(self) -> Reason:
        """What the decision gives as its reason: a choice that was refused, or a policy not even asked."""
        return Reason.GUARD if self in _REFUSALS else Reason.FALLBACK


_REFUSALS = (GuardCause.THRASHING, GuardCause.BUDGET, GuardCause.LATENCY)
