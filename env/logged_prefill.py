"""What prefill costs, out of a decision log, which has no row for it.

A prefill shows in the steps around it. Of four steps a, b, c, d with prefill between b and c alone, the time
from a's result to d's holds the steps b, c and d and what came between; the rest is prefill, and spread
over as many iterations as there are step numbers missing (one, where an engine numbers decode steps only).
Three steps, since an overlapping loop lets the steps next to a prefill wait for it.

How many tokens were prefilled can be known only where the batch grew: its sequence lengths grew by the new
requests' prompts then, if no request ended in that moment. Some did, so the slope is Theil and Sen's: the
median of those between two interruptions each (Sen, J. Am. Stat. Assoc. 63, 1968).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specgov.policies.step_time import PrefillCost
from specgov.policies.types import StepTime

LEAST_INTERRUPTIONS = 20
_LONGEST_S = 5.0
"""A longer time between two steps is a pause, not prefill."""
_LEAST_RANGE = 2.0
"""So many times the tokens of the small prefills (first decile) the large ones (last) must have."""
_MOST_COMPARED = 400


class Interruption(NamedTuple):
    """Prefill between two decode steps.

    ``iterations`` of it; ``tokens`` in all, 0 where not known; ``passed_ms`` with the three decode steps,
    whose batch size, num_steps and sum of sequence lengths follow.
    """

    iterations: int
    tokens: int
    passed_ms: float
    steps: tuple[tuple[int, int, int], ...]


class Interruptions:
    """Finds the interruptions of one engine's rows, given in order."""

    def __init__(self) -> None:
        self.found: list[Interruption] = []
        self._last: deque[Mapping[str, Any]] = deque(maxlen=4)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the next row of kind ``step`` in; what it lacks, it tells nothing of."""
        self._last.append(row)
        if len(self._last) == 4 and (found := _interruption(*self._last)) is not None:
            self.found.append(found)


def _interruption(*four: Mapping[str, Any]) -> Interruption | None:
    _, b, c, d = four
    times = [time for row in four if isinstance(time := row.get("time_s"), int | float)]
    if len(times) < len(four):
        return None
    lost = any(row.get("reports_dropped") or {"warm_up", "after_idle"} & set(row["flags"]) for row in four)
    passes = [later - before for before, later in pairwise(times)]
    if lost or min(passes) < 0 or max(passes) > _LONGEST_S:
        return None
    missing = [later["step_id"] - before["step_id"] - 1 for before, later in pairwise(four)]
    interrupted = ["after_prefill" in row["flags"] for row in (b, c, d)]
    if interrupted != [False, True, False] or missing[0] or missing[2] or missing[1] < 0:
        return None
    output = sum((drafts + 1) * count for drafts, count in enumerate(b.get("accepted") or ()))
    joined = c["sum_seq_len_tokens"] - b["sum_seq_len_tokens"] - output
    grew = c["batch_size"] > b["batch_size"]
    steps = tuple((row["batch_size"], row["num_steps"], row["sum_seq_len_tokens"]) for row in (b, c, d))
    return Interruption(
        max(missing[1], 1), max(joined, 0) if grew else 0, 1e3 * (times[-1] - times[0]), steps
    )


@dataclass(frozen=True)
class MeasuredPrefill:
    """A cost with what it rests on: interruptions, and those whose tokens are known.

    ``tokens_told`` is whether the part for a token was measured; else it was given.
    """

    cost: PrefillCost
    interruptions: int
    with_tokens: int
    tokens_told: bool


def measured_prefill(
    found: Sequence[Interruption], step_time: StepTime, ms_per_token: float
) -> MeasuredPrefill | None:
    """What a chunk and a token cost, by medians; None where there are too few interruptions to say.

    Args:
        found: interruptions of engines of one kind.
        step_time: what decode steps take.
        ms_per_token: what a token costs, where these say nothing of it. Where no tokens are known at all
            the part for a chunk holds those of the usual prompt.

    """
    if len(found) < LEAST_INTERRUPTIONS:
        return None
    batch, tier, context = np.array([each.steps for each in found]).transpose(2, 0, 1)
    iterations = np.array([each.iterations for each in found])
    decoding_ms = step_time.step_ms(batch, tier, context).sum(axis=1)
    each_ms = (np.array([each.passed_ms for each in found]) - decoding_ms) / iterations
    tokens = np.array([each.tokens for each in found]) / iterations
    known = tokens > 0
    if known.sum() < LEAST_INTERRUPTIONS:
        fixed = float(np.median(each_ms))
        return MeasuredPrefill(_cost(fixed, ms_per_token), len(found), int(known.sum()), tokens_told=False)
    low, high = np.quantile(tokens[known], (0.1, 0.9))
    told = bool(high >= _LEAST_RANGE * low)
    slope = max(_slope(tokens[known], each_ms[known]), 0.0) if told else ms_per_token
    fixed = float(np.median(each_ms[known] - slope * tokens[known]))
    return MeasuredPrefill(_cost(fixed, slope), len(found), int(known.sum()), told)


def _cost(fixed_ms: float, ms_per_token: float) -> PrefillCost:
    return PrefillCost(round(max(fixed_ms, 0.0), 4), round(ms_per_token, 6))


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The median slope between two points, of at most ``_MOST_COMPARED`` points spread over all."""
    chosen = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_COMPARED)).astype(int))
    first, second = np.triu_indices(len(chosen), 1)
    run = x[chosen][second] - x[chosen][first]
    rise = y[chosen][second] - y[chosen][first]
    return float(np.median(rise[run != 0] / run[run != 0]))
