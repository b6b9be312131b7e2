"""Step time from a parametric model with what it misses tabulated.

The ratio of table to model is interpolated linearly in batch size, num_steps and mean context, and its last
value holds beyond the grid. At the table's cells this is the table; between and beyond them the model's
physics shapes the curve.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specgov.policies.step_time.grid import StepGrid
from specgov.policies.step_time.lookup import GridLookup, Padding, checked_num_steps
from specgov.policies.step_time.parametric import ParametricStepTime


class ResidualStepTime:
    """A parametric model times a table of ratios; implements ``policies.types.StepTime``.

    Args:
        parametric: the model; its own graph sizes are not used.
        grid: the cells that the product meets.
        graph_batch_sizes: the sizes that a batch is padded to, ascending; empty means no padding at all.

    Raises:
        StepTimeError: graph sizes that do not ascend from 1 on.

    """

    def __init__(
        self, parametric: ParametricStepTime, grid: StepGrid, graph_batch_sizes: tuple[int, ...] = ()
    ) -> None:
        self._parametric = parametric.with_graph_batch_sizes(())
        self._padding = Padding(graph_batch_sizes, int(grid.batch_sizes[-1]))
        context, batch, tier = np.meshgrid(
            grid.context_tokens, grid.batch_sizes, grid.num_steps, indexing="ij"
        )
        ratio = grid.step_ms / self._parametric.step_ms(batch, tier, batch * context)
        axes = (grid.context_tokens, grid.batch_sizes, grid.num_steps)
        self._ratios = GridLookup(axes, ratio, self._padding.padded, extrapolate=False)

    def step_ms(
        self,
        batch_size: NDArray[np.int64] | int,
        num_steps: NDArray[np.int64] | int,
        sum_seq_len_tokens: NDArray[np.int64] | NDArray[np.float64] | float,
    ) -> NDArray[np.float64]:
        """Expected duration of a step in ms; the arguments broadcast against each other."""
        tier = checked_num_steps(num_steps)
        context = np.asarray(sum_seq_len_tokens, dtype=np.float64)
        inside, over = self._padding.split(batch_size)
        running = self._padding.padded[inside] + over
        return self._parametric.step_ms(running, tier, context) * self._ratios.at(
            context / running, inside, tier
        )
