"""The vectorised form of ``specgov/Serving-v0``: all environments advance in the same numpy calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from specgov.env.scenario import Scenario
from specgov.env.serving import observation_space
from specgov.env.simulation import ServingSimulation

Observations = NDArray[np.float32]
Flags = NDArray[np.bool_]


class ServingVectorEnv(VectorEnv[Observations, NDArray[np.int64], NDArray[Any]]):
    """``num_envs`` servers of one scenario; everything else as in ``ServingEnv``, which is the specification.

    Environment e of ``reset(seed=s)`` goes the way of a single environment after ``reset(seed=s + e)``.
    Autoreset is gymnasium's next-step mode: the step after an end ignores the action, has reward 0 and
    returns the first observation of the next episode. In ``info`` a name with ``_`` before it says which
    rows hold.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": [],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        scenario: Scenario | str | Path = "mixed_classes",
        reward: str = "rate",
        reward_options: dict[str, float] | None = None,
        duration_s: float | None = None,
        decision_lag_steps: int | None = None,
        n_actions: int | None = None,
        truth: bool = True,
        render_mode: None = None,
    ) -> None:
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.simulation = ServingSimulation(
            scenario, num_envs, 0, reward, reward_options, duration_s, decision_lag_steps, n_actions
        )
        self._truth = truth
        self._seeded = False
        self._ended = np.zeros(num_envs, np.bool_)
        self.single_observation_space = observation_space()
        self.single_action_space = spaces.Discrete(self.simulation.n_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002  (gymnasium's signature)
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode everywhere; ``seed`` is one number, or one for each environment."""
        super().reset(seed=seed if isinstance(seed, int) else None)
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(2**31))
        self._seeded = True
        seeds = [seed + env for env in range(self.num_envs)] if isinstance(seed, int) else seed
        everywhere = np.ones(self.num_envs, np.bool_)
        self.simulation.reset(everywhere, None if seeds is None else list(seeds))
        self._ended[:] = False
        return self.simulation.observation(), _masked(self.simulation.state_info(self._truth), everywhere)

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observations, NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        """Decide, and run one decode step everywhere.

        Raises:
            SimulationError: an action is not the index of a tier.

        """
        again, actions = self._ended, np.array(actions)
        if actions.shape == again.shape:  # else the simulation says what it wants
            actions[again] = 0
        outcome = self.simulation.step(actions)
        observation, reward = outcome.observation, outcome.reward
        terminated, truncated = outcome.terminated & ~again, outcome.truncated & ~again
        if again.any():
            self.simulation.reset(again)
            observation = self.simulation.observation()
            reward = np.where(again, 0.0, reward)
        self._ended = terminated | truncated
        info = _masked(self.simulation.step_info(outcome.step), ~again)
        info |= _masked(self.simulation.state_info(self._truth), np.ones(self.num_envs, np.bool_))
        return observation, reward, terminated, truncated, info

    def action_masks(self) -> Flags:
        """Which actions are tiers of the engine, shape (num_envs, n_actions)."""
        return self.simulation.action_masks


def _masked(info: dict[str, NDArray[Any]], holds: Flags) -> dict[str, Any]:
    return info | {f"_{name}": holds for name in info}
