"""Who decides the tier in a run, by the text that the requests' ids carry.

``specgov``           Specgov's plugin, as in service: it follows the sidecar.
``sglang:default``    SGLang's own adaptive policy with its own default tiers, made anew for the run.
``sglang:server``     the same with the configuration that the server was started with.
``sglang:FILE``       the same with a configuration file.
``oracle:FILE``       the rate-optimal tier for the batch that is about to decode, from the true probabilities
                      of its requests at their places and the step times of a profile.
``cycle:N``           each tier for N steps in turn, to warm the server up; ``cycle:N:0,1,3`` only those.
anything else         a rule of ``specgov.policies`` that depends on the batch size alone, as ``static:3``,
                      ``threshold:64:3`` and ``schedule:1=5:33=1``, for the batch that is about to decode.

Only the first one reports to a sidecar. In the others Specgov's plugin is silent, as if it were not there,
and the choice costs no decision lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specgov.policies.oracle import best_tiers
from specgov.policies.profile import load_profile
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, EngineSpec, PolicyContext

from .texts import Texts

SPECGOV = "specgov"
SGLANG = "sglang:"
ORACLE = "oracle:"
CYCLE = "cycle:"


class Rule(Protocol):
    """Chooses the tier of a step that is about to be launched."""

    def num_steps(self, batch_size: int, rows: NDArray[np.int64]) -> int:
        """The tier; ``rows`` are the batch's in ``Texts``."""
        ...


class BySize:
    """A rule of ``specgov.policies`` that looks at the batch size only."""

    def __init__(self, text: str, engine: EngineSpec) -> None:
        policy = make_policy(text, PolicyContext(engine, np.random.default_rng(0), lambda: 0.0))
        choice = policy.choose(BatchView(1))
        largest = engine.largest_batch_size
        self._table = [choice.num_steps_for(max(size, 1)) for size in range(largest + 1)]

    def num_steps(self, batch_size: int, rows: NDArray[np.int64]) -> int:  # noqa: ARG002
        """See ``Rule``."""
        return self._table[min(batch_size, len(self._table) - 1)]


class Cycle:
    """Each tier for some steps in turn; ``text`` is ``N`` or ``N:0,1,3``."""

    def __init__(self, text: str, engine: EngineSpec) -> None:
        steps, _, tiers = text.partition(":")
        self._steps = int(steps)
        self._tiers = tuple(map(int, tiers.split(","))) if tiers else engine.tiers
        self._made = 0

    def num_steps(self, batch_size: int, rows: NDArray[np.int64]) -> int:  # noqa: ARG002
        """See ``Rule``."""
        self._made += 1
        return self._tiers[self._made // self._steps % len(self._tiers)]


class Oracle:
    """Largest expected tokens over expected time, with the truth of the very batch."""

    def __init__(self, profile: str, engine: EngineSpec, texts: Texts) -> None:
        self._step_time = load_profile(profile).step_time.with_graph_batch_sizes(engine.graph_batch_sizes)
        self._tiers = np.array(engine.tiers)
        self._texts = texts

    def num_steps(self, batch_size: int, rows: NDArray[np.int64]) -> int:
        """See ``Rule``."""
        accepted = np.concatenate([[0.0], self._texts.survival(rows).sum(axis=0).cumsum()])
        ms = self._step_time.step_ms(batch_size, self._tiers, self._texts.context_tokens(rows))
        return int(best_tiers(self._tiers, batch_size + accepted[self._tiers], ms))


def sglang_policy(
    text: str, make: Any, initial_steps: int, own_config: str | None, graphs: Sequence[int]
) -> Any:
    """SGLang's policy object for ``sglang:...``; ``make`` is its class, ``own_config`` the server's file."""
    name = text.removeprefix(SGLANG)
    config = {"default": None, "server": own_config}.get(name, name)
    policy = make(initial_steps=initial_steps, cfg_path=config)
    policy.set_cuda_graph_bs(list(graphs) or None)
    return policy
