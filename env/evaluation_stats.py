"""From rows of results to shares of the oracle, with bootstrap intervals and performance profiles.

A share compares a contender with the oracle on the same condition and seed, so that what the seed brought is
in both. Larger is better for every share: of a latency it is the oracle's over the contender's.

Intervals: the two-level bootstrap (Davison and Hinkley, "Bootstrap Methods and their Application", 1997,
section 3.8): conditions are drawn with replacement, and for each of them its seeds; the interval is that of
percentiles. It says how far the mean might be from that over all conditions like these. All contenders are
resampled alike, so that differences between two of them are compared within each resample.

Performance profiles: Dolan and More, "Benchmarking optimization software with performance profiles", Math.
Program. 2002, with the oracle in place of the best contender.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgov.env.contenders import ORACLE
from specgov.env.evaluation_results import Results

Floats = NDArray[np.float64]

HIGHER_IS_BETTER = ("output_rate", "tokens_per_request_s", "goodput")
LOWER_IS_BETTER = ("tpot_ms", "tpot_p99_ms", "ttft_ms", "ttft_p99_ms")
ITSELF = ("efficiency", "late_efficiency")
"""Shares of the oracle already."""

RESAMPLES = 2000
COVERAGE = 0.95

BySeed: TypeAlias = dict[int, float]
Shares: TypeAlias = dict[str, BySeed]
"""By condition and seed."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Standing:
    """How a contender stands over conditions: mean with interval, and its worst condition."""

    rule: str
    share: Interval
    worst: float
    worst_condition: str
    conditions: int


def rules_of(results: Results, conditions: Iterable[str]) -> list[str]:
    """The contenders of some conditions, in the file's order, the oracle left out."""
    wanted = set(conditions)
    found = dict.fromkeys(row["rule"] for row in results.rows if row["condition"] in wanted)
    return [rule for rule in found if rule != ORACLE]


def shares_of(results: Results, rule: str, metric: str, conditions: Iterable[str]) -> Shares:
    """A contender's shares of the oracle, where both have the figure."""
    values = _values(results, rule, metric, conditions)
    if metric in ITSELF:
        return values
    oracle = _values(results, ORACLE, metric, conditions)
    shares: Shares = {}
    for condition, by_seed in values.items():
        for seed, value in by_seed.items():
            best = oracle.get(condition, {}).get(seed)
            if best is None or best <= 0 or value < 0 or (value == 0 and metric in LOWER_IS_BETTER):
                continue
            share = best / value if metric in LOWER_IS_BETTER else value / best
            shares.setdefault(condition, {})[seed] = share
    return shares


def ratio_of(above: Shares, below: Shares) -> Shares:
    """One contender's figures over another's, where both have them."""
    return {
        condition: {seed: value / below[condition][seed] for seed, value in both.items()}
        for condition, by_seed in above.items()
        if condition in below
        and (both := {s: v for s, v in by_seed.items() if below[condition].get(s, 0.0) > 0})
    }


def mean_of(results: Results, rule: str, metric: str, conditions: Iterable[str]) -> float | None:
    """The plain mean of a figure over conditions and seeds."""
    values = [v for by_seed in _values(results, rule, metric, conditions).values() for v in by_seed.values()]
    return float(np.mean(values)) if values else None


def standing(rule: str, shares: Shares, seed: int = 0) -> Standing | None:
    """Mean, interval and worst condition; None where there are no shares."""
    if not shares:
        return None
    by_condition = {name: float(np.mean(list(by_seed.values()))) for name, by_seed in shares.items()}
    worst = min(by_condition, key=lambda name: by_condition[name])
    return Standing(rule, interval(shares, seed), by_condition[worst], worst, len(by_condition))


def interval(shares: Shares, seed: int = 0) -> Interval:
    """The mean over conditions of the mean over seeds, with its bootstrap interval.

    Args:
        shares: not empty.
        seed: of the resampling.

    """
    means = resampled_means(shares, seed)
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    mean = np.mean([np.mean(list(by_seed.values())) for by_seed in shares.values()])
    return Interval(float(mean), float(low), float(high))


def difference(first: Shares, second: Shares, seed: int = 0) -> Interval | None:
    """First less second over what both played; None where that is nothing."""
    both = {
        condition: {s: value - second[condition][s] for s, value in by_seed.items() if s in second[condition]}
        for condition, by_seed in first.items()
        if condition in second
    }
    both = {condition: by_seed for condition, by_seed in both.items() if by_seed}
    return interval(both, seed) if both else None


def resampled_means(shares: Shares, seed: int, resamples: int = RESAMPLES) -> Floats:
    """Means of resamples of conditions and, within each, of seeds; shape (resamples,)."""
    rng = np.random.default_rng(seed)
    conditions = [np.array(list(by_seed.values())) for by_seed in shares.values()]
    drawn = rng.integers(len(conditions), size=(resamples, len(conditions)))
    uniforms = rng.random((resamples, len(conditions), max(len(c) for c in conditions)))
    sizes = np.array([len(c) for c in conditions])
    table = np.zeros((len(conditions), sizes.max()))
    for row, values in zip(table, conditions, strict=True):
        row[: len(values)] = values
    picks = (uniforms * sizes[drawn][:, :, None]).astype(np.int64)
    counted = np.arange(sizes.max()) < sizes[drawn][:, :, None]
    values = np.where(counted, table[drawn[:, :, None], picks], 0.0)
    return np.asarray((values.sum(axis=2) / sizes[drawn]).mean(axis=1))


def performance_profile(shares: Shares, at: Sequence[float]) -> list[float]:
    """The share of conditions in which the contender's mean share is at least ``at``, for each of these."""
    means = np.array([np.mean(list(by_seed.values())) for by_seed in shares.values()])
    return [float((means >= level).mean()) if len(means) else 0.0 for level in at]


def headline_shares(results: Results, rule: str, conditions: Iterable[str]) -> Shares:
    """A contender's shares of what matters: output rate in closed loops, 1 / time per token in open ones."""
    wanted = list(conditions)
    closed = [name for name in wanted if results.conditions[name].is_closed_loop]
    opened = [name for name in wanted if not results.conditions[name].is_closed_loop]
    return shares_of(results, rule, "output_rate", closed) | shares_of(
        results, rule, "tokens_per_request_s", opened
    )


def _values(results: Results, rule: str, metric: str, conditions: Iterable[str]) -> Shares:
    wanted = set(conditions)
    values: Shares = {}
    for row in results.rows:
        value: Any = row.get(metric)
        if row["rule"] == rule and row["condition"] in wanted and value is not None:
            values.setdefault(row["condition"], {})[row["seed"]] = float(value)
    return values
