"""The mixer against published values, independence of the number of environments, basic statistics."""

from __future__ import annotations

import numpy as np
import pytest

from specgov.env.rng import (
    Stream,
    draw,
    environment_keys,
    mix64,
    normal,
    stream_keys,
    to_uniform,
    to_uniform_f32,
    uniform,
)


def test_draws_are_splitmix64() -> None:
    # Seed 0: outputs of the reference code, https://prng.di.unimi.it/splitmix64.c. Seed 1234567: the five
    # numbers of the task at https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64.
    zero = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    other = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert draw(np.zeros(1, np.uint64), np.arange(3)).tolist() == zero
    assert draw(np.array([1234567], np.uint64), np.arange(5)).tolist() == other


def test_mixer_by_hand() -> None:
    # The published steps in Python's unbounded integers, cut to 64 bits; mix(0) is shifts and products of 0.
    def by_hand(value: int) -> int:
        mask = (1 << 64) - 1
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    values = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    assert mix64(np.array(values, np.uint64)).tolist() == [by_hand(v) for v in values]
    assert mix64(np.zeros(1, np.uint64))[0] == 0


def test_an_environment_does_not_depend_on_how_many_there_are() -> None:
    many = environment_keys(40, 1000)
    for e in (0, 1, 999):
        assert environment_keys(40 + e, 1)[0] == many[e]
    steps = np.arange(7)
    together = uniform(stream_keys(many, Stream.STALL)[:, None], steps)
    alone = uniform(stream_keys(environment_keys(40 + 5, 1), Stream.STALL)[:, None], steps)
    assert (together[5] == alone[0]).all()


def test_the_largest_seed_wraps() -> None:
    assert environment_keys(2**64 - 1, 2)[1] == environment_keys(0, 1)[0]
    assert environment_keys(-1, 1)[0] == environment_keys(2**64 - 1, 1)[0]


def test_draws_leave_their_arguments_alone() -> None:
    keys, index = np.array([5, 6], np.uint64), np.array([1, 2])
    draw(keys, index)
    assert keys.tolist() == [5, 6]
    assert index.tolist() == [1, 2]


@pytest.mark.parametrize("convert", [to_uniform, to_uniform_f32])
def test_uniforms_are_strictly_inside(convert) -> None:
    low, high = convert(np.array([0, 2**64 - 1], np.uint64))
    assert 0.0 < low < 1e-6
    assert 1.0 - 1e-6 < high < 1.0


def test_statistics() -> None:
    # 250,000 draws: the standard error of a uniform's mean is 0.29 / 500 = 0.0006, of a normal's 0.002 and of
    # its standard deviation 0.0014, of a correlation 0.002; the bounds are five of them. The seed is fixed.
    keys = stream_keys(environment_keys(7, 500), Stream.ACCEPTANCE)[:, None]
    uniforms, normals = uniform(keys, np.arange(500)), normal(keys, np.arange(500))
    assert abs(uniforms.mean() - 0.5) < 0.003
    assert abs(uniforms.var() - 1 / 12) < 0.001
    counts, _ = np.histogram(uniforms, bins=10, range=(0, 1))
    assert abs(counts / uniforms.size - 0.1).max() < 0.003
    assert abs(normals.mean()) < 0.01
    assert abs(normals.std() - 1.0) < 0.007
    assert abs((np.abs(normals) < 1.0).mean() - 0.6827) < 0.005
    # Neighbouring environments, draws and streams are unrelated.
    other = uniform(stream_keys(environment_keys(7, 500), Stream.STALL)[:, None], np.arange(500))
    for a, b in ((uniforms[:-1], uniforms[1:]), (uniforms[:, :-1], uniforms[:, 1:]), (uniforms, other)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
