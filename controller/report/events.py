"""What people should know of a log: when the guard or a fallback held, what was lost, what was changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALARMS = frozenset({"impossible_report", "step_time", "zero_acceptance", "reports_stopped", "clock_stepped"})
MERGED_WITHIN_S = 5.0
"""What happens again so soon is one event."""
CANARY_MERGED_WITHIN_S = 300.0
"""A canary's blocks come and go by chance; together they are one."""
MOST_EVENTS = 2000

CAUSES = {
    "impossible_report": "a report told of something that cannot have happened",
    "step_time": "step times of nothing, or that jump",
    "zero_acceptance": "not one draft accepted over many requests",
    "reports_stopped": "steps that were not reported",
    "clock_stepped": "the sidecar's clock went back",
    "stale": "the newest report was too old to decide on",
    "output_rate": "the output rate fell short of the baseline's estimate",
    "thrashing": "too many switches of tier",
    "budget": "the estimated loss against the baseline used up its allowance",
    "latency": "the tier would have broken a latency target",
    "policy_failed": "the policy failed and was set aside",
}


@dataclass
class Event:
    """Something from ``start_s`` to ``end_s`` (wall clock) over ``steps`` steps; 0 where none counts.

    ``kind`` is one of alarm, guard, fallback, own rule, lost, canary, stream, change.
    """

    kind: str
    text: str
    start_s: float
    end_s: float
    steps: int = 0


class EventLog:
    """Gathers events of one engine; what recurs at once is one, those beyond ``MOST_EVENTS`` are counted."""

    def __init__(self) -> None:
        self.left_out = 0
        self._events: list[Event] = []
        self._open: dict[tuple[str, str], Event] = {}
        self._mode = ""
        self._policy = ""

    def all(self) -> tuple[Event, ...]:
        """All that are kept, by their start."""
        return tuple(sorted(self._events, key=lambda event: event.start_s))

    def stream(self, row: dict[str, Any], again: bool) -> None:
        """A stream began; ``again`` where the log has one of this engine before it."""
        what = "the engine connected again" if again else "the engine connected"
        self._add("stream", f"{what}, policy {row['policy']}", row["time_s"], 0)

    def step(self, row: dict[str, Any], followed: dict[str, Any] | None) -> None:
        """A step, and the decision that it followed where that is known."""
        at_s = row["time_s"]
        if row["reports_dropped"]:
            self._add(
                "lost",
                "reports that were dropped or left out",
                at_s,
                row["reports_dropped"],
            )
        if row["followed_decision_id"] == 0 and row["mode"] in ("active", "frozen"):
            self._add("own rule", "steps by the engine's own rule, for want of a fresh decision", at_s, 1)
        if followed is None:
            return
        if followed.get("by_candidate"):
            self._add("canary", f"steps by the canary's candidate, {followed['policy']}", at_s, 1)
        cause = followed.get("guard_cause")
        if cause is not None:
            kind = "alarm" if cause in ALARMS else "guard"
            self._add(kind, f"{cause}: {CAUSES.get(cause, 'the guard stepped in')}", at_s, 1)
        elif followed["reason"] == "fallback":
            self._add("fallback", "the smallest tier or the baseline, instead of the policy", at_s, 1)
        elif followed["reason"] == "guard":
            self._add("guard", "the guard changed the policy's choice", at_s, 1)

    def decision(self, row: dict[str, Any]) -> None:
        """A row's mode and policy, in case they are new."""
        if row["mode"] != self._mode:
            if self._mode:
                self._add("change", f"mode {self._mode} to {row['mode']}", row["time_s"], 0)
            self._mode = row["mode"]
        decision = row["decision"]
        if decision is None or decision.get("by_candidate") or decision["reason"] == "fallback":
            return
        if decision.get("guard_cause") is None and decision["policy"] != self._policy:
            if self._policy:
                self._add("change", f"policy {self._policy} to {decision['policy']}", row["time_s"], 0)
            self._policy = decision["policy"]

    def _add(self, kind: str, text: str, at_s: float, steps: int) -> None:
        event = self._open.get((kind, text))
        within_s = CANARY_MERGED_WITHIN_S if kind == "canary" else MERGED_WITHIN_S
        if event is not None and steps and at_s - event.end_s <= within_s:
            event.end_s = max(at_s, event.end_s)
            event.steps += steps
            return
        if len(self._events) >= MOST_EVENTS:
            self.left_out += 1
            return
        self._open[kind, text] = event = Event(kind, text, at_s, at_s, steps)
        self._events.append(event)
