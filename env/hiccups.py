"""The host's hiccups: for some steps the engine's Python cannot keep up with the GPU.

While one lasts, each step takes at least a time of the host's. Where results only came late, the GPU having
worked on, the steps after it are shorter until the time is made up for: at most that of one step, since an
engine launches no more than one ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specgov.env.rng import Keys, Stream, stream_keys, uniform
from specgov.env.server_types import Flags, Floats, Ints, SimulationError

_DRAWS = 4
_SHORTEST = 0.5
"""Least share of its own time that a step takes which makes up for a hiccup: assumed. On an H200: 0.8."""


@dataclass(frozen=True, slots=True)
class Hiccups:
    """How often the host holds up the engine, and how; ``per_s`` 0 is never.

    Attributes:
        per_s: hiccups that begin in a second of decoding, on average.
        most_steps: a hiccup lasts 1 to so many steps, all equally likely.
        ms: what each of its steps takes at least, drawn from this range for each hiccup.
        caught_up: share of hiccups that are made up for by the steps after them.

    Raises:
        SimulationError: a value that cannot be simulated.

    """

    per_s: float = 0.0
    most_steps: int = 10
    ms: tuple[float, float] = (10.0, 40.0)
    caught_up: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.per_s < float("inf"):
            raise SimulationError(f"hiccups.per_s is {self.per_s}: it must be at least 0")
        if self.most_steps < 1:
            raise SimulationError(f"hiccups.most_steps is {self.most_steps}: it must be at least 1")
        if not 0.0 <= self.ms[0] <= self.ms[1] < float("inf"):
            raise SimulationError(f"hiccups.ms is {self.ms}: give the least and the most, at least 0")
        if not 0.0 <= self.caught_up <= 1.0:
            raise SimulationError(f"hiccups.caught_up is {self.caught_up}: it must lie in 0..1")


NO_HICCUPS = Hiccups()


class ServerHiccups:
    """The hiccups of N servers; draws are by step number, so an environment's do not depend on N."""

    def __init__(self, hiccups: Hiccups, n_envs: int) -> None:
        self._hiccups = hiccups
        self._keys: Keys = np.zeros(n_envs, np.uint64)
        self._left = np.zeros(n_envs, np.int64)
        self._host_ms, self._owed_ms = np.zeros(n_envs), np.zeros(n_envs)
        self._catches_up = np.zeros(n_envs, np.bool_)

    def begin(self, envs: Ints, keys: Keys) -> None:
        """Begin ``envs`` again with the environments' keys ``keys``; both shape (m,)."""
        self._keys[envs] = stream_keys(keys, Stream.HICCUP)
        self._left[envs] = 0
        self._owed_ms[envs] = 0.0

    def apply(self, step_ms: Floats, step: Ints, running: Flags) -> Floats:
        """What steps last that would take ``step_ms``; shape (N,). Where nothing is ``running``, no time."""
        hiccups = self._hiccups
        if hiccups.per_s == 0.0:
            return step_ms
        begins, length, host, kind = uniform(
            self._keys[:, None], step[:, None] * _DRAWS + np.arange(_DRAWS)
        ).T
        starts = running & (self._left == 0) & (begins < hiccups.per_s * step_ms * 1e-3)
        low, high = hiccups.ms
        self._left[starts] = 1 + (length[starts] * hiccups.most_steps).astype(np.int64)
        self._host_ms[starts] = low + (high - low) * host[starts]
        self._catches_up[starts] = kind[starts] < hiccups.caught_up
        held = running & (self._left > 0)
        added = np.where(held, np.maximum(self._host_ms - step_ms, 0.0), 0.0)
        paid = np.where(running & ~held, np.minimum(self._owed_ms, (1.0 - _SHORTEST) * step_ms), 0.0)
        self._owed_ms = np.minimum(self._owed_ms + added * self._catches_up - paid, step_ms)
        self._left -= held
        return step_ms + added - paid
