"""The decision model: expected tokens and output rate by tier.

``E[tok | k] = sum over requests r of (1 + sum_{i=1..k} prod_{j<=i} p_rj)`` where ``p_rj`` is the probability
that draft j of request r is accepted given that the drafts before it were. The rate-optimal tier for a
stationary batch has the largest ``E[tok | k] / T(k)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def expected_accept_length(acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Expected accept length at every num_steps from 0 on.

    Args:
        acceptance: conditional acceptance by position, shape (..., K), each in [0, 1].

    Returns:
        shape (..., K + 1): entry k is ``1 + sum_{i<=k} prod_{j<=i} p_j``; entry 0 is 1.

    """
    survival = np.cumprod(acceptance, axis=-1)
    first = np.ones((*survival.shape[:-1], 1))
    return np.concatenate([first, 1.0 + np.cumsum(survival, axis=-1)], axis=-1)


def acceptance_from_accept_length(accept_length: float, num_steps: int) -> float:
    """The one acceptance probability, equal at all positions, that gives ``accept_length`` at ``num_steps``.

    Args:
        accept_length: 1..num_steps + 1, bonus token included.
        num_steps: the tier at which it was seen, at least 1.

    Raises:
        ValueError: the accept length cannot occur at that tier.

    """
    if num_steps < 1 or not 1.0 <= accept_length <= num_steps + 1:
        raise ValueError(
            f"accept length {accept_length} cannot occur at num_steps {num_steps}: it lies in "
            "1..num_steps + 1, and at num_steps 0 it says nothing about acceptance"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.sum(middle ** np.arange(num_steps + 1))) < accept_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def rate_optimal_tier(
    tiers: Sequence[int], expected_tokens: NDArray[np.float64], expected_ms: NDArray[np.float64]
) -> int:
    """The tier with the largest expected output rate; the smaller tier where two are equal.

    Args:
        tiers: num_steps of each tier, ascending.
        expected_tokens: output tokens of the whole batch in one step, shape (len(tiers),).
        expected_ms: duration of the step, shape (len(tiers),).

    """
    return tiers[int(np.argmax(expected_tokens / expected_ms))]
