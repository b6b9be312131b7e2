"""A policy network, trained in the simulator, that follows the decision model and corrects it.

Formula: num_steps = argmax over the engine's tiers of ``logits(observation)`` (``network.py``); the
observation is that of ``features.py``, which the simulator makes with the same code. For other batch sizes
than the present one the network is asked what it would do there, at the same context and estimates.
Source: PPO, Schulman et al., "Proximal policy optimization algorithms", arXiv:1707.06347, 2017; actions that
are not there are masked as in Huang and Ontanon, "A closer look at invalid action masking in policy gradient
algorithms", arXiv:2006.14171, 2020.
Regimes: what it was trained for (``specgov policy show``); docs/ppo.md says where it gains and where it does
not. The network is frozen in service; what adapts are the estimates that it sees. Without a profile they
start from a generic one, and are poorer than those of ``greedy``.
Defaults: the bundle ``default`` of the package; ppo:FOLDER or ppo:NAME is another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.bundle import bundle_names, load_bundle
from specgov.policies.cost_prior import GenericStepTime
from specgov.policies.features import MAX_NUM_STEPS, Features, summarise
from specgov.policies.learnt import Learnt
from specgov.policies.model import expected_accept_length
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, EngineSpec, PolicyContext, StepObservation

LARGEST_TABLE_BATCH = 1024


@final
class Ppo(Learnt):
    """A trained network over the same estimates: ppo, ppo:FOLDER (see specgov train)."""

    name: ClassVar[str] = "ppo"
    version: ClassVar[str] = "1"

    _features: Features
    _reported: bool

    @dataclass(frozen=True, slots=True)
    class Config:
        """``bundle``: the name of a bundle of the package, or a bundle's folder."""

        bundle: str = "default"

        @staticmethod
        def bundled() -> list[str]:
            """The bundles of the package, which need no file of the user's."""
            return bundle_names()

    def __init__(self, context: PolicyContext, config: Config) -> None:
        bundle = (context.load_bundle or load_bundle)(config.bundle)
        self._engine = context.engine
        self._network = bundle.network
        self._features = Features(context.engine, context.step_time or GenericStepTime())
        self._tiers = np.array(context.engine.tiers)
        self._mask = np.isin(np.arange(MAX_NUM_STEPS + 1), self._tiers)
        self._sizes = batch_grid(context.engine)
        self._reported = False

    def observe(self, step: StepObservation) -> None:
        """Bring the observation up to date."""
        self._features.update(summarise(step))
        self._reported = True

    def choose(self, batch: BatchView) -> Choice:
        """The network's tier for the batch, and for every other batch size."""
        size = max(batch.batch_size, 1)
        sizes = np.concatenate([[size], self._sizes]) if self._reported else np.array([size])
        features = self._features.at_batch_sizes(sizes)
        tiers = self._network.best(features.observation(), self._mask)
        accept_length = expected_accept_length(features.acceptance()[0])
        return Choice(
            tier_ranges(self._engine, self._starts(size, tiers)),
            propensity=1.0,
            expected_tokens=size * accept_length[self._tiers],
            expected_ms=features.step_ms()[0][self._tiers],
        )

    def forget(self) -> None:
        """Drop what is known of acceptance; step times stay."""
        self._features.forget_acceptance()

    def estimates(self) -> dict[str, float]:
        """Acceptance by position and corrections of step time by tier, as the network sees them."""
        acceptance, correction = self._features.acceptance()[0], self._features.time_correction()[0]
        values = {f"acceptance_{i + 1}": float(acceptance[i]) for i in range(self._tiers[-1])}
        return values | {f"time_correction_{k}": float(correction[k]) for k in self._tiers.tolist()}

    def _starts(self, size: int, tiers: NDArray[np.intp]) -> list[tuple[int, int]]:
        """First batch sizes and their tiers; the present batch speaks for all that cost the same."""
        if len(tiers) == 1:
            return [(1, int(tiers[0]))]
        by_size = tiers[1:].copy()
        by_size[min(int(np.searchsorted(self._sizes, size)), len(by_size) - 1)] = tiers[0]
        firsts = [1, *(self._sizes[:-1] + 1).tolist()]
        return list(zip(firsts, by_size.tolist(), strict=True))


def batch_grid(engine: EngineSpec) -> NDArray[np.int64]:
    """Batch sizes that stand for all up to each of them: graph sizes, quarter octaves where there is none."""
    largest = min(engine.largest_batch_size, LARGEST_TABLE_BATCH)
    graphs = [size for size in engine.graph_batch_sizes if size < largest]
    if len(graphs) < len(engine.graph_batch_sizes):
        return np.array([*graphs, largest])
    octaves = np.unique(np.floor(2 ** np.arange(0, np.log2(largest) + 1, 0.25)).astype(np.int64))
    loose = octaves[(octaves > (graphs[-1] if graphs else 0)) & (octaves < largest)]
    return np.array([*graphs, *loose.tolist(), largest])
