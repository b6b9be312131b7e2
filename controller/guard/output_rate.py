"""Fallback where the measured output rate stays below what the baseline is estimated to bring.

Over a window of timed steps: the tokens that the baseline would have brought in their measured times, less
the tokens that they brought. It trips where that is more than ``margin`` of the former and more than
``DEVIATIONS`` standard deviations of chance, as the steps themselves scatter. The first window of a policy is
left to it to learn in. After a trip the baseline decides for a while (``backoff.py``), learning goes on, and
the policy gets another try.
"""

from __future__ import annotations

import math

from specgov.controller.guard.backoff import Backoff

DEVIATIONS = 4.0
"""A false alarm in some ten thousand windows, were steps independent."""


class OutputRate:
    """Judges windows of ``window_steps`` steps; ``backoff`` says when the policy may try again."""

    def __init__(self, window_steps: int, margin: float, backoff: Backoff) -> None:
        self.backoff = backoff
        self._window_steps = window_steps
        self._margin = margin
        self._still_learning = True
        self._restart()

    def begin_anew(self) -> None:
        """Another policy: no failures, and a window to learn in."""
        self.backoff.reset()
        self._still_learning = True
        self._restart()

    def _restart(self) -> None:
        self._steps = 0
        self._baseline_tokens = self._short = self._short_squared = 0.0

    def measure(self, output_tokens: float, baseline_tokens: float) -> bool:
        """Take a policy's timed step in; True if the window that it completes trips.

        Args:
            output_tokens: what the step brought.
            baseline_tokens: what the baseline would have brought in the step's time, by estimate.

        """
        short = baseline_tokens - output_tokens
        self._steps += 1
        self._baseline_tokens += baseline_tokens
        self._short += short
        self._short_squared += short * short
        if self._steps < self._window_steps:
            return False
        chance = math.sqrt(max(self._short_squared - self._short**2 / self._steps, 0.0))
        trips = self._short > self._margin * self._baseline_tokens and self._short > DEVIATIONS * chance
        trips &= not self._still_learning
        self._still_learning = False
        self._restart()
        if trips:
            self.backoff.fail()
        else:
            self.backoff.succeed()
        return trips
