"""Step time from measured cells.

Between cells the time is interpolated linearly in batch size, num_steps and mean context, which keeps a monotone grid monotone.
Engines replay a CUDA graph captured for certain batch sizes only and pad a batch up to the next of them, so
the time is a staircase in the batch size: a batch of 65 costs what 96 costs where 64 and 96 were captured.
Attention reads the cache of real requests only, so the mean context is taken over the padded batch: for a given padded
size the time is linear in the sum of sequence lengths.

Beyond the grid, all of it extrapolation: a batch above the largest graph size runs eagerly, unpadded, at the slope of the last two
batch sizes plus ``eager_overhead_ms``; a num_steps above the largest tier and a context above the largest one continue the last slope.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specgov.policies.step_time.grid import StepGrid, StepTimeError

MAX_NUM_STEPS = 32
"""The largest num_steps that a table answers for."""


class TableStepTime:
    """Measured step times, interpolated; implements ``policies.types.StepTime``.

    Args:
        grid: the cells.
        graph_batch_sizes: the sizes that a batch is padded to, ascending; empty means no padding at all.
        eager_overhead_ms: added to a batch above the largest graph size.

    Raises:
        StepTimeError: graph sizes that do not ascend from 1 on.

    """

    def __init__(
        self, grid: StepGrid, graph_batch_sizes: tuple[int, ...] = (), eager_overhead_ms: float = 0.0
    ) -> None:
        sizes = np.asarray(graph_batch_sizes, dtype=np.int64)
        if len(sizes) and (sizes[0] < 1 or (np.diff(sizes) <= 0).any()):
            raise StepTimeError(f"graph batch sizes must ascend from 1 on, got {list(graph_batch_sizes)}")
        self.grid = grid
        self.graph_batch_sizes = tuple(int(size) for size in sizes)
        self.eager_overhead_ms = float(eager_overhead_ms)
        self._largest = int(sizes[-1]) if len(sizes) else int(grid.batch_sizes[-1])
        batches = np.arange(self._largest + 1)
        self._padded = np.maximum(batches, 1)
        if len(sizes):
            self._padded = sizes[np.searchsorted(sizes, self._padded)]
        # One value for every integer batch size and num_steps, so that a call is a lookup: (C, largest + 1, k).
        by_batch = _interpolate(grid.step_ms, grid.batch_sizes, self._padded, axis=1)
        self._base_ms = _interpolate(by_batch, grid.num_steps, np.arange(MAX_NUM_STEPS + 1), axis=2)
        last_two = _interpolate(grid.step_ms, grid.batch_sizes, self._largest + np.arange(2), axis=1)
        self._eager_slope_ms = np.diff(
            _interpolate(last_two, grid.num_steps, np.arange(MAX_NUM_STEPS + 1), axis=2), axis=1
        )[:, 0]
        self._contexts = grid.context_tokens

    def with_graph_batch_sizes(self, graph_batch_sizes: tuple[int, ...]) -> TableStepTime:
        """The same cells on an engine that captured other graph sizes."""
        return TableStepTime(self.grid, graph_batch_sizes, self.eager_overhead_ms)

    def padded_batch_size(self, batch_size: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """The batch size that runs: the next graph size, or the batch itself above the largest."""
        batch = np.maximum(np.asarray(batch_size, dtype=np.int64), 1)
        return np.where(batch > self._largest, batch, self._padded[np.minimum(batch, self._largest)])

    def step_ms(
        self,
        batch_size: NDArray[np.int64] | int,
        num_steps: NDArray[np.int64] | int,
        sum_seq_len_tokens: NDArray[np.int64] | NDArray[np.float64] | float,
    ) -> NDArray[np.float64]:
        """Median duration of a step in ms; the arguments broadcast against each other.

        A batch size of 0 costs what 1 costs: whether an empty engine steps at all is the caller's affair.

        Raises:
            StepTimeError: a num_steps outside 0..32.

        """
        batch = np.maximum(np.asarray(batch_size, dtype=np.int64), 1)
        tier = np.asarray(num_steps, dtype=np.int64)
        if tier.size and not 0 <= int(tier.min()) <= int(tier.max()) <= MAX_NUM_STEPS:
            raise StepTimeError(f"num_steps must be in 0..{MAX_NUM_STEPS}, got {tier.min()}..{tier.max()}")
        inside = np.minimum(batch, self._largest)
        over = batch - inside
        mean_context = np.asarray(sum_seq_len_tokens, dtype=np.float64) / (self._padded[inside] + over)
        if len(self._contexts) == 1:
            return self._plane_ms(0, inside, over, tier) + np.zeros_like(mean_context)
        low = np.clip(
            np.searchsorted(self._contexts, mean_context, side="right") - 1, 0, len(self._contexts) - 2
        )
        start, end = self._contexts[low], self._contexts[low + 1]
        share = np.maximum((mean_context - start) / (end - start), _lowest_share(low))
        at_low, at_high = self._plane_ms(low, inside, over, tier), self._plane_ms(low + 1, inside, over, tier)
        return np.asarray(at_low + share * (at_high - at_low))

    def _plane_ms(
        self,
        plane: NDArray[np.int64] | int,
        inside: NDArray[np.int64],
        over: NDArray[np.int64],
        tier: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        base = self._base_ms[plane, inside, tier]
        if not over.any():
            return np.asarray(base)
        eager = over * self._eager_slope_ms[plane, tier] + self.eager_overhead_ms
        return np.asarray(base + np.where(over > 0, eager, 0.0))


def _lowest_share(low: NDArray[np.int64]) -> NDArray[np.float64]:
    """Below the first context the time stays that of the first context."""
    return np.where(low == 0, 0.0, -np.inf)


def _interpolate(
    values: NDArray[np.float64], axis_values: NDArray[np.int64], wanted: NDArray[np.int64], axis: int
) -> NDArray[np.float64]:
    """Linear interpolation along ``axis``; the last slope goes on above the end, the first value below it."""
    if len(axis_values) == 1:
        return np.repeat(values, len(wanted), axis=axis)
    low = np.clip(np.searchsorted(axis_values, wanted, side="right") - 1, 0, len(axis_values) - 2)
    share = (wanted - axis_values[low]) / (axis_values[low + 1] - axis_values[low])
    share = np.maximum(share, 0.0)
    shape = [1] * values.ndim
    shape[axis] = len(wanted)
    share = share.reshape(shape)
    return np.asarray(np.take(values, low, axis) * (1 - share) + np.take(values, low + 1, axis) * share)
