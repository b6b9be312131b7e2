"""No more than so many switches of tier within so many steps, and a tier is kept for some steps.

A rule owns its hysteresis; this refuses only what no sane rule does.
"""

from __future__ import annotations

from collections import deque


class Switching:
    """Counts switches between decisions by the step that they know.

    Args:
        most_switches: allowed within ``window_steps``.
        window_steps: that window.
        dwell_steps: steps from one switch to the next at least.

    """

    def __init__(self, most_switches: int, window_steps: int, dwell_steps: int) -> None:
        self._window_steps = window_steps
        self._dwell_steps = dwell_steps
        self._at: deque[int] = deque(maxlen=most_switches)
        self._tier = -1

    @property
    def tier(self) -> int:
        """The tier of the newest decision; -1 before the first."""
        return self._tier

    def allows(self, num_steps: int, step_id: int) -> bool:
        """Whether the decision that knows the step ``step_id`` may be for ``num_steps``."""
        at = self._at
        if num_steps == self._tier or not at or self._tier < 0:
            return True
        if step_id - at[-1] < self._dwell_steps:
            return False
        return len(at) < (at.maxlen or 0) or step_id - at[0] >= self._window_steps

    def decided(self, num_steps: int, step_id: int) -> None:
        """The decision that knows the step ``step_id`` is for ``num_steps``."""
        if num_steps != self._tier:
            if self._tier >= 0:
                self._at.append(step_id)
            self._tier = num_steps

    def restart(self) -> None:
        """Steps count from the start again, and the next decision is no switch."""
        self._at.clear()
        self._tier = -1
