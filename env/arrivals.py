"""When requests arrive: a renewal process in operational time, mapped to seconds by the request rate.

With rate λ(t) and cumulative rate Λ(t) = ∫₀ᵗ λ, the n-th request arrives at Λ⁻¹(S_n), where S_n is a sum of
independent gaps of mean 1. Exponential gaps give a Poisson process with that rate; gaps of a larger
coefficient of variation give bursts (time rescaling: Gerhardt and Nelson, "Transforming renewal processes
for simulation of nonstationary arrival processes", INFORMS Journal on Computing 21, 2009). One
representation, a rate that is constant on pieces, serves constant, diurnal, scripted and flash-crowd loads
alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specgov.env.traces import RateWindows

Floats = NDArray[np.float64]


class Gaps(Protocol):
    """Gaps of mean 1 between requests, in operational time."""

    def quantile(self, uniform: Floats, time_s: Floats) -> Floats:
        """Gap (n,) for a uniform (n,) in [0, 1) after the request that arrived at ``time_s`` (n,)."""
        ...


@dataclass(frozen=True, slots=True)
class ExponentialGaps:
    """Gaps of a Poisson process: -ln(1 - u)."""

    def quantile(self, uniform: Floats, time_s: Floats) -> Floats:  # noqa: ARG002  (stationary)
        """See ``Gaps.quantile``."""
        return -np.log1p(-uniform)


class WeibullGaps:
    """Weibull gaps: (-ln(1 - u))^(1/a) / Γ(1 + 1/a), whose shape a gives the wanted coefficient of variation.

    ``cv`` is one number, or one for each piece of time that begins at ``start_s``, repeated every
    ``period_s``.
    """

    def __init__(
        self, cv: float | Sequence[float] | Floats, start_s: Floats | None = None, period_s: float = math.inf
    ) -> None:
        shapes = [weibull_shape(float(value)) for value in np.atleast_1d(cv)]
        self._power = np.array([1.0 / shape for shape in shapes])
        self._scale = np.array([1.0 / math.gamma(1.0 + 1.0 / shape) for shape in shapes])
        self._start_s = np.zeros(1) if start_s is None else start_s
        self._period_s = period_s

    def quantile(self, uniform: Floats, time_s: Floats) -> Floats:
        """See ``Gaps.quantile``."""
        piece = np.searchsorted(self._start_s, np.mod(time_s, self._period_s), side="right") - 1
        gaps: Floats = self._scale[piece] * (-np.log1p(-uniform)) ** self._power[piece]
        return gaps


class GammaGaps:
    """Gamma gaps of shape a = 1/cv² and mean 1, from a table of the quantile function.

    The table is the integral of the density in the variable y = x^min(a, 1), in which it is bounded.
    """

    _POINTS = 8_192

    def __init__(self, cv: float) -> None:
        shape = 1.0 / cv**2
        power = min(shape, 1.0)
        largest = shape + 12.0 * math.sqrt(shape) + 30.0
        y = np.linspace(0.0, largest**power, self._POINTS)
        x = y ** (1.0 / power)
        with np.errstate(divide="ignore", invalid="ignore"):
            density = np.exp(-x + np.where(shape > power, (shape - power) * np.log(x), 0.0))
        density[0] = 1.0 if shape <= 1.0 else 0.0
        cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
        gaps = x / shape
        share = cumulative / cumulative[-1]
        mean = float(np.sum(np.diff(share) * (gaps[1:] + gaps[:-1]) / 2))
        self._share = share
        self._gaps = gaps / mean

    def quantile(self, uniform: Floats, time_s: Floats) -> Floats:  # noqa: ARG002  (stationary)
        """See ``Gaps.quantile``."""
        return np.interp(uniform, self._share, self._gaps)


class Intensity:
    """A request rate that is constant on pieces: ``rate_rps`` (m,) from ``start_s`` (m,) on, the first 0.

    With ``period_s`` the pattern repeats; without it the last rate holds for ever.
    """

    def __init__(
        self, start_s: Sequence[float], rate_rps: Sequence[float], period_s: float | None = None
    ) -> None:
        self._start_s = np.array(start_s, dtype=np.float64)
        self._rate = np.array(rate_rps, dtype=np.float64)
        self._period_s = period_s
        ends = np.append(self._start_s[1:], self._start_s[-1] + 1.0 if period_s is None else period_s)
        self._knots_s = np.append(self._start_s, ends[-1])
        self._cumulative = np.concatenate([[0.0], np.cumsum(self._rate * (ends - self._start_s))])

    def rate_at(self, time_s: Floats) -> Floats:
        """Rate in requests per second at each time."""
        time_s = time_s if self._period_s is None else np.mod(time_s, self._period_s)
        rate: Floats = self._rate[np.searchsorted(self._start_s, time_s, side="right") - 1]
        return rate

    def expected_requests(self, time_s: Floats) -> Floats:
        """Λ: the expected number of requests from 0 to each time."""
        total = self._cumulative[-1]
        if self._period_s is not None:
            periods, rest = np.divmod(time_s, self._period_s)
            return np.asarray(periods * total + np.interp(rest, self._knots_s, self._cumulative))
        beyond = np.maximum(time_s - self._knots_s[-1], 0.0) * self._rate[-1]
        return np.asarray(np.interp(time_s, self._knots_s, self._cumulative) + beyond)

    def time_at(self, operational: Floats) -> Floats:
        """Λ⁻¹: the time in s at which the expected number of requests since 0 reaches ``operational``."""
        total = self._cumulative[-1]
        if self._period_s is not None:
            periods, rest = np.divmod(operational, total)
            return np.asarray(periods * self._period_s + np.interp(rest, self._cumulative, self._knots_s))
        with np.errstate(divide="ignore", invalid="ignore"):
            beyond = np.where(operational > total, (operational - total) / self._rate[-1], 0.0)
        return np.asarray(np.interp(operational, self._cumulative, self._knots_s) + beyond)


def constant(rate_rps: float) -> Intensity:
    """The same rate for ever."""
    return Intensity([0.0], [rate_rps])


def diurnal(mean_rps: float, amplitude: float, period_s: float, peak_s: float = 0.0) -> Intensity:
    """A day: ``mean_rps * (1 + amplitude * cos(2π (t - peak_s) / period_s))``, in 96 pieces."""
    pieces = 96
    start_s = np.arange(pieces) * period_s / pieces
    middle_s = start_s + period_s / (2 * pieces)
    rate = mean_rps * (1.0 + amplitude * np.cos(2.0 * np.pi * (middle_s - peak_s) / period_s))
    return Intensity(start_s.tolist(), rate.tolist(), period_s)


def servegen(
    windows: RateWindows, rate_scale: float = 1.0, time_scale: float = 1.0
) -> tuple[Intensity, WeibullGaps]:
    """Rate and gaps of ServeGen windows, repeated for ever.

    The table gives a rate-weighted mean of the clients' coefficients of variation, used here for the sum of
    all clients: an upper bound of its burstiness, since independent clients smooth each other. Gaps are
    Weibull and the coefficient is clipped to 0.2..8, beyond which a window would be one burst.
    """
    start_s = windows.start_s * time_scale
    period_s = windows.end_s * time_scale
    intensity = Intensity(start_s.tolist(), (windows.rate_rps * rate_scale).tolist(), period_s)
    return intensity, WeibullGaps(np.clip(windows.gap_cv, 0.2, 8.0), start_s, period_s)


def weibull_shape(cv: float) -> float:
    """The shape a of a Weibull distribution whose coefficient of variation is ``cv``: bisection on ln a.

    cv² = Γ(1 + 2/a) / Γ(1 + 1/a)² - 1, which falls with a.
    """
    low, high = math.log(0.05), math.log(100.0)
    for _ in range(60):
        middle = (low + high) / 2
        inverse = math.exp(-middle)
        ratio = math.lgamma(1.0 + 2.0 * inverse) - 2.0 * math.lgamma(1.0 + inverse)
        if math.expm1(ratio) > cv**2:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
