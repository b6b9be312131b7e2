"""Fallback where the output rate stays below what the baseline is estimated to bring.

Over a window of timed steps: the tokens that the baseline would have brought in their place
(``comparison.py``), less the tokens that they brought. It trips where that is more than ``margin`` of what
the baseline would bring over the whole window, and more than ``DEVIATIONS`` standard deviations of chance, as
the steps themselves scatter, and what is not known of the two tiers together. This is asked ``LOOKS`` times a
window: what is short already is not watched to its end. The first quarter window of a policy is left to it,
and to the estimates, to learn in. After a trip the baseline decides for a while (``backoff.py``), learning
goes on, and the policy gets another try.
"""

from __future__ import annotations

import math

from specgov.controller.guard.backoff import Backoff

DEVIATIONS = 5.0
"""A false alarm in millions of looks, were steps independent; they are not quite."""
DOUBTS = 2.0
"""Standard deviations of what the estimate may be off."""
LOOKS = 8


class OutputRate:
    """Judges windows of ``window_steps`` steps; ``backoff`` says when the policy may try again."""

    def __init__(self, window_steps: int, margin: float, backoff: Backoff) -> None:
        self.backoff = backoff
        self._window_steps = window_steps
        self._look_steps = window_steps // LOOKS
        self._margin = margin
        self.begin_anew()

    def begin_anew(self) -> None:
        """Another policy: no failures, and some steps to learn in."""
        self.backoff.reset()
        self._unjudged_steps = self._window_steps // 4
        self._restart()

    def measure(self, output_tokens: float, baseline_tokens: float, doubt_tokens: float = 0.0) -> bool:
        """Take a policy's timed step in; True if it trips.

        Args:
            output_tokens: what the step brought.
            baseline_tokens: what the baseline would have brought in the step's time, by estimate.
            doubt_tokens: standard deviation of that estimate; those of a window are wrong together.

        """
        if self._unjudged_steps:
            self._unjudged_steps -= 1
            return False
        short = baseline_tokens - output_tokens
        self._steps += 1
        self._baseline_tokens += baseline_tokens
        self._short += short
        self._short_squared += short * short
        self._doubt_tokens += doubt_tokens
        if self._steps % self._look_steps == 0 and self._is_short():
            self._restart()
            self.backoff.fail()
            return True
        if self._steps >= self._window_steps:
            self._restart()
            self.backoff.succeed()
        return False

    def _is_short(self) -> bool:
        whole_window = self._baseline_tokens * self._window_steps / self._steps
        if self._short <= self._margin * whole_window:
            return False
        chance = math.sqrt(max(self._short_squared - self._short**2 / self._steps, 0.0))
        return self._short > DEVIATIONS * chance + DOUBTS * self._doubt_tokens

    def _restart(self) -> None:
        self._steps = 0
        self._baseline_tokens = self._short = self._short_squared = self._doubt_tokens = 0.0
