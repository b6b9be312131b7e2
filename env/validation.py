"""How good a policy is on an evaluation split: fixed domains and requests, the same for every policy.

Score of a domain, larger is better, as a logarithm:

- ``rate``: share of the best output rate that any tier could have had in each step (``training_env``), by
  expectations, over a fixed number of steps.
- ``latency``: output tokens by time that requests spent in the system, waiting included, over a fixed time:
  where requests come at their own pace one over the mean time per token.
- ``slo``: tokens of requests that met their targets, by time, likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgov.env.domains import Domain
from specgov.env.simulation import ServingSimulation
from specgov.env.training_env import DomainGroup
from specgov.policies.features import OBSERVATION_SIZE
from specgov.policies.network import NUM_TIERS

Floats = NDArray[np.float64]
Decide: TypeAlias = Callable[[NDArray[np.float32], NDArray[np.bool_]], NDArray[np.intp]]
"""num_steps (n,) for observations (n, D) and the mask of tiers (NUM_TIERS,)."""


class EvaluationSplit:
    """Domains to measure policies on.

    Args:
        domains: what to play.
        n: environments of each.
        seed: of the requests.
        steps: how many steps each is played for; where a fixed time is played, that which the first policy
            took for so many.
        reward, reward_options: what counts, as for ``ServingSimulation``.

    """

    def __init__(
        self,
        domains: Sequence[Domain],
        n: int,
        seed: int,
        steps: int,
        reward: str,
        reward_options: dict[str, float] | None = None,
    ) -> None:
        self._domains, self._n, self._seed, self._steps = domains, n, seed, steps
        self._reward, self._options = reward, reward_options or {}
        self._duration_ns: list[int] = []

    def scores(self, decide: Decide) -> Floats:
        """Score of each domain, shape (domains,)."""
        if self._reward == "rate":
            return np.array([self._share_of_best(domain, decide) for domain in self._domains])
        if not self._duration_ns:
            self._duration_ns = [self._time_of(domain, decide) for domain in self._domains]
        played = zip(self._domains, self._duration_ns, strict=True)
        return np.array([self._by_time(domain, decide, end_ns) for domain, end_ns in played])

    def _share_of_best(self, domain: Domain, decide: Decide) -> float:
        group = DomainGroup(domain, self._n, self._seed, self._reward, self._options)
        observation = group.start()
        for _ in range(self._steps):
            observation = group.step(decide(observation[:, :OBSERVATION_SIZE], group.mask)).observation
        return float(np.log1p(-group.tokens_lost / max(group.best_tokens, 1.0)))

    def _time_of(self, domain: Domain, decide: Decide) -> int:
        simulation = self._simulation(domain)
        for _ in range(self._steps):
            _advance(simulation, decide)
        return int(np.median(simulation.server.time_ns))

    def _by_time(self, domain: Domain, decide: Decide, end_ns: int) -> float:
        simulation = self._simulation(domain)
        gained, request_ns = np.zeros(self._n), np.zeros(self._n, np.int64)
        playing = np.ones(self._n, np.bool_)
        while playing.any():
            tokens, reward, time_ns = _advance(simulation, decide)
            gained += np.where(playing, reward if self._reward == "slo" else tokens, 0.0)
            request_ns = np.where(playing, simulation.server.request_ns, request_ns)
            playing &= (time_ns < end_ns) & ~simulation.server.exhausted
        spent_ns = self._n * end_ns if self._reward == "slo" else int(request_ns.sum())
        return float(np.log(max(gained.sum(), 1.0) / (spent_ns * 1e-9)))

    def _simulation(self, domain: Domain) -> ServingSimulation:
        simulation = ServingSimulation(
            domain.scenario,
            self._n,
            self._seed,
            self._reward,
            self._options,
            duration_s=1e6,
            step_time=domain.believed,
        )
        simulation.reset(np.ones(self._n, np.bool_))
        return simulation


def _advance(
    simulation: ServingSimulation, decide: Decide
) -> tuple[NDArray[np.int64], Floats, NDArray[np.int64]]:
    """One step; output tokens, rewards and times."""
    mask = np.isin(np.arange(NUM_TIERS), simulation.tiers)
    num_steps = decide(simulation.observation(), mask)
    outcome = simulation.step(np.searchsorted(simulation.tiers, num_steps))
    return outcome.step.output_tokens, outcome.reward, outcome.step.time_ns
