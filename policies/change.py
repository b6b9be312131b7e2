"""Change detection: has a stream of standardised innovations left mean zero?

Two-sided CUSUM (Page, "Continuous inspection schemes", Biometrika 1954): with innovations ``z`` of mean 0 and
variance 1, ``up <- max(0, up + z - drift)`` and ``down <- max(0, down - z - drift)``; an alarm when either
passes ``threshold``, and both restart at zero. ``drift`` is half of the shift (in standard deviations) that
should be found fastest.

The threshold follows from the wished mean number of steps between false alarms, through Siegmund's
approximation for one side ("Sequential Analysis", 1985): ``ARL = (exp(2 d x) - 2 d x - 1) / (2 d^2)`` with
``x = threshold + 1.166``; two sides halve it. It holds for independent normal innovations; each is clipped,
so that one stall or one odd step cannot raise an alarm alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specgov.policies.learnt import Learnt


@dataclass(frozen=True, slots=True)
class ChangeConfig:
    """Parameters of the detector.

    ``false_alarm_steps``: mean steps between false alarms when nothing changes. ``drift``: half of the shift
    to find, in standard deviations. ``clip``: largest size of one innovation.
    """

    false_alarm_steps: float = 50_000.0
    drift: float = 0.5
    clip: float = 4.0

    def __post_init__(self) -> None:
        if not (self.false_alarm_steps >= 10 and self.drift > 0 and self.clip > self.drift):
            raise ValueError(
                f"change detection needs false_alarm_steps >= 10, drift > 0 and clip > drift, got {self}"
            )

    @property
    def threshold(self) -> float:
        """The alarm's threshold that gives ``false_alarm_steps``."""
        low, high = 0.0, 200.0 / self.drift
        for _ in range(80):
            middle = (low + high) / 2
            if _one_sided_run_length(middle, self.drift) / 2 < self.false_alarm_steps:
                low = middle
            else:
                high = middle
        return high


class ChangeDetector(Learnt):
    """A two-sided CUSUM over standardised innovations."""

    alarms: int
    _up: float
    _down: float

    def __init__(self, config: ChangeConfig | None = None) -> None:
        self._config = config or ChangeConfig()
        self._threshold = self._config.threshold
        self._up = 0.0
        self._down = 0.0
        self.alarms = 0

    def update(self, innovation: float) -> bool:
        """Take one innovation in; True when a change is found. One that is not finite is left out."""
        if not math.isfinite(innovation):
            return False
        clip, drift = self._config.clip, self._config.drift
        z = min(max(innovation, -clip), clip)
        up, down = self._up + z - drift, self._down - z - drift
        self._up, self._down = max(0.0, up), max(0.0, down)
        if up <= self._threshold and down <= self._threshold:
            return False
        self.alarms += 1
        self.restart()
        return True

    @property
    def suspicion(self) -> float:
        """How near an alarm is, 0 to 1."""
        return min(max(self._up, self._down) / self._threshold, 1.0)

    def restart(self) -> None:
        """Drop what has been summed so far."""
        self._up = self._down = 0.0


def _one_sided_run_length(threshold: float, drift: float) -> float:
    x = 2 * drift * (threshold + 1.166)
    return (math.exp(min(x, 700.0)) - x - 1) / (2 * drift**2)
