"""A step as it was reported, with what its report says beside it."""

from __future__ import annotations

from dataclasses import dataclass

from specgov.policies.types import StepObservation


@dataclass(slots=True)
class Lost:
    """Reports that were shed since the newest one that was taken in, and those that the engine says it
    dropped before these and before such as were rejected."""

    shed: int = 0
    dropped: int = 0


@dataclass(slots=True)
class StepRecord:
    """A step that was reported, with what the report says beside the step itself. Nobody changes one.

    ``lag_steps`` is the number of steps from the newest result that the followed decision knew to this step;
    None where the step followed none that is remembered. Before the step the engine dropped
    ``reports_dropped`` reports and the sidecar shed ``reports_shed``. ``round_trip_ms`` is the engine's own
    measure, None where it had no new one.
    """

    step: StepObservation
    followed_decision_id: int
    lag_steps: int | None
    engine_rule_num_steps: int | None
    reports_dropped: int
    round_trip_ms: float | None = None
    reports_shed: int = 0

    @property
    def reports_lost(self) -> int:
        """Reports that are missing before this one, whoever left them out."""
        return self.reports_dropped + self.reports_shed
