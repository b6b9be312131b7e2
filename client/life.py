"""The newest decision, and how long the engine may apply it: the same rules for every kind of client."""

from __future__ import annotations

from typing import TypeAlias

from specgov.client.messages import Decision
from specgov.proto.v1 import specgov_pb2 as pb

_SHADOW = pb.REASON_SHADOW


Held: TypeAlias = tuple[Decision | None, int, float, float]
"""The newest decision and until when the engine may apply it: the last step that it may apply to (-1 = none),
its time to live in seconds, and ``DecisionLife.active_s`` when it came."""

NOTHING_HELD: Held = (None, -1, 0.0, 0.0)


class DecisionLife:
    """Holds the newest decision and ages it.

    A decision's time to live in steps counts from the step that it knew; the one in time counts from report
    to report since it came, except up to a report after idleness or the first after a pause. ``hold`` may be
    called on another thread than the rest: ``held`` and ``active_s`` have one writer each.
    """

    __slots__ = ("_gap", "_last_report_s", "active_s", "held")

    def __init__(self) -> None:
        self.held = NOTHING_HELD  # a plain tuple: it is made at each step
        self.active_s = 0.0  # time in which steps were being made, up to the last report
        self._gap = True  # the time since the last report is not time in which steps were made
        self._last_report_s = 0.0

    def reported(self, now_s: float, after_idle: bool) -> None:
        """Note that a step's result was reported at ``now_s``."""
        if self._gap or after_idle:
            self._gap = False
        else:
            self.active_s += now_s - self._last_report_s
        self._last_report_s = now_s

    def pause(self) -> None:
        """Leave out the time up to the next report."""
        self._gap = True

    def hold(self, decision: Decision, max_ttl_steps: int, max_ttl_s: float) -> None:
        """Make ``decision`` the newest; its life is cut to the two limits."""
        _, known_step_id, _, _, _, _, ttl_steps, ttl_ms, reason, _, _, _, _ = decision
        ttl_s = ttl_ms / 1000.0
        if reason == _SHADOW or not ttl_steps or not ttl_ms:
            last_step_id = -1
        else:
            last_step_id = known_step_id + (ttl_steps if ttl_steps < max_ttl_steps else max_ttl_steps)
        self.held = decision, last_step_id, ttl_s if ttl_s < max_ttl_s else max_ttl_s, self.active_s

    def newest(self) -> Decision | None:
        """The decision that came last, whatever its age and reason."""
        return self.held[0]

    def current(self, step_id: int, now_s: float) -> Decision | None:
        """The newest decision if it may be applied to step ``step_id`` at ``now_s``."""
        decision, last_step_id, ttl_s, active_s = self.held
        if step_id > last_step_id or decision is None:
            return None
        if self.active_s - active_s > ttl_s and now_s - decision.received_s > ttl_s:
            return None
        return decision
