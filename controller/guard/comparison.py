"""What the baseline would have brought in a step's place: like is compared with like.

Tokens. A step at num_steps c shows what any smaller tier b would have brought to the same requests: of a
drafts accepted in a row min(a, b) would have been. For a larger b the step's own tokens are scaled by the
expected ratio E(b) / E(c), so that requests that fare worse than expected fare worse at both.

Time. What makes single steps long (a prefill that the engine runs beside them, a stalled host) is no fault
of their tier and would have met the baseline too. So the step's own time is not held against it. The
baseline's step takes T(b) / T(c) times as long, as expected, times the ratio of what is typical of the two
tiers in batches of that octave: measured over expected step times, as a robust mean that is near their
median. A tier that always takes longer than its policy claims shows there, a stall does not, and neither
does a server on which all tiers are slower than a profile says, once the baseline's was seen. By octave,
since an error that all tiers share may be another at another batch size, and policies take each tier at
batch sizes of its own. For a tier that did not run in an octave, that of the nearest octave counts.
"""

from __future__ import annotations

import math

import numpy as np

from specgov.controller.guard.estimates import Estimates
from specgov.policies.types import StepObservation

_GAIN = 0.25
_LARGEST_MOVE = 0.01
"""How far in log time one step moves the typical ratio at most: to twice the expected time in 70 steps."""


class Comparison:
    """Compares steps of an engine with its tiers ``tiers``; tiers are indices among them."""

    def __init__(self, tiers: tuple[int, ...]) -> None:
        self._tiers = tiers
        self._nothing: list[float | None] = [None] * len(tiers)
        self._log_ratio: dict[int, list[float | None]] = {}
        self._ran = [False] * len(tiers)

    def timed(self, batch_size: int, tier: int, ratio: float) -> None:
        """A step took ``ratio`` times what was expected (stochastic approximation, Huber's gradient)."""
        of_octave = self._log_ratio.get(batch_size.bit_length())
        if of_octave is None:
            of_octave = self._log_ratio[batch_size.bit_length()] = self._nothing.copy()
        typical = of_octave[tier] or 0.0
        move = _GAIN * (math.log(ratio) - typical)
        of_octave[tier] = typical + min(max(move, -_LARGEST_MOVE), _LARGEST_MOVE)
        self._ran[tier] = True

    def baseline_tokens(
        self, step: StepObservation, output_tokens: float, estimates: Estimates, tier: int, baseline: int
    ) -> float:
        """What the baseline's tier, another than ran, would have brought in the time of the step.

        Args:
            step: it has live requests.
            output_tokens: what it brought all its requests, reported or not.
            estimates: for its batch.
            tier: that ran.
            baseline: that is compared.

        """
        would, live = self._tiers[baseline], len(step.accepted)
        if would >= self._tiers[tier]:
            tokens = output_tokens * estimates.tokens[baseline] / estimates.tokens[tier]
        elif would:
            drafts = int(np.add.reduce(np.minimum(step.accepted, would), dtype=np.int64))
            tokens = (drafts + live) * step.batch_size / live
        else:
            tokens = float(step.batch_size)
        octave = step.batch_size.bit_length()
        of_octave = self._log_ratio.get(octave, self._nothing)
        of_tier, of_baseline = of_octave[tier], of_octave[baseline]
        if of_tier is None:
            of_tier = self._nearest(octave, tier)
        if of_baseline is None:
            of_baseline = self._nearest(octave, baseline)
        return tokens * math.exp(of_tier - of_baseline) * estimates.ms[tier] / estimates.ms[baseline]

    def _nearest(self, octave: int, tier: int) -> float:
        """Log of what is typical of a tier in the nearest octave in which it ran."""
        if not self._ran[tier]:
            return 0.0
        ran = [(abs(near - octave), logs[tier]) for near, logs in self._log_ratio.items()]
        return min((away, log) for away, log in ran if log is not None)[1]
