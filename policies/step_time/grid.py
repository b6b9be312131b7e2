"""Step times on a grid of context, batch size and num_steps, with where each value comes from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class StepTimeError(ValueError):
    """Step times cannot be used as given; the message says what is wrong."""


@dataclass(frozen=True, eq=False)
class StepGrid:
    """A full grid of step times; the axes ascend and are distinct.

    ``context_tokens`` (C,) is the mean sequence length of the batch, ``batch_sizes`` (B,) are those that ran
    (padded, where the engine pads), ``num_steps`` (K,) the tiers. ``step_ms`` (C, B, K) never falls along an
    axis. ``count`` (C, B, K) is the number of recorded steps behind a value, 0 where it is extrapolated;
    ``median_ms``, ``p10_ms`` and ``p90_ms`` (C, B, K) are what was recorded, NaN where ``count`` is 0.
    ``step_ms`` differs from ``median_ms`` where the medians had to be smoothed to be monotone.
    """

    context_tokens: NDArray[np.float64]
    batch_sizes: NDArray[np.int64]
    num_steps: NDArray[np.int64]
    step_ms: NDArray[np.float64]
    count: NDArray[np.int64]
    median_ms: NDArray[np.float64]
    p10_ms: NDArray[np.float64]
    p90_ms: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name, least in (("context_tokens", 0), ("batch_sizes", 1), ("num_steps", 0)):
            axis = getattr(self, name)
            if axis.ndim != 1 or not len(axis) or axis[0] < least or (np.diff(axis) <= 0).any():
                raise StepTimeError(
                    f"{name}: expected ascending, distinct values from {least} on, got {axis.tolist()}"
                )
        for name in ("step_ms", "count", "median_ms", "p10_ms", "p90_ms"):
            if getattr(self, name).shape != self.shape:
                raise StepTimeError(
                    f"{name}: shape {getattr(self, name).shape} is not that of the axes, {self.shape}"
                )
        if not (np.isfinite(self.step_ms).all() and (self.step_ms > 0).all()):
            raise StepTimeError("step_ms: every value must be a finite number above 0")
        if (self.count < 0).any():
            raise StepTimeError("count: must not be negative")
        for axis, name in enumerate(("context", "batch size", "num_steps")):
            if (np.diff(self.step_ms, axis=axis) < 0).any():
                raise StepTimeError(f"step_ms falls with growing {name}: smooth the medians first")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Length of the axes: contexts, batch sizes, tiers."""
        return len(self.context_tokens), len(self.batch_sizes), len(self.num_steps)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Where a value was recorded, shape (C, B, K)."""
        return self.count > 0
