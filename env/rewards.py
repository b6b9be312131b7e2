"""Rewards by name. Each is a function of one step of every environment, shape (N,), with state of its own.

An interval is the time from the end of one step to the end of the next without idle time: prefill and the
step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specgov.env.server_types import SimulationError, StepResult

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Reward(Protocol):
    """What a step was worth."""

    def reset(self, envs: Flags) -> None:
        """Begin an episode where ``envs``, shape (N,), is true."""
        ...

    def reward(self, step: StepResult, request_s: Floats) -> Floats:
        """The reward of the step, shape (N,).

        ``request_s`` is the time integral of the number of requests in the system over the interval, idle
        time and waiting requests included, in request-seconds.
        """
        ...


class RateReward:
    """Output rate, as a semi-Markov decision problem with average reward.

    ``reward = tokens - λ Δt``, in output tokens: Δt is the interval in s, tokens are those of its step, and λ
    in tokens/s is what the interval could have brought: the running output rate of the steps before,
    ``Σ w tokens / Σ w Δt`` with weights that fade with ``time_constant_s`` of busy time. A policy with the
    largest long-run output rate has the largest sum of ``tokens - λ Δt`` (Ross, "Applied probability models
    with optimization applications", 1970, chapter 7); the sum of per-step rates has not that property.

    λ has to follow the load, since time at one load cannot be exchanged for time at another: with a λ that is
    still that of a full batch, a small one gains nothing from depth. The first step of an episode has
    reward 0.
    """

    def __init__(self, n: int, time_constant_s: float = 1.0) -> None:
        self._time_constant_s = time_constant_s
        self._tokens = np.zeros(n)
        self._seconds = np.zeros(n)

    def reset(self, envs: Flags) -> None:
        """See ``Reward.reset``."""
        self._tokens[envs] = 0.0
        self._seconds[envs] = 0.0

    def reward(self, step: StepResult, request_s: Floats) -> Floats:  # noqa: ARG002  (the others need it)
        """See ``Reward.reward``."""
        interval_s = (step.prefill_ms + step.step_ms) * 1e-3
        known = self._seconds > 0
        rate = np.divide(self._tokens, self._seconds, out=np.zeros_like(self._tokens), where=known)
        reward = np.where(known, step.output_tokens - rate * interval_s, 0.0)
        keep = np.exp(-interval_s / self._time_constant_s)
        self._tokens = self._tokens * keep + step.output_tokens
        self._seconds = self._seconds * keep + interval_s
        return reward


class LatencyReward:
    """Time that requests spend in the system, queueing, prefill and decoding alike.

    ``reward = -∫ n(t) dt`` over the time since the step before, in request-seconds, n(t) being the requests
    that wait or run. By Little's law its sum over an episode is the sum of all requests' latencies up to the
    horizon, so its best policy has the least mean latency. For open loops: a closed loop keeps n(t) as it is.
    """

    def __init__(self, n: int) -> None:
        del n  # no state

    def reset(self, envs: Flags) -> None:
        """See ``Reward.reset``."""

    def reward(self, step: StepResult, request_s: Floats) -> Floats:  # noqa: ARG002  (the others need it)
        """See ``Reward.reward``."""
        return -request_s


class SloReward:
    """Goodput: output tokens of requests that met their latency targets, counted when they finish.

    ``reward = Σ output_tokens`` over the requests that finished with the step and have
    ``TTFT = first_token - arrival <= ttft_ms`` and ``TPOT = (finish - first_token) / output_tokens <=
    tpot_ms``.
    """

    def __init__(self, n: int, ttft_ms: float = 1000.0, tpot_ms: float = 15.0) -> None:
        self._n = n
        self._ttft_ns = ttft_ms * 1e6
        self._tpot_ns = tpot_ms * 1e6

    def reset(self, envs: Flags) -> None:
        """See ``Reward.reset``."""

    def reward(self, step: StepResult, request_s: Floats) -> Floats:  # noqa: ARG002  (the others need it)
        """See ``Reward.reward``."""
        ended = step.finished
        in_time = ended.first_token_ns - ended.arrival_ns <= self._ttft_ns
        in_time &= ended.finish_ns - ended.first_token_ns <= self._tpot_ns * ended.output_tokens
        return np.bincount(ended.env, ended.output_tokens * in_time, minlength=self._n).astype(np.float64)


REWARDS: dict[str, Callable[..., Reward]] = {"rate": RateReward, "latency": LatencyReward, "slo": SloReward}
"""Every reward, by name."""


def make_reward(name: str, n: int, options: dict[str, float] | None = None) -> Reward:
    """The reward ``name`` for ``n`` environments; ``options`` are its constructor's.

    Raises:
        SimulationError: there is no such reward or option, or the option is not a number above 0.

    """
    if name not in REWARDS:
        raise SimulationError(f"no reward {name!r}; there are {', '.join(REWARDS)}")
    options = options or {}
    known = [option for option in inspect.signature(REWARDS[name]).parameters if option != "n"]
    for option, value in options.items():
        if option not in known:
            raise SimulationError(
                f"reward {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
        if not isinstance(value, Real) or not value > 0:
            raise SimulationError(f"reward {name!r}: {option} must be a number above 0, got {value!r}")
    return REWARDS[name](n, **options)
