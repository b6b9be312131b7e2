"""Scatter of single steps, drawn for many steps at once: drawn one by one they would cost a server dear."""

from __future__ import annotations

import numpy as np

from specgov.env.rng import Keys, Stream, normal, stream_keys, uniform
from specgov.env.server_types import Floats, Ints
from specgov.policies.step_time import StepNoise

_DRAWN_STEPS = 64


class ServerNoise:
    """The noise of N servers; step s of an environment has the same noise whatever happens before it."""

    def __init__(self, noise: StepNoise, n_envs: int) -> None:
        self._noise = noise
        self._is_none = noise.sigma == 0.0 and noise.stall_probability == 0.0
        self._keys: Keys = np.zeros(n_envs, np.uint64)
        self._envs = np.arange(n_envs)
        self._drawn_block = np.full(n_envs, -1)
        self._normal = np.zeros((n_envs, _DRAWN_STEPS))
        self._uniform = np.zeros((n_envs, _DRAWN_STEPS))

    def begin(self, envs: Ints, keys: Keys) -> None:
        """Begin ``envs`` again with the environments' keys ``keys``; both shape (m,)."""
        self._keys[envs] = keys
        self._drawn_block[envs] = -1

    def apply(self, step_ms: Floats, step: Ints) -> Floats:
        """What steps of the expected durations ``step_ms`` last; ``step`` is their number; shape (N,)."""
        if self._is_none:
            return step_ms
        block, place = np.divmod(step, _DRAWN_STEPS)
        undrawn = (block != self._drawn_block).nonzero()[0]
        if undrawn.size:
            self._draw(undrawn, block[undrawn])
        return self._noise.apply(step_ms, self._normal[self._envs, place], self._uniform[self._envs, place])

    def _draw(self, envs: Ints, block: Ints) -> None:
        steps = block[:, None] * _DRAWN_STEPS + np.arange(_DRAWN_STEPS)
        keys = self._keys[envs]
        self._normal[envs] = normal(stream_keys(keys, Stream.STEP_NOISE)[:, None], steps)
        self._uniform[envs] = uniform(stream_keys(keys, Stream.STALL)[:, None], steps)
        self._drawn_block[envs] = block
