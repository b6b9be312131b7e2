"""Targets of time per output token: which tiers would break them.

A step at tier k takes T(k) and brings the batch of b requests E(k) tokens. The mean time per output token is
``T(k) b / E(k)``. Its 99th percentile over requests cannot be more than that of a request none of whose
drafts is accepted, which gets one token a step: ``T(k)``, times the 99th percentile of measured over
expected step times. That is on the safe side: a deep tier is refused although few requests fare so badly.
"""

from __future__ import annotations

from specgov.controller.guard.config import LatencyTargets
from specgov.controller.guard.estimates import Estimates

_FIRST_P99_RATIO = 1.1
_QUANTILE = 0.99
_STEP = 0.02


class Latency:
    """The targets of one engine, and how far step times scatter above what is expected.

    Attributes: has_target: whether anything is to be kept.

    """

    def __init__(self, targets: LatencyTargets) -> None:
        self._mean_ms = targets.tpot_mean_ms
        self._p99_ms = targets.tpot_p99_ms
        self._p99_ratio = _FIRST_P99_RATIO
        self.has_target = targets.tpot_mean_ms is not None or targets.tpot_p99_ms is not None

    def observe(self, ratio: float) -> None:
        """A step took ``ratio`` times what was expected: follow the percentile (stochastic approximation)."""
        move = _QUANTILE if ratio > self._p99_ratio else _QUANTILE - 1.0
        self._p99_ratio = max(self._p99_ratio * (1.0 + _STEP * move), 1.0)

    def excess(self, estimates: Estimates) -> list[float]:
        """By tier, what is expected over the target that it is nearest to breaking; up to 1 it keeps all."""
        by_tier = []
        for tokens, ms in zip(estimates.tokens, estimates.ms, strict=True):
            ratios = [0.0]
            if self._mean_ms is not None:
                ratios.append(ms * estimates.batch_size / tokens / self._mean_ms)
            if self._p99_ms is not None:
                ratios.append(ms * self._p99_ratio / self._p99_ms)
            by_tier.append(max(ratios))
        return by_tier

    def instead(self, estimates: Estimates, excess: list[float]) -> int:
        """Index of the tier for those that break a target: of those that keep all the one with the largest
        output rate, and where none does, the nearest."""
        keeping = [tier for tier, ratio in enumerate(excess) if ratio <= 1.0]
        if keeping:
            return estimates.best(keeping)
        return min(range(len(excess)), key=excess.__getitem__)
