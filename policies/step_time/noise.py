"""How steps scatter around their expected duration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepNoise:
    """A lognormal body, fitted, and rare stalls, assumed.

    A step lasts ``expected * exp(sigma * z)`` with z standard normal, so that the median is kept; with
    ``stall_probability`` it lasts ``stall_ms`` longer (a pause of the host, another tenant, a garbage
    collection). Recordings of 15 to 29 steps a cell show no tail, so the two stall figures are assumptions,
    not measurements.
    """

    sigma: float
    stall_probability: float = 0.0005
    stall_ms: float = 50.0

    def apply(
        self, step_ms: NDArray[np.float64], normal: NDArray[np.float64], uniform: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Noisy durations from expected ones; ``normal`` and ``uniform`` (0..1) are draws of that shape."""
        stalls = np.where(uniform < self.stall_probability, self.stall_ms, 0.0)
        return np.asarray(step_ms * np.exp(self.sigma * normal) + stalls)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """What prefill between decode steps costs: ``fixed_ms`` a chunk and ``ms_per_token`` a prompt token."""

    fixed_ms: float
    ms_per_token: float

    def prefill_ms(self, tokens: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """Duration of one prefill chunk of ``tokens`` prompt tokens; nothing for none."""
        count = np.asarray(tokens, dtype=np.float64)
        return np.where(count > 0, self.fixed_ms + self.ms_per_token * count, 0.0)
