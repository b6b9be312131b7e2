"""Step time from measured cells.

Between cells the time is interpolated linearly in batch size, num_steps and mean context, which keeps a
monotone grid monotone. Engines replay a CUDA graph captured for certain batch sizes only and pad a batch up
to the next of them, so the time is a staircase in the batch size: a batch of 65 costs what 96 costs where 64
and 96 were captured. Attention reads the cache of real requests only, so the mean context is taken over the
padded batch: for a given padded size the time is linear in the sum of sequence lengths.

A batch above the largest graph size runs eagerly: unpadded, and never below ``eager_floor_ms``, the time that
the host needs to launch the kernels one by one. Above the ends of the grid the last slope goes on. Profiles
hold cells beyond what was measured in every direction, taken from the parametric model and marked by a count
of 0, so that the grid's own ends are rarely met.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specgov.policies.step_time.grid import StepGrid
from specgov.policies.step_time.lookup import GridLookup, Padding, checked_num_steps


class TableStepTime:
    """Measured step times, interpolated; implements ``policies.types.StepTime``.

    Args:
        grid: the cells.
        graph_batch_sizes: the sizes that a batch is padded to, ascending; empty means no padding at all.
        eager_floor_ms: the least that a step above the largest graph size takes.

    Raises:
        StepTimeError: graph sizes that do not ascend from 1 on.

    """

    def __init__(
        self, grid: StepGrid, graph_batch_sizes: tuple[int, ...] = (), eager_floor_ms: float = 0.0
    ) -> None:
        self.grid = grid
        self.graph_batch_sizes = tuple(int(size) for size in graph_batch_sizes)
        self.eager_floor_ms = float(eager_floor_ms)
        self._padding = Padding(self.graph_batch_sizes, int(grid.batch_sizes[-1]))
        axes = (grid.context_tokens, grid.batch_sizes, grid.num_steps)
        self._cells = GridLookup(axes, grid.step_ms, self._padding.padded, extrapolate=True)
        # The largest prepared batch size and the one after it, for the slope beyond.
        self._last_two = GridLookup(
            axes, grid.step_ms, self._padding.largest + np.arange(2), extrapolate=True
        )

    def with_graph_batch_sizes(self, graph_batch_sizes: tuple[int, ...]) -> TableStepTime:
        """The same cells on an engine that captured other graph sizes."""
        return TableStepTime(self.grid, graph_batch_sizes, self.eager_floor_ms)

    def padded_batch_size(self, batch_size: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """The batch size that runs: the next graph size, or the batch itself above the largest."""
        return self._padding.running_size(batch_size)

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
        tier = checked_num_steps(num_steps)
        inside, over = self._padding.split(batch_size)
        mean_context = np.asarray(sum_seq_len_tokens, dtype=np.float64) / (
            self._padding.padded[inside] + over
        )
        step_ms = self._cells.at(mean_context, inside, tier)
        if over.any():
            last, after = (self._last_two.at(mean_context, np.int64(row), tier) for row in (0, 1))
            step_ms = step_ms + over * (after - last)
        if self.eager_floor_ms:
            eager = inside > self._padding.largest_graph
            step_ms = np.where(eager, np.maximum(step_ms, self.eager_floor_ms), step_ms)
        return np.asarray(step_ms)
