"""The gymnasium environment ``specgov/Serving-v0``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from specgov.env.scenario import Scenario
from specgov.env.simulation import ServingSimulation
from specgov.policies.features import ENTRIES

Observation = NDArray[np.float32]


class ServingEnv(gymnasium.Env[Observation, np.int64]):
    """An LLM server that decodes with speculation; the agent picks the num_steps of each decode step.

    ## Action
    ``Discrete(number of tiers)``: an index into the engine's tiers, ascending num_steps. An action is a
    decision: it applies ``decision_lag_steps`` steps after the newest step in the observation, so the tier
    that an observation reports was chosen that many actions before. The first steps of an episode run at
    the smallest tier. With ``n_actions`` above the number of tiers the others are masked
    (``action_masks()`` and ``info["action_mask"]``) and refused.

    ## Observation
    ``Box`` of float32, all that a live engine's step reports tell (version 1). Indices count tiers or
    positions.

    | entries | unit | low | high |
    |---|---|---|---|
    | batch_size | log2(1 + requests) / 8 | 0 | 2 |
    | padded_batch_size | log2(1 + requests) / 8, padded to a CUDA graph | 0 | 2 |
    | waiting | log2(1 + requests) / 8 | 0 | 2 |
    | mean_context | log2(1 + tokens) / 16, prompt and output | 0 | 2 |
    | max_context | log2(1 + tokens) / 16, prompt and output | 0 | 2 |
    | steps_since_speculation | log2(1 + steps since num_steps > 0) / 8 | 0 | 1 |
    | live_share | requests still live / batch size | 0 | 1 |
    | kv_use | share of KV capacity, 0 if not known | 0 | 1 |
    | kv_known | 1 if the engine reports KV use | 0 | 1 |
    | reported | 1 once a step was reported | 0 | 1 |
    | cuda_graph | 1 if a captured graph fits the batch | 0 | 1 |
    | after_prefill | 1 if prefill ran just before the step | 0 | 1 |
    | after_idle | 1 if the engine idled just before the step | 0 | 1 |
    | step_time_valid | 1 if the step has a valid duration | 0 | 1 |
    | num_steps_0..7 | 1 for the step's tier | 0 | 1 |
    | has_tier_0..7 | 1 if the engine has the tier | 0 | 1 |
    | draft_stays_warm | 1 if tier 0 keeps the draft's KV cache up to date | 0 | 1 |
    | acceptance_1..7 | P(draft i accepted, given those before it were) | 0 | 1 |
    | confidence_1..7 | evidence for it, 0 none to 1 | 0 | 1 |
    | accept_length_1..7 | expected accept length / 8 | 0.125 | 1 |
    | step_ms_0 | log2(1 + expected ms at tier 0) / 8 | 0 | 2 |
    | step_time_ratio_1..7 | expected step time / that of tier 0, - 1 | -1 | 8 |
    | time_correction_0..7 | ln(measured / profile's step time), discounted | -1 | 1 |
    | relative_rate_0..7 | expected output rate / the best tier's, 0 without it | 0 | 1 |

    How the estimates are made: ``specgov.policies.features``.

    ## Reward
    By name, formulas in ``specgov.env.rewards``: ``rate`` (tokens - running output rate x busy time, in
    tokens), ``latency`` (minus the time that requests spent in the system, in request-seconds) or ``slo``
    (tokens of finished requests that met their TTFT and TPOT targets).

    ## Start
    An empty server at time 0, which waits for its first requests. ``reset(seed=...)`` begins the first
    episode of that seed, ``reset()`` the next one: other arrivals, lengths and texts of the same scenario.

    ## End
    ``truncated`` when the simulated time passes ``duration_s``: the server would go on, so a value of what
    follows is to be added (bootstrapped). ``terminated`` when the workload has ended and the server is
    empty, as with a trace that is not repeated.

    ## Info
    Of the step: ``num_steps``, ``batch_size``, ``output_tokens``, ``step_ms``, ``prefill_ms``, ``idle_ms``,
    ``finished_requests``, ``retracted_requests``. Before the coming step: ``time_s``, ``running_requests``,
    ``waiting_requests``, ``kv_use_ratio``, ``action_mask``, and with ``truth`` what no live engine knows:
    ``expected_tokens`` and ``expected_ms`` of every tier, ``acceptance`` by position.

    ## Arguments
    - ``scenario``: the name of a bundled scenario, or a TOML file. Default ``"mixed_classes"``.
    - ``reward``: ``"rate"`` (default), ``"latency"`` or ``"slo"``; ``reward_options``: its settings.
    - ``duration_s``: simulated time of an episode; default: the scenario's.
    - ``decision_lag_steps``: default: the scenario's, engine and transport together.
    - ``n_actions``: size of the action space; default: the number of tiers.
    - ``truth``: whether ``info`` holds the truth. Default true; false is faster.

    ## Version history
    - v0: first version, observation version 1.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(
        self,
        scenario: Scenario | str | Path = "mixed_classes",
        reward: str = "rate",
        reward_options: dict[str, float] | None = None,
        duration_s: float | None = None,
        decision_lag_steps: int | None = None,
        n_actions: int | None = None,
        truth: bool = True,
        render_mode: None = None,
    ) -> None:
        self.render_mode = render_mode
        self.simulation = ServingSimulation(
            scenario, 1, 0, reward, reward_options, duration_s, decision_lag_steps, n_actions
        )
        self._truth = truth
        self._seeded = False
        self.observation_space = cast("spaces.Space[Observation]", observation_space())
        self.action_space = spaces.Discrete(self.simulation.n_actions)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; ``options`` are not used."""
        super().reset(seed=seed, options=options)
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(2**31))
        self._seeded = True
        self.simulation.reset(np.ones(1, np.bool_), [seed])
        return self.simulation.observation()[0], _first(self.simulation.state_info(self._truth))

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Decide, and run one decode step.

        Raises:
            SimulationError: the action is not the index of a tier.

        """
        outcome = self.simulation.step(np.array([action]))
        info = self.simulation.step_info(outcome.step) | self.simulation.state_info(self._truth)
        return (
            outcome.observation[0],
            float(outcome.reward[0]),
            bool(outcome.terminated[0]),
            bool(outcome.truncated[0]),
            _first(info),
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are tiers of the engine; what sb3-contrib's MaskablePPO asks for."""
        return np.asarray(self.simulation.action_masks[0])


def observation_space() -> spaces.Box:
    """The space of one observation, bounds as in ``specgov.policies.features.ENTRIES``."""
    low = np.array([entry.low for entry in ENTRIES], np.float32)
    high = np.array([entry.high for entry in ENTRIES], np.float32)
    return spaces.Box(low, high, dtype=np.float32)


def _first(info: dict[str, NDArray[Any]]) -> dict[str, Any]:
    return {name: values[0] for name, values in info.items()}
