"""Expected values are worked out by hand; the fit is given cells that a model made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specgov.env.fitting import Cells, fit_parametric, isotonic, isotonic_grid, isotonic_plane, predict
from specgov.policies.step_time import DRAFTS, HARDWARE, MODELS, Coefficients, roofline_prior


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1, 3, 2, 4], [1, 1, 1, 1], [1, 2.5, 2.5, 4]),
        ([3, 2, 1], [1, 1, 1], [2, 2, 2]),
        ([3, 1], [1, 3], [1.5, 1.5]),
        ([1, 5, 4, 0], [1, 1, 1, 2], [1, 2.25, 2.25, 2.25]),
    ],
)
def test_pool_adjacent_violators(values: list[float], weights: list[float], expected: list[float]) -> None:
    assert isotonic(np.array(values, float), np.array(weights, float)) == pytest.approx(expected)


@given(hnp.arrays(np.float64, (4, 5), elements=st.floats(1, 100)))
def test_a_smoothed_plane_ascends_both_ways(values: np.ndarray) -> None:
    plane = isotonic_plane(values, np.ones_like(values))
    assert (np.diff(plane, axis=0) >= 0).all()
    assert (np.diff(plane, axis=1) >= -1e-9).all()
    assert values.min() - 1e-9 <= plane.min()
    assert plane.max() <= values.max() + 1e-9


def test_an_ascending_plane_stays_as_it_is() -> None:
    values = np.add.outer(np.arange(4.0), np.arange(5.0))
    assert (isotonic_plane(values, np.ones_like(values)) == values).all()


@settings(max_examples=25, deadline=None)
@given(hnp.arrays(np.float64, (3, 3, 4), elements=st.floats(1, 100)), st.randoms())
def test_a_smoothed_grid_ascends_all_three_ways(values: np.ndarray, random: Any) -> None:
    weights = np.array([random.choice([1e-3, 5.0, 50.0]) for _ in range(values.size)]).reshape(values.shape)
    grid = isotonic_grid(values, weights)
    for axis in range(3):
        assert (np.diff(grid, axis=axis) >= -1e-9).all()
    assert values.min() - 1e-9 <= grid.min()
    assert grid.max() <= values.max() + 1e-9


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_falls_becomes_the_weighted_mean_along_each_axis(axis: int) -> None:
    """4 of weight 1 before 1 of weight 3: (4 + 3) / 4, whether by context, batch size or num_steps."""
    shape = tuple(2 if at == axis else 1 for at in range(3))
    grid = isotonic_grid(np.array([4.0, 1.0]).reshape(shape), np.array([1.0, 3.0]).reshape(shape))
    assert grid.ravel() == pytest.approx([1.75, 1.75])


def test_the_fit_finds_what_made_the_cells() -> None:
    """Cells made by a model with other coefficients are met within 1 %, from the default start."""
    start = roofline_prior(MODELS["llama-3.1-8b"], DRAFTS["llama-3.1-8b"], HARDWARE["H200"])
    truth = replace(
        start, coefficients=replace(Coefficients(), fixed_ms=2.0, compute_efficiency=0.8, token_us=3.0)
    )
    context, batch, tier = (
        axis.ravel()
        for axis in np.meshgrid([512.0, 4096.0], [1, 4, 16, 64, 256], [0, 1, 3, 7], indexing="ij")
    )
    ones = np.ones(len(batch))
    cells = Cells(context, batch, tier, ones > 0, ones, ones, ones, ones.astype(np.int64))
    cells = replace(cells, median_ms=predict(truth, cells))
    np.testing.assert_allclose(predict(fit_parametric(start, cells), cells), cells.median_ms, rtol=0.01)
