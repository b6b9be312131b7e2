"""The simulated servers as a Stable-Baselines3 ``VecEnv``, with action masks for MaskablePPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from specgov.env.serving import observation_space
from specgov.env.simulation import ServingSimulation


class ServingVecEnv(VecEnv):
    """A thin adapter: an environment that ends begins its next episode within the same step.

    The observation is then the new episode's first; the last one of the old episode is in
    ``infos[e]["terminal_observation"]``, and ``infos[e]["TimeLimit.truncated"]`` says whether the time ran
    out, in which case Stable-Baselines3 adds the value of that observation to the reward. Infos hold
    nothing else.

    Args:
        simulation: the servers. ``seed()`` takes effect at the next ``reset``, as in every ``VecEnv``.

    """

    def __init__(self, simulation: ServingSimulation) -> None:
        self.simulation = simulation
        self.render_mode = None
        self._actions: NDArray[Any] = np.zeros(simulation.n, np.int64)
        super().__init__(simulation.n, observation_space(), spaces.Discrete(simulation.n_actions))

    def reset(self) -> NDArray[np.float32]:
        """Begin an episode everywhere: the first of the seeds if ``seed`` was called, else the next one."""
        self.simulation.reset(np.ones(self.num_envs, np.bool_), self._seeds)
        self._reset_seeds()
        self._reset_options()
        return self.simulation.observation()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Take the actions, shape (n,)."""
        self._actions = actions

    def step_wait(
        self,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Run the step; observations, rewards, ends and infos."""
        outcome = self.simulation.step(self._actions)
        observation = outcome.observation
        done = outcome.terminated | outcome.truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            for env in np.flatnonzero(done):
                infos[env]["terminal_observation"] = observation[env]
                infos[env]["TimeLimit.truncated"] = bool(outcome.truncated[env])
            self.simulation.reset(done)
            observation = self.simulation.observation()
        return observation, outcome.reward.astype(np.float32), done, infos

    def close(self) -> None:
        """Nothing to release."""

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are tiers of the engine, shape (n, n_actions)."""
        return self.simulation.action_masks

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same attribute for each of ``indices``."""
        if attr_name == "action_masks":
            return [self.simulation.action_masks[env] for env in self._get_indices(indices)]
        value = getattr(self, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of all environments; there is none of a single one.

        Raises:
            NotImplementedError: ``indices`` were given.

        """
        if indices is not None:
            raise NotImplementedError("the environments share their attributes: leave indices out")
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call ``action_masks`` of each of ``indices``; the environments have no other method of their own.

        Raises:
            NotImplementedError: another method.

        """
        if method_name != "action_masks" or args or kwargs:
            raise NotImplementedError(f"the environments have no method {method_name} of their own")
        return self.get_attr("action_masks", indices)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:  # noqa: ARG002
        """No environment is wrapped."""
        return [False for _ in self._get_indices(indices)]


def make_sb3_env(n: int, seed: int = 0, **arguments: Any) -> ServingVecEnv:
    """``n`` servers for Stable-Baselines3; ``arguments`` are those of ``ServingSimulation``."""
    return ServingVecEnv(ServingSimulation(n=n, seed=seed, **arguments))


__all__: Sequence[str] = ("ServingVecEnv", "make_sb3_env")
