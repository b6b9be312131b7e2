"""Numbers of a log: totals, and the same in stretches of time for the plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specgov.controller.report.model import Model, spent_ms
from specgov.controller.report.steps import Steps

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_BINS = 120
STEPS_A_BIN = 20


@dataclass(frozen=True, slots=True)
class Totals:
    """An engine's log in numbers; rates in tokens per second, NaN where not known.

    ``decode_rate`` is over the steps' times (``spent_ms``), ``wall_rate`` over the clock. ``regret`` is the
    estimated share of output lost against the model's best tier at each step. ``error_median`` and
    ``error_p95`` are of the relative error of the expected step time at the tier that ran.
    """

    steps: int
    duration_s: float
    tokens: int
    wall_rate: float
    decode_rate: float
    accept_length: float
    switches: int
    own_rule_steps: int
    regret: float
    error_median: float
    error_p95: float


def totals(steps: Steps, model: Model | None) -> Totals:
    """The totals of an engine's steps."""
    duration_s = float(steps.time_s[-1] - steps.time_s[0])
    spent = spent_ms(steps, model)
    known = np.isfinite(spent)
    decode_ms, decoded = float(spent[known].sum()), int(steps.tokens[known].sum())
    live = int(steps.survived[:, 0].sum())
    errors = np.abs(time_ratio(steps, model) - 1)
    errors = errors[np.isfinite(errors)]
    return Totals(
        steps=len(steps),
        duration_s=duration_s,
        tokens=int(steps.tokens.sum()),
        wall_rate=_share(steps.tokens.sum(), duration_s),
        decode_rate=_share(1000.0 * decoded, decode_ms),
        accept_length=_share(steps.tokens.sum(), live),
        switches=int(np.count_nonzero(np.diff(steps.num_steps))),
        own_rule_steps=int(steps.own_rule.sum()),
        regret=_regret(*rate_time(steps, model)),
        error_median=float(np.median(errors)) if len(errors) else float("nan"),
        error_p95=float(np.quantile(errors, 0.95)) if len(errors) else float("nan"),
    )


def time_ratio(steps: Steps, model: Model | None) -> Floats:
    """Measured step time over the expected one at the tier that ran, (S,); NaN where not known."""
    if model is None:
        return np.full(len(steps), np.nan)
    expected = model.ms[np.arange(len(steps)), steps.tier_index]
    return np.asarray(steps.ms / expected)


def rate_time(steps: Steps, model: Model | None) -> tuple[Floats, Floats]:
    """Tokens expected in each step's time at the tier that ran, and at the best, (S,); NaN if not known."""
    if model is None:
        return np.full(len(steps), np.nan), np.full(len(steps), np.nan)
    ran = model.rate[np.arange(len(steps)), steps.tier_index]
    best = np.where(np.isfinite(ran), model.best, np.nan)
    spent = spent_ms(steps, model)
    return ran * spent / 1000.0, best * spent / 1000.0


class Bins:
    """Stretches of equal time; ``middles_s`` and ``edges_s`` are wall clock."""

    def __init__(self, steps: Steps, most: int = MOST_BINS) -> None:
        count = int(np.clip(len(steps) // STEPS_A_BIN, 1, most))
        first, last = float(steps.time_s[0]), float(steps.time_s[-1])
        self.edges_s = np.linspace(first, last if last > first else first + 1.0, count + 1)
        self.middles_s = (self.edges_s[:-1] + self.edges_s[1:]) / 2
        self.of_step = np.clip(np.searchsorted(self.edges_s, steps.time_s, "right") - 1, 0, count - 1)

    @property
    def width_s(self) -> float:
        """Of each."""
        return float(self.edges_s[1] - self.edges_s[0])

    def __len__(self) -> int:
        return len(self.middles_s)

    def sums(self, values: Floats | Ints | NDArray[np.bool_]) -> Floats:
        """Sum by bin; NaN counts as nothing."""
        numbers = np.nan_to_num(np.asarray(values, np.float64))
        return np.bincount(self.of_step, numbers, len(self)).astype(np.float64)

    def quantiles(self, values: Floats | Ints, *shares: float) -> list[Floats]:
        """These quantiles by bin, NaN where a bin has no value."""
        return [self._each(values, lambda part, q=q: float(np.quantile(part, q))) for q in shares]  # type: ignore[misc]

    def _each(self, values: Floats | Ints, reduce: Callable[[Floats], float]) -> Floats:
        values = np.asarray(values, np.float64)
        finite = np.isfinite(values)
        order = np.argsort(self.of_step[finite], kind="stable")
        ordered, bins = values[finite][order], self.of_step[finite][order]
        starts = np.searchsorted(bins, np.arange(len(self)))
        ends = np.searchsorted(bins, np.arange(len(self)), "right")
        return np.array(
            [
                reduce(ordered[start:end]) if end > start else np.nan
                for start, end in zip(starts, ends, strict=True)
            ]
        )


def tier_shares(steps: Steps, model: Model | None, bins: Bins) -> Floats:
    """Share of the steps' time at each tier, (bins, T); NaN where a bin has no steps."""
    spent = spent_ms(steps, model)
    typical = float(np.nanmedian(spent)) if np.isfinite(spent).any() else 1.0
    weight = np.where(np.isfinite(spent), spent, typical)
    by_tier = np.stack([bins.sums(weight * (steps.tier_index == i)) for i in range(len(steps.tiers))], axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(by_tier / by_tier.sum(axis=1, keepdims=True))


@dataclass(frozen=True, slots=True)
class TimeCell:
    """Steps of one tier in one range of batch sizes: medians in ms, and the median of measured / expected."""

    num_steps: int
    batch_size: float
    steps: int
    measured_ms: float
    expected_ms: float
    ratio: float


def time_cells(steps: Steps, model: Model, least_steps: int = 10) -> list[TimeCell]:
    """By tier and power of two of the batch size, where there are enough timed steps."""
    expected = model.ms[np.arange(len(steps)), steps.tier_index]
    usable = steps.timed & np.isfinite(expected)
    octave = np.floor(np.log2(np.maximum(steps.batch_size, 1))).astype(np.int64)
    cells = []
    for tier in steps.tiers:
        for power in range(int(octave.max()) + 1):
            here = usable & (steps.num_steps == tier) & (octave == power)
            if here.sum() >= least_steps:
                measured, wanted = steps.ms[here], expected[here]
                cells.append(
                    TimeCell(
                        tier,
                        float(np.median(steps.batch_size[here])),
                        int(here.sum()),
                        float(np.median(measured)),
                        float(np.median(wanted)),
                        float(np.median(measured / wanted)),
                    )
                )
    return cells


def _regret(ran: Floats, best: Floats) -> float:
    known = np.isfinite(ran) & np.isfinite(best)
    return 1.0 - _share(ran[known].sum(), best[known].sum()) if known.any() else float("nan")


def _share(upper: float, lower: float) -> float:
    return float(upper / lower) if lower > 0 else float("nan")
