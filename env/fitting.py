"""Fits that calibration needs: isotonic smoothing, and the parametric step time to measured cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specgov.policies.step_time import Coefficients, ParametricStepTime

Array = NDArray[np.float64]

# How far a fit may go from its start, as the standard deviation of the natural logarithm.
PRIOR_SPREAD = {
    "fixed_ms": 1.0,
    "request_us": 1.0,
    "token_us": 1.0,
    "memory_efficiency": 0.15,
    "compute_efficiency": 0.3,
    "attention_efficiency": 0.1,
    "draft_pass_ms": 0.7,
    "draft_extend_ms": 0.7,
    "overlap": 0.5,
    "novelty": 1.0,
}
# Relative error of a median that the fit takes as normal.
CELL_ERROR = 0.03
# A tenth of the last digit that a grid keeps: what smoothing may leave to be put right.
NEGLIGIBLE_MS = 1e-5


@dataclass(frozen=True, eq=False)
class Cells:
    """Measured cells as columns: where, on which kind of server, and how long."""

    context_tokens: Array
    batch_size: NDArray[np.int64]
    num_steps: NDArray[np.int64]
    can_speculate: NDArray[np.bool_]
    median_ms: Array
    p10_ms: Array
    p90_ms: Array
    count: NDArray[np.int64]

    def where(self, mask: NDArray[np.bool_]) -> Cells:
        """The cells that ``mask`` picks."""
        return Cells(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.median_ms)


def isotonic(values: Array, weights: Array) -> Array:
    """The ascending sequence nearest to ``values`` in weighted squares (pool adjacent violators)."""
    means: list[float] = []
    masses: list[float] = []
    sizes: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        means.append(float(value))
        masses.append(float(weight))
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mass = masses[-2] + masses[-1]
            means[-2:] = [(means[-2] * masses[-2] + means[-1] * masses[-1]) / mass]
            masses[-2:] = [mass]
            sizes[-2:] = [sizes[-2] + sizes[-1]]
    return np.repeat(means, sizes)


def isotonic_plane(values: Array, weights: Array) -> Array:
    """``values`` (B, K) made ascending along both axes: smoothed along one and the other in turn."""
    plane = values.copy()
    for _ in range(200):
        plane = np.apply_along_axis(_packed_isotonic, 0, np.concatenate([plane, weights]))
        plane = np.apply_along_axis(_packed_isotonic, 1, np.concatenate([plane, weights], axis=1))
        if (np.diff(plane, axis=0) >= 0).all():
            return plane
    # What is left after so many rounds is far below a microsecond.
    return np.asarray(np.maximum.accumulate(plane, axis=0))


def isotonic_grid(values: Array, weights: Array) -> Array:
    """``values`` (C, B, K) made ascending along all three axes: its planes, then one axis after the other."""
    grid = np.stack([isotonic_plane(*each) for each in zip(values, weights, strict=True)])
    if (np.diff(grid, axis=0) >= 0).all():
        return grid
    for _ in range(200):
        for axis in range(3):
            grid = np.apply_along_axis(_packed_isotonic, axis, np.concatenate([grid, weights], axis))
        if all((np.diff(grid, axis=axis) >= -NEGLIGIBLE_MS).all() for axis in range(3)):
            break
    for axis in range(3):
        grid = np.maximum.accumulate(grid, axis=axis)
    return grid


def _packed_isotonic(packed: Array) -> Array:
    values, weights = np.split(packed, 2)
    return isotonic(values, weights)


def predict(model: ParametricStepTime, cells: Cells) -> Array:
    """What ``model`` says of each cell."""
    total = cells.batch_size * cells.context_tokens
    with_spec = model.step_ms(cells.batch_size, cells.num_steps, total)
    without = model.without_speculation().step_ms(cells.batch_size, cells.num_steps, total)
    return np.where(cells.can_speculate, with_spec, without)


def fit_parametric(start: ParametricStepTime, cells: Cells) -> ParametricStepTime:
    """Fit the coefficients to ``cells``: least squares of relative errors, held to the start.

    ``PRIOR_SPREAD`` says how firmly. Deterministic; the coefficients are rounded to four digits, so that the
    last bits of a linear algebra library do not show. ``novelty`` is fitted for a mixture of experts only,
    and nothing of tensor parallelism is fitted.
    """
    names = [name for name in PRIOR_SPREAD if name != "novelty" or start.model.num_experts]
    origin = np.log([getattr(start.coefficients, name) for name in names])
    spread = np.array([PRIOR_SPREAD[name] for name in names])

    def at(logs: Array) -> ParametricStepTime:
        values = dict(zip(names, (float(value) for value in np.exp(logs)), strict=True))
        return replace(start, coefficients=replace(start.coefficients, **values))

    def residuals(logs: Array) -> Array:
        errors = np.log(predict(at(logs), cells) / cells.median_ms) / CELL_ERROR
        return np.concatenate([errors, (logs - origin) / spread])

    fitted = at(least_squares(residuals, origin)).coefficients
    rounded = {name: float(f"{value:.4g}") for name, value in fitted.as_dict().items()}
    return replace(start, coefficients=Coefficients(**rounded))


def least_squares(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Minimise the sum of squared residuals (Levenberg-Marquardt, central differences)."""
    point, damping = start.copy(), 1e-2
    errors = residuals(point)
    for _ in range(500):
        jacobian = _jacobian(residuals, point)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ errors
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
        tried = residuals(point + step)
        gain = errors @ errors - tried @ tried
        if gain <= 0:
            damping *= 4
            if damping > 1e10:
                break
            continue
        point, errors, damping = point + step, tried, damping / 3
        if np.abs(step).max() < 1e-9:
            break
    return point


def _jacobian(residuals: Callable[[Array], Array], point: Array) -> Array:
    width = 1e-5
    shifts = width * np.eye(len(point))
    return np.stack([(residuals(point + s) - residuals(point - s)) / (2 * width) for s in shifts], axis=1)
