"""Episodes on simulated servers: decision lag, observation, reward and end. No gymnasium in it.

The single environment, the vectorised one and the Stable-Baselines3 adapter are thin shells around this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.rewards import make_reward
from specgov.env.scenario import Scenario, load_scenario
from specgov.env.server import Server
from specgov.env.server_types import SimulationError, StepResult
from specgov.policies.features import MAX_NUM_STEPS, Features, StepSummaries
from specgov.policies.types import StepTime

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step of every environment; shape (N,) and (N, D) for observations."""

    observation: NDArray[np.float32]
    reward: NDArray[np.float64]
    terminated: Flags
    truncated: Flags
    step: StepResult


class ServingSimulation:
    """N servers that run episodes of a scenario.

    Args:
        scenario: a scenario, or the name or file of one.
        n: number of environments.
        seed: environment e is environment 0 of seed + e.
        reward: name of a reward (``env/rewards.py``), ``reward_options`` its settings.
        duration_s: simulated time of an episode; none = the scenario's.
        decision_lag_steps: none = the scenario's.
        n_actions: size of the action space, at least the number of tiers; none = that number.
        step_time: what the observation's estimates start from; none = the scenario's profile, the truth.

    Raises:
        ScenarioError, SimulationError: something of that cannot be used.

    """

    def __init__(
        self,
        scenario: Scenario | str | Path = "mixed_classes",
        n: int = 1,
        seed: int = 0,
        reward: str = "rate",
        reward_options: dict[str, float] | None = None,
        duration_s: float | None = None,
        decision_lag_steps: int | None = None,
        n_actions: int | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        self.scenario = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
        engine = self.scenario.engine
        self.n = n
        self.tiers = np.array(engine.tiers)
        self.n_actions = len(self.tiers) if n_actions is None else n_actions
        lag = engine.decision_lag_steps if decision_lag_steps is None else decision_lag_steps
        if self.n_actions < len(self.tiers):
            raise SimulationError(f"n_actions is {n_actions}, and the engine has {len(self.tiers)} tiers")
        if lag < 1:
            raise SimulationError(
                f"decision_lag_steps is {lag}: a decision cannot apply to a step that it knows"
            )
        duration_s = self.scenario.duration_s if duration_s is None else duration_s
        if not 0 < duration_s < np.inf:
            raise SimulationError(f"duration_s must be above 0 and finite, got {duration_s}")
        self.server: Server = self.scenario.build(n, seed)
        self._horizon_ns = round(duration_s * 1e9)
        self._kv_is_known = engine.kv_capacity_tokens > 0
        self._features = Features(engine, step_time or self.scenario.profile.step_time, n)
        self._reward = make_reward(reward, n, reward_options)
        # Decisions on their way: column i applies i steps from now. The engine begins with its smallest tier.
        self._pending = np.full((n, lag), self.tiers[0])
        self._request_ns = np.zeros(n, np.int64)

    @property
    def action_masks(self) -> Flags:
        """Which actions are tiers of the engine, shape (N, n_actions)."""
        return np.tile(np.arange(self.n_actions) < len(self.tiers), (self.n, 1))

    @property
    def pending(self) -> NDArray[np.int64]:
        """num_steps that are decided for the coming steps, shape (N, decision lag - 1)."""
        return self._pending[:, :-1]

    def reset(self, envs: Flags, seeds: list[int | None] | None = None) -> None:
        """Begin an episode where ``envs``, shape (N,), is true.

        It is the next one, or where ``seeds`` (N long) has a number the first one of that seed.
        """
        seeded = np.zeros(self.n, np.bool_)
        for env in np.flatnonzero(envs):
            seed = None if seeds is None else seeds[env]
            if seed is not None:
                self.server.reset(np.array([env]), seed - int(env))
                seeded[env] = True
        if (envs & ~seeded).any():
            self.server.reset(np.flatnonzero(envs & ~seeded))
        self._features.reset(envs)
        self._reward.reset(envs)
        self._pending[envs] = self.tiers[0]
        self._request_ns = np.where(envs, 0, self._request_ns)

    def observation(self) -> NDArray[np.float32]:
        """What is known now, shape (N, D)."""
        return self._features.observation()

    def step(self, actions: NDArray[Any]) -> Outcome:
        """Decide, and run the step to which the oldest decision on its way applies.

        Args:
            actions: indices into the tiers, shape (N,).

        Raises:
            SimulationError: an action is not the index of a tier.

        """
        actions = np.asarray(actions)
        whole = actions.shape == (self.n,) and np.issubdtype(actions.dtype, np.integer)
        if not whole or actions.min() < 0 or actions.max() >= len(self.tiers):
            raise SimulationError(
                f"actions must be whole numbers from 0 to {len(self.tiers) - 1}, indices into the tiers, "
                f"in shape ({self.n},); got {actions!r}"
            )
        self._pending[:, -1] = self.tiers[actions]
        step = self.server.step(self._pending[:, 0])
        self._pending[:, :-1] = self._pending[:, 1:]
        self._features.update(summaries_of(step, self._kv_is_known))
        request_ns = self.server.request_ns
        request_s = np.asarray((request_ns - self._request_ns) * 1e-9, np.float64)
        self._request_ns = request_ns
        reward = self._reward.reward(step, request_s)
        truncated = (step.time_ns >= self._horizon_ns) & ~step.exhausted
        return Outcome(self.observation(), reward, step.exhausted, truncated, step)

    def state_info(self, truth: bool) -> dict[str, NDArray[Any]]:
        """What holds before the coming step; with ``truth`` also what each tier would bring.

        ``expected_tokens`` and ``expected_ms`` (N, tiers), ``acceptance`` (N, K) are those of
        ``env.server.Truth``.
        """
        server = self.server
        info: dict[str, NDArray[Any]] = {
            "action_mask": self.action_masks,
            "time_s": server.time_ns * 1e-9,
            "running_requests": server.batch_size,
            "waiting_requests": server.waiting_requests,
            "kv_use_ratio": server.kv_tokens / server.config.kv_capacity_tokens,
        }
        if truth:
            known = server.truth()
            info["expected_tokens"] = known.expected_tokens
            info["expected_ms"] = known.expected_ms
            info["acceptance"] = known.conditional_acceptance
        return info

    @staticmethod
    def step_info(step: StepResult) -> dict[str, NDArray[Any]]:
        """What happened in a step, shape (N,)."""
        return {
            "num_steps": step.num_steps,
            "batch_size": step.batch_size,
            "output_tokens": step.output_tokens,
            "step_ms": step.step_ms,
            "prefill_ms": step.prefill_ms,
            "idle_ms": step.idle_ms,
            "finished_requests": step.finished_requests,
            "retracted_requests": step.retracted_requests,
        }


def summaries_of(step: StepResult, kv_is_known: bool = True) -> StepSummaries:
    """What the engines report of a step: durations in whole µs, KV use in single precision."""
    counts = np.cumsum(step.accepted_histogram[:, ::-1], axis=1)[:, ::-1]
    at_least = np.zeros((len(counts), MAX_NUM_STEPS + 1), np.int64)
    at_least[:, : counts.shape[1]] = counts
    return StepSummaries(
        step.batch_size,
        step.num_steps,
        at_least,
        step.sum_seq_len_tokens,
        step.max_seq_len_tokens,
        np.zeros_like(step.batch_size),
        step.waiting_requests,
        np.where(kv_is_known, step.kv_use_ratio.astype(np.float32), np.nan),
        np.where(step.step_ms_valid, np.rint(step.step_ms * 1000.0) / 1000.0, np.nan),
        step.after_prefill,
        step.after_idle,
    )
