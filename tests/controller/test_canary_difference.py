"""What a canary compares: the difference of two output rates, and its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specgov.controller.canary import Arm, Block, difference, student_975


def arm(*blocks: tuple[float, float]) -> Arm:
    """Blocks of 10 ms with (tokens, batch size before), each after one of rate 1."""
    found = Arm()
    for tokens, batch_size in blocks:
        found.add(Block(False, (0.0, math.log(batch_size)), tokens, 10.0))
    return found


def test_difference_and_interval_by_hand() -> None:
    # All blocks began alike, so that the least squares are means. Candidate: 10 blocks with log rates of
    # log 1.2 -+ 0.1 by turns: residual sum of squares 0.1, over 10 - 3 degrees of freedom and 10 blocks a
    # variance of 0.1 / 7 / 10. Policy: 10 blocks at rate 1, no variance.
    spread = math.exp(0.1)
    candidate = arm(*[(12.0 / spread, 4.0), (12.0 * spread, 4.0)] * 5)
    policy = arm(*[(10.0, 4.0)] * 10)
    half = 2.36462 * math.sqrt(0.1 / 7 / 10)  # 97.5 % quantile of t with 7 degrees of freedom, from tables
    found = difference(candidate, policy)
    assert found is not None
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(1.2 * math.exp(-half) - 1, abs=1e-3)
    assert found.high == pytest.approx(1.2 * math.exp(half) - 1, abs=1e-3)
    assert difference(candidate, arm(*[(10.0, 4.0)] * 9)) is None


def test_the_load_before_a_block_is_no_merit_of_its_policy() -> None:
    # Output goes with the root of the batch size, and the candidate happened to get the larger batches; at
    # each size it is 5 % better.
    candidate = arm(*[(10.5 * math.sqrt(size), size) for size in (16.0, 32.0, 64.0, 128.0)] * 5)
    policy = arm(*[(10.0 * math.sqrt(size), size) for size in (1.0, 2.0, 4.0, 16.0)] * 5)
    found = difference(candidate, policy)
    assert found is not None
    assert found.value == pytest.approx(0.05)
    assert found.high - found.low < 1e-5


@pytest.mark.parametrize(
    ("freedom", "tabulated"), [(7, 2.36462), (10, 2.22814), (30, 2.04227), (120, 1.97993)]
)
def test_students_quantiles(freedom: int, tabulated: float) -> None:
    assert student_975(freedom) == pytest.approx(tabulated, rel=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_interval_covers_the_truth_as_often_as_it_says(share: float) -> None:
    """Loads drift by a factor of ten; the true difference of 3 % lies in 95 % of the intervals."""
    rng, covered, widths, runs = np.random.default_rng(5), 0, [], 400
    for _ in range(runs):
        arms = {True: Arm(), False: Arm()}
        load = np.sin(np.linspace(0, 9, 400)) + np.cumsum(rng.normal(0, 0.05, 400))
        theirs = rng.random(400) < share
        noise = rng.normal(0, 0.1, 400)
        log_rate = load + np.where(theirs, math.log(1.03), 0.0) + noise
        batch = load + rng.normal(0, 0.1, 400)
        ms = 600 * rng.uniform(0.5, 1.5, 400)
        for b in range(1, 400):
            before = (float(log_rate[b - 1]), float(batch[b]))
            block = Block(bool(theirs[b]), before, float(np.exp(log_rate[b]) * ms[b]), float(ms[b]))
            arms[block.by_candidate].add(block)
        found = difference(arms[True], arms[False])
        assert found is not None
        covered += found.low <= 0.03 <= found.high
        widths.append(found.high - found.low)
    assert 0.92 <= covered / runs <= 0.98  # 0.95 within three standard deviations of 400 draws
    # Plain rates scatter by a factor of two or so, which 40 blocks of one arm would average to some 30 %.
    assert np.median(widths) < 0.1
