"""Where step times are learnt, and what is believed of them before any step: for ``cost.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specgov.policies.types import EngineSpec

if TYPE_CHECKING:
    from specgov.policies.cost import CostConfig

Floats = NDArray[np.float64]

NODES_PER_OCTAVE = 2
_LARGEST_MODELLED_BATCH = 1_024


@dataclass(frozen=True, slots=True)
class GenericStepTime:
    """The shape of step time on a server of which nothing is known; implements ``types.StepTime``.

    ``fixed_ms + draft_ms k + token_ms b (k + 1) + context_ms_per_token * context``: weights read once, a
    draft pass a draft step, arithmetic by verified token, the KV cache read once. An assumption of the right
    order for an 8-billion-parameter model on a data-centre GPU; the scale is learnt within a few steps, the
    shape as tiers and batch sizes are met.
    """

    fixed_ms: float = 6.0
    draft_ms: float = 0.3
    token_ms: float = 0.015
    context_ms_per_token: float = 3e-5

    def step_ms(
        self,
        batch_size: NDArray[np.int64] | int,
        num_steps: NDArray[np.int64] | int,
        sum_seq_len_tokens: NDArray[np.int64] | Floats | float,
    ) -> Floats:
        """Expected duration in ms; the arguments broadcast against each other."""
        batch, tier = np.asarray(batch_size), np.asarray(num_steps)
        context = self.context_ms_per_token * np.asarray(sum_seq_len_tokens, dtype=np.float64)
        return np.asarray(self.fixed_ms + self.draft_ms * tier + self.token_ms * batch * (tier + 1) + context)


def batch_grid(engine: EngineSpec) -> NDArray[np.int64]:
    """Graph sizes up to the largest batch; single sizes, later steps of 9 %, where there is no graph."""
    largest = min(engine.largest_batch_size, _LARGEST_MODELLED_BATCH)
    if engine.graph_batch_sizes and not engine.max_running_requests:
        largest = max(engine.graph_batch_sizes)
    graphs = [size for size in engine.graph_batch_sizes if size < largest]
    padded = [size for size in engine.graph_batch_sizes if size >= largest][:1]
    if padded:
        return np.array(graphs + padded)
    start = graphs[-1] if graphs else 0
    octaves = np.floor(2 ** np.arange(0, np.log2(largest) + 1, 0.125)).astype(int)
    loose = [int(size) for size in np.unique(octaves) if start < size < largest]
    return np.array([*graphs, *loose, largest])


def prior_covariance(nodes: int, tiers: NDArray[np.int64], config: CostConfig) -> Floats:
    """Covariance of the log-ratio by node and tier, and of the log cost of context, the last row."""
    octave = np.arange(nodes) / NODES_PER_OCTAVE
    distance = np.sqrt(3.0) * np.abs(octave[:, None] - octave[None, :]) / config.batch_octaves
    near = (1 + distance) * np.exp(-distance)
    depth = np.log2(1.0 + tiers)
    walk = np.minimum(depth[:, None], depth[None, :])
    ones = np.ones((len(tiers), len(tiers)))
    by_cell = config.scale_sd**2 + config.batch_sd**2 * np.kron(near, ones)
    by_cell = by_cell + config.depth_sd**2 * np.kron(0.5 + 0.5 * near, walk)
    size = nodes * len(tiers)
    covariance = np.zeros((size + 1, size + 1))
    covariance[:size, :size] = by_cell + config.cell_sd**2 * np.eye(size)
    covariance[size, size] = config.attention_sd**2
    return covariance
