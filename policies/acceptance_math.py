"""Small functions of the acceptance estimator: censored counts, sigmoids, accept lengths in columns."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_ONE = np.ones(1)


def censored_counts(num_positions: int, num_steps: int) -> Floats:
    """Successes, then trials, by position, in columns by accepted drafts: (2 num_positions, num_steps + 1).

    Nothing is seen after the first rejection.
    """
    position, accepted = np.arange(num_positions)[:, None], np.arange(num_steps + 1)
    return np.concatenate([position < accepted, position < np.minimum(accepted + 1, num_steps)]).astype(float)


def sigmoid(x: Floats) -> Floats:
    """Logit to probability."""
    return 1.0 / (1.0 + np.exp(-x))


def mean_sigmoid(x: Floats, variance: Floats | float) -> Floats:
    """Mean of the sigmoid of a normal variable (MacKay's approximation)."""
    return sigmoid(x / np.sqrt(1.0 + math.pi / 8 * variance))


def accept_length(survival: Floats) -> Floats:
    """Accept length at num_steps 0 and up, from the chance of each draft: (K,) to (K + 1,)."""
    return np.add.accumulate(np.concatenate([_ONE, survival]))


def accept_length_gradient(acceptance: Floats) -> Floats:
    """Derivative of each column's accept length at k by its acceptance at j, shape (K + 1, K, requests)."""
    lengths = np.ones((len(acceptance) + 1, acceptance.shape[1]))
    np.add.accumulate(np.multiply.accumulate(acceptance, 0), 0, out=lengths[1:])
    lengths[1:] += 1.0
    return np.maximum(lengths[:, None, :] - lengths[None, :-1, :], 0.0) / acceptance
