"""Counter-based randomness: every draw is a pure function of what it is for.

A key is the state of a SplitMix64 generator, and `draw(key, i)` is its output number i without the ones
before it. Outputs serve as keys in turn, so draws form a tree: seed -> environment -> stream -> request
-> draw. One environment therefore sees the same draws alone and among a thousand, in any order, without a
loop.

Source of the generator: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014, doi:10.1145/2660193.2660195 (gamma and the mixing function `mix64variant13`,
after D. Stafford).
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32, _41, _12 = (np.uint64(n) for n in (30, 27, 31, 32, 41, 12))
_LOW_HALF = np.uint64(0xFFFFFFFF)
_ALL_BITS = 0xFFFFFFFFFFFFFFFF


class Stream(enum.IntEnum):
    """What the draws of an environment are for. Changing a number changes every seeded run."""

    REQUEST = 0  # lengths, classes: the workload
    ARRIVAL = 1  # inter-arrival times: the workload
    ACCEPTANCE = 2  # one key for each request
    STEP_NOISE = 3
    STALL = 4
    REGIME = 5
    PHASE = 6  # offsets of scripts and scenarios between environments
    EPISODE = 7
    HICCUP = 8


def mix64(values: Keys) -> Keys:
    """SplitMix64's mixing function: a bijection of 64-bit integers, element by element."""
    return _mix_in_place(values.copy())


def _mix_in_place(values: Keys) -> Keys:
    values ^= values >> _30
    values *= _MULTIPLIER_1
    values ^= values >> _27
    values *= _MULTIPLIER_2
    values ^= values >> _31
    return values


def environment_keys(seed: int, n_envs: int) -> Keys:
    """Keys of `n_envs` environments, shape (n_envs,): environment e has the key of seed + e.

    The same as gymnasium's vector environments, which seed their environment e with seed + e.
    """
    seeds: Keys = np.arange(n_envs, dtype=np.uint64)
    seeds += np.uint64(seed & _ALL_BITS)
    return mix64(seeds)


def draw(keys: Keys, index: NDArray[Any] | int) -> Keys:
    """Output number `index` (from 0) of the SplitMix64 generator with the state `keys`; the two broadcast.

    Args:
        keys: an array (not a scalar), any shape.
        index: not negative.

    """
    if isinstance(index, int):
        return _mix_in_place(keys + np.uint64((index + 1) * int(GOLDEN_GAMMA) & _ALL_BITS))
    offset = index.astype(np.uint64)
    offset *= GOLDEN_GAMMA
    offset += GOLDEN_GAMMA
    return _mix_in_place(keys + offset)


def stream_keys(keys: Keys, stream: Stream) -> Keys:
    """The keys of one stream of each environment; same shape."""
    return draw(keys, int(stream))


def to_uniform(bits: Keys) -> NDArray[np.float64]:
    """Uniforms strictly between 0 and 1 with 52 random bits, from random integers."""
    return ((bits >> _12).astype(np.float64) + 0.5) * 2.0**-52


def to_uniform_f32(bits: Keys) -> NDArray[np.float32]:
    """Uniforms strictly between 0 and 1 with 23 random bits, from random integers."""
    uniforms = (bits >> _41).astype(np.float32)
    uniforms += np.float32(0.5)
    uniforms *= np.float32(2.0**-23)
    return uniforms


def to_normal(bits: Keys) -> NDArray[np.float64]:
    """Standard normals, one from the two halves of each random integer."""
    radius, angle = _polar(bits)
    return radius * np.cos(angle)


def to_normal_pair(bits: Keys) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two independent standard normals from the two halves of each random integer."""
    radius, angle = _polar(bits)
    return radius * np.cos(angle), radius * np.sin(angle)


def _polar(bits: Keys) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Box and Muller's radius and angle (Ann. Math. Statist. 29, 1958, 610-611)."""
    radius = np.sqrt(-2.0 * np.log(((bits >> _32).astype(np.float64) + 0.5) * 2.0**-32))
    return radius, (bits & _LOW_HALF).astype(np.float64) * (2.0 * np.pi * 2.0**-32)


def uniform(keys: Keys, index: NDArray[Any] | int) -> NDArray[np.float64]:
    """Uniforms strictly between 0 and 1: draw number `index` of each key."""
    return to_uniform(draw(keys, index))


def normal(keys: Keys, index: NDArray[Any] | int) -> NDArray[np.float64]:
    """Standard normals: draw number `index` of each key."""
    return to_normal(draw(keys, index))
