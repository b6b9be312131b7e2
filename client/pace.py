"""When a relay looks for its engine's next packet without being woken."""

from __future__ import annotations

from typing import final

LOOKS_FOR_S = 0.05
"""Since the last packet; later the engine wakes the relay."""
LONGEST_PAUSE_S, SHORTEST_PAUSE_S = 1e-3, 100e-6

_NOT_BEFORE = 0.75
_LOOKS_A_STEP = 16


@final
class Pace:
    """Lets three quarters of a step pass, then looks every sixteenth: five looks a step, each of some µs.

    A report then waits for a thirty-second of a step, as a rule. What a step takes is the shorter of the last
    two, so that one with a prefill in it delays no decision.

    Times are in seconds, of one clock.
    """

    __slots__ = ("_last_s", "_last_step_s", "_step_s")

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._step_s = self._last_step_s = LONGEST_PAUSE_S

    def came(self, now_s: float) -> None:
        """Note that there were packets."""
        step_s = now_s - self._last_s
        self._step_s = min(step_s, self._last_step_s)
        self._last_s, self._last_step_s = now_s, step_s

    def looks(self, now_s: float) -> bool:
        """Whether to look again without being woken.

        For a few pauses longer than the engine is told: that reads the time after it wrote a packet, and can
        rely on a look that comes after that.
        """
        return now_s < self._last_s + LOOKS_FOR_S + 2 * LONGEST_PAUSE_S

    def pause_s(self, now_s: float) -> float:
        """How long to wait before the next look."""
        due_s = self._last_s + _NOT_BEFORE * min(self._step_s, LOOKS_FOR_S)
        return max(due_s - now_s, min(max(self._step_s / _LOOKS_A_STEP, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
