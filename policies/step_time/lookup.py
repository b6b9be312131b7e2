"""Trilinear interpolation over context, batch size and num_steps, prepared so that a call is a lookup."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specgov.policies.step_time.grid import StepTimeError

MAX_NUM_STEPS = 32
"""The largest num_steps that can be asked for."""


class GridLookup:
    """Values on a grid, interpolated linearly.

    Below the first value of an axis the first one holds. Above the last, the last slope goes on where
    ``extrapolate``, else the last value holds.

    Args:
        axes: ascending contexts (C,), batch sizes (B,) and num_steps (K,).
        values: shape (C, B, K).
        padded: the batch size that runs for each batch size from 0 on, shape (largest + 1,).
        extrapolate: what holds above the ends.

    """

    def __init__(
        self,
        axes: tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]],
        values: NDArray[np.float64],
        padded: NDArray[np.int64],
        extrapolate: bool,
    ) -> None:
        contexts, batches, tiers = axes
        by_batch = interpolate(values, batches, padded, 1, extrapolate)
        self._values = interpolate(by_batch, tiers, np.arange(MAX_NUM_STEPS + 1), 2, extrapolate)
        self._contexts = contexts
        self._extrapolate = extrapolate

    def at(
        self,
        mean_context: NDArray[np.float64],
        batch: NDArray[np.int64] | np.int64,
        num_steps: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Values at broadcast points; ``batch`` indexes ``padded``."""
        if len(self._contexts) == 1:
            return np.asarray(self._values[0, batch, num_steps] + np.zeros_like(mean_context))
        low = np.searchsorted(self._contexts[1:-1], mean_context, side="right")
        start, end = self._contexts[low], self._contexts[low + 1]
        share = np.maximum((mean_context - start) / (end - start), 0.0)
        if not self._extrapolate:
            share = np.minimum(share, 1.0)
        at_low = self._values[low, batch, num_steps]
        return np.asarray(at_low + share * (self._values[low + 1, batch, num_steps] - at_low))


def interpolate(
    values: NDArray[np.float64],
    axis_values: NDArray[np.int64],
    wanted: NDArray[np.int64],
    axis: int,
    extrapolate: bool,
) -> NDArray[np.float64]:
    """Linear interpolation of ``values`` along ``axis`` at ``wanted``; the ends as in ``GridLookup``."""
    if len(axis_values) == 1:
        return np.repeat(values, len(wanted), axis=axis)
    low = np.clip(np.searchsorted(axis_values, wanted, side="right") - 1, 0, len(axis_values) - 2)
    share = np.maximum((wanted - axis_values[low]) / (axis_values[low + 1] - axis_values[low]), 0.0)
    if not extrapolate:
        share = np.minimum(share, 1.0)
    shape = [1] * values.ndim
    shape[axis] = len(wanted)
    share = share.reshape(shape)
    return np.asarray(np.take(values, low, axis) * (1 - share) + np.take(values, low + 1, axis) * share)


def checked_num_steps(num_steps: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """``num_steps`` as an array.

    Raises:
        StepTimeError: a value outside 0..32.

    """
    tier = np.asarray(num_steps, dtype=np.int64)
    if tier.size and not 0 <= int(tier.min()) <= int(tier.max()) <= MAX_NUM_STEPS:
        raise StepTimeError(f"num_steps must be in 0..{MAX_NUM_STEPS}, got {tier.min()}..{tier.max()}")
    return tier


class Padding:
    """How an engine pads a batch: up to the next CUDA-graph size, not at all above the largest.

    ``padded`` holds the batch size that runs for each size from 0 to ``largest``.

    Args:
        graph_batch_sizes: ascending; empty means no padding.
        largest: the largest batch size to prepare for, at least; one above it is handled apart.

    Raises:
        StepTimeError: graph sizes that do not ascend from 1 on.

    """

    def __init__(self, graph_batch_sizes: tuple[int, ...], largest: int) -> None:
        sizes = np.asarray(graph_batch_sizes, dtype=np.int64)
        if len(sizes) and (sizes[0] < 1 or (np.diff(sizes) <= 0).any()):
            raise StepTimeError(f"graph batch sizes must ascend from 1 on, got {list(graph_batch_sizes)}")
        self.largest_graph = int(sizes[-1]) if len(sizes) else 0
        self.largest = max(self.largest_graph, largest)
        self.padded = np.maximum(np.arange(self.largest + 1), 1)
        graphed = self.padded[: self.largest_graph + 1]
        self.padded[: len(graphed)] = sizes[np.searchsorted(sizes, graphed)] if len(sizes) else graphed

    def split(self, batch_size: NDArray[np.int64] | int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The part of each batch up to the largest prepared size, at least 1, and what is above it."""
        batch = np.maximum(np.asarray(batch_size, dtype=np.int64), 1)
        inside = np.minimum(batch, self.largest)
        return inside, batch - inside

    def running_size(self, batch_size: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """The batch size that runs."""
        inside, over = self.split(batch_size)
        return np.asarray(self.padded[inside] + over)
