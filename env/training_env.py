"""Many domains at once for MaskablePPO, and the same domains played to a policy that does not learn.

Actions are num_steps 0..MAX_NUM_STEPS whatever the engine's tiers are; those that it lacks are masked.

After the observation come ``PRIVILEGED`` numbers for the critic alone (an asymmetric actor-critic: Pinto et
al., "Asymmetric actor critic for image-based robot learning", arXiv:1710.06542, 2017): what each tier would
really bring in the coming step, and what the decisions on their way will, as rate rewards. With them the
critic explains most of what is to come, and the advantage is left with what the action changed.

Rewards are made alike in size and free of what no policy can change, one scale a domain:

- ``rate``: ``(E[tokens | k] - λ E[step time | k]) / mean tokens``, where λ is the best output rate that any
  tier of the engine could have in the step, if no draft were cold. Its sum is minus the tokens lost to a rule
  that knows the truth, decides without lag, and has never let a draft go cold. That is ``rewards.py``'s rate
  reward with expectations in place of what happened, and with the best rate in place of the running one: what
  the policy cannot change is left out, since it was a hundred times what it can.
- ``latency``, ``slo``: ``(r - mu Δt) / mean size of r``, mu being the domain's running mean of the reward by
  time: the differential reward of an average-reward problem. Without mu the value of a state would be some
  hundred times a step's reward, and learning it would take all the time there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from specgov.env.domains import Domain
from specgov.env.server_types import Truth
from specgov.env.serving import observation_space
from specgov.env.simulation import Outcome, ServingSimulation
from specgov.policies.network import NUM_TIERS

Floats = NDArray[np.float64]
Observations = NDArray[np.float32]
Flags = NDArray[np.bool_]

PRIVILEGED = NUM_TIERS + 6
"""Entries for the critic: a reward for each tier, for up to four decisions on their way, the lag, and what
cold drafts cost."""

_MAX_LAG = 5
_LARGEST_REWARD = 10.0


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A step of a group, shape (n,) and (n, D); ``last`` are the observations before any reset."""

    observation: Observations
    reward: Floats
    done: Flags
    truncated: Flags
    last: Observations


class DomainGroup:
    """Environments of one domain, with actions by num_steps and the reward for training.

    Attributes:
        tokens_lost: expected tokens lost so far to the best rate of each step, over all environments.
        best_tokens: what the best rate of each step would have brought in the same time.

    """

    def __init__(self, domain: Domain, n: int, seed: int, reward: str, options: dict[str, float]) -> None:
        self.n = n
        self.simulation = ServingSimulation(
            domain.scenario, n, seed, reward, options, step_time=domain.believed
        )
        tiers = self.simulation.tiers
        self.mask = np.isin(np.arange(NUM_TIERS), tiers)
        self._index = np.searchsorted(tiers, np.arange(NUM_TIERS))
        self._is_rate = reward == "rate"
        self.tokens_lost = self.best_tokens = 0.0
        self._size = _Mean()
        self._tokens = _Mean()
        self._reward_by_time = _Mean()
        self._time_ns = np.zeros(n, np.int64)

    def start(self) -> Observations:
        """Begin an episode everywhere."""
        self._begin(np.ones(self.n, np.bool_))
        return self._observed(self.simulation.observation())

    def step(self, num_steps: NDArray[Any]) -> GroupStep:
        """Run a step; environments that end begin their next episode."""
        lost, best = self._lost, self._best
        outcome = self.simulation.step(self._index[num_steps])
        at = np.arange(self.n), self._index[outcome.step.num_steps]
        self.tokens_lost += float(lost[at].sum())
        self.best_tokens += float(best[at].sum())
        reward = lost[at] / -self._mean_tokens if self._is_rate else self._differential(outcome)
        self._time_ns = outcome.step.time_ns
        reward = np.clip(reward, -_LARGEST_REWARD, _LARGEST_REWARD)
        last = observation = self._observed(outcome.observation)
        done = outcome.terminated | outcome.truncated
        if done.any():
            self._begin(done)
            observation = self._observed(self.simulation.observation())
        return GroupStep(observation, reward, done, outcome.truncated, last)

    def _begin(self, envs: Flags) -> None:
        self.simulation.reset(envs)
        self._time_ns[envs] = 0

    def _observed(self, observation: Observations) -> Observations:
        """The observation with what the critic may know."""
        server, pending = self.simulation.server, self.simulation.pending
        truth = server.truth()
        self._best = self._best_rate(truth)[:, None] * truth.expected_ms
        self._lost = self._best - truth.expected_tokens
        self._tokens.add(float(self._best.mean()))
        losses = np.minimum(self._lost / self._mean_tokens, _LARGEST_REWARD)
        critic = np.zeros((self.n, PRIVILEGED), np.float32)
        critic[:, self.simulation.tiers] = losses
        critic[:, NUM_TIERS : NUM_TIERS + pending.shape[1]] = np.take_along_axis(
            losses, self._index[pending], axis=1
        )
        critic[:, -2] = losses.min(axis=1)
        critic[:, -1] = (pending.shape[1] + 1) / _MAX_LAG
        return np.concatenate([observation, critic], axis=1)

    @property
    def _mean_tokens(self) -> float:
        return max(self._tokens.value, 1.0)

    def _best_rate(self, truth: Truth) -> Floats:
        """The best output rate of any tier with warm drafts, in tokens/ms, shape (n,)."""
        server = self.simulation.server
        warm = truth if server.config.engine.draft_kv_stays_warm else server.truth(as_if_warm=True)
        rates = np.divide(
            warm.expected_tokens,
            warm.expected_ms,
            out=np.zeros_like(warm.expected_ms),
            where=warm.expected_ms > 0,
        )
        return np.asarray(rates.max(axis=1))

    def _differential(self, outcome: Outcome) -> Floats:
        seconds = (outcome.step.time_ns - self._time_ns) * 1e-9
        self._reward_by_time.add(float(outcome.reward.sum()), float(seconds.sum()))
        self._size.add(float(np.abs(outcome.reward).mean()))
        reward = outcome.reward - self._reward_by_time.value * seconds
        return np.asarray(reward / max(self._size.value, 1e-9))


class _Mean:
    """A running mean."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Take ``value``, a sum over ``weight``, in."""
        self._sum += value
        self._weight += weight

    @property
    def value(self) -> float:
        """The mean, 0 of nothing."""
        return self._sum / self._weight if self._weight else 0.0


def training_space() -> spaces.Box:
    """Observation and ``PRIVILEGED`` entries."""
    seen, extra = observation_space(), np.full(PRIVILEGED, _LARGEST_REWARD, np.float32)
    return spaces.Box(
        np.concatenate([seen.low, -extra]), np.concatenate([seen.high, extra]), dtype=np.float32
    )


class DomainVecEnv(VecEnv):
    """Groups of environments, one domain each; one domain after the other is drawn anew.

    Args:
        draw: gives the next domain.
        groups, envs_per_group: how many.
        seed: of the requests; each group has seeds of its own.
        reward, reward_options: as for ``ServingSimulation``.
        redraw_steps: after so many steps the oldest group gets a new domain (its episodes are cut off, as
            by a time limit); 0 = never.

    """

    def __init__(
        self,
        draw: Callable[[], Domain],
        groups: int,
        envs_per_group: int,
        seed: int = 0,
        reward: str = "rate",
        reward_options: dict[str, float] | None = None,
        redraw_steps: int = 0,
    ) -> None:
        self.render_mode = None
        self._draw, self._reward, self._reward_options = draw, reward, reward_options or {}
        self._envs_per_group, self._redraw_steps = envs_per_group, redraw_steps
        self._next_seed = seed
        self._steps = 0
        self._groups = [self._new_group() for _ in range(groups)]
        self._actions = np.zeros((groups, envs_per_group), np.int64)
        super().__init__(groups * envs_per_group, training_space(), spaces.Discrete(NUM_TIERS))

    def reset(self) -> Observations:
        """Begin an episode everywhere."""
        return np.concatenate([group.start() for group in self._groups])

    def step_async(self, actions: NDArray[Any]) -> None:
        """Take the actions, num_steps of shape (num_envs,)."""
        self._actions = np.asarray(actions).reshape(len(self._groups), self._envs_per_group)

    def step_wait(self) -> tuple[Observations, NDArray[np.float32], Flags, list[dict[str, Any]]]:
        """Run the step; observations, rewards, ends and infos."""
        self._steps += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        due = self._steps // self._redraw_steps if self._redraw_steps else 0
        redrawn = due % len(self._groups) if due and self._steps % self._redraw_steps == 0 else -1
        parts = []
        for number, group in enumerate(self._groups):
            step = group.step(self._actions[number])
            if number == redrawn:
                self._groups[number] = self._new_group()
                everywhere = np.ones_like(step.done)
                cut = step.truncated | ~step.done
                step = GroupStep(self._groups[number].start(), step.reward, everywhere, cut, step.last)
            for env in np.flatnonzero(step.done):
                info = infos[number * self._envs_per_group + env]
                info["terminal_observation"] = step.last[env]
                info["TimeLimit.truncated"] = bool(step.truncated[env])
            parts.append((step.observation, step.reward, step.done))
        observations, rewards, dones = (np.concatenate(part) for part in zip(*parts, strict=True))
        return observations, rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """Nothing to release."""

    def action_masks(self) -> Flags:
        """Which num_steps are tiers of each engine, shape (num_envs, NUM_TIERS)."""
        return np.repeat([group.mask for group in self._groups], self._envs_per_group, axis=0)

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same attribute for each of ``indices``."""
        value = getattr(self, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Not supported: the environments have no attributes of their own.

        Raises:
            NotImplementedError: always.

        """
        raise NotImplementedError(f"the environments have no attribute {attr_name} of their own")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call ``action_masks`` of each of ``indices``; there is no other method of a single environment.

        Raises:
            NotImplementedError: another method.

        """
        if method_name != "action_masks" or args or kwargs:
            raise NotImplementedError(f"the environments have no method {method_name} of their own")
        masks = self.action_masks()
        return [masks[env] for env in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:  # noqa: ARG002
        """No environment is wrapped."""
        return [False for _ in self._get_indices(indices)]

    def _new_group(self) -> DomainGroup:
        self._next_seed += self._envs_per_group
        return DomainGroup(
            self._draw(), self._envs_per_group, self._next_seed, self._reward, self._reward_options
        )


__all__: Sequence[str] = ("DomainGroup", "DomainVecEnv")
