"""Rates and gaps against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.env.arrivals import (
    ExponentialGaps,
    GammaGaps,
    Intensity,
    WeibullGaps,
    constant,
    diurnal,
    servegen,
    weibull_shape,
)
from specgov.env.traces import RateWindows

UNIFORM = (np.arange(200_000) + 0.5) / 200_000
ZERO_S = np.zeros(len(UNIFORM))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("family", [WeibullGaps, GammaGaps])
def test_gaps_have_mean_1_and_the_stated_variation(family, cv):
    gaps = family(cv).quantile(UNIFORM, ZERO_S)
    assert gaps.mean() == pytest.approx(1.0, rel=0.005)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)
    assert (np.diff(gaps) >= 0).all()


def test_variation_1_is_exponential_in_every_family():
    expected = ExponentialGaps().quantile(UNIFORM, ZERO_S)
    assert expected[100_000] == pytest.approx(math.log(2), rel=1e-4)  # the median of Exp(1)
    np.testing.assert_allclose(WeibullGaps(1.0).quantile(UNIFORM, ZERO_S), expected, rtol=1e-9)
    np.testing.assert_allclose(GammaGaps(1.0).quantile(UNIFORM, ZERO_S), expected, atol=2e-3)


def test_weibull_shape():
    assert weibull_shape(1.0) == pytest.approx(1.0)
    # Shape 1/2: moments 2 and 24, so cv² = 24 / 4 - 1 = 5.
    assert weibull_shape(math.sqrt(5.0)) == pytest.approx(0.5)


def test_gamma_of_variation_one_half_is_erlang_4():
    """Shape 4, so P(gap <= x) = 1 - exp(-4x) Σ_{i<4} (4x)^i / i!."""
    gaps = GammaGaps(0.5).quantile(UNIFORM, ZERO_S)
    at_1 = 1.0 - math.exp(-4.0) * (1 + 4 + 8 + 64 / 6)
    assert (gaps <= 1.0).mean() == pytest.approx(at_1, abs=2e-4)


def test_time_rescaling():
    """2/s for 10 s, then 5/s for 10 s, again and again: Λ(10) = 20, Λ(20) = 70."""
    load = Intensity([0, 10], [2, 5], period_s=20)
    times = np.array([0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 35.0])
    requests = np.array([0.0, 10.0, 20.0, 45.0, 70.0, 90.0, 115.0])
    np.testing.assert_allclose(load.expected_requests(times), requests)
    np.testing.assert_allclose(load.time_at(requests), times)
    assert load.rate_at(np.array([9.9, 10.0, 29.9, 30.0])).tolist() == [2, 5, 2, 5]


def test_the_last_rate_holds():
    load = Intensity([0, 10], [2, 5])
    np.testing.assert_allclose(load.time_at(np.array([20.0, 70.0, 120.0])), [10, 20, 30])
    np.testing.assert_allclose(load.expected_requests(np.array([20.0])), [70])
    ended = Intensity([0, 10], [2, 0])
    assert ended.time_at(np.array([19.0, 21.0])).tolist() == [9.5, np.inf]


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    st.lists(st.floats(0, 1000), min_size=1, max_size=20),
    st.booleans(),
)
def test_time_at_inverts_expected_requests(rates, times, periodic):
    load = Intensity(np.arange(len(rates)) * 3.0, rates, len(rates) * 3.0 if periodic else None)
    at = np.array(times)
    np.testing.assert_allclose(load.time_at(load.expected_requests(at)), at, rtol=1e-6, atol=1e-6)


def test_diurnal_has_its_mean_peak_and_trough():
    day = diurnal(mean_rps=10, amplitude=0.5, period_s=960, peak_s=480)
    assert day.expected_requests(np.array([960.0]))[0] == pytest.approx(9600)
    rates = day.rate_at(np.array([0.0, 240.0, 485.0]))
    # The middle of a piece lies 5 s, a 192nd of the period, beside its start.
    near = math.cos(2 * math.pi / 192)
    np.testing.assert_allclose(rates[[0, 2]], [10 - 5 * near, 10 + 5 * near])
    assert rates[1] == pytest.approx(10, abs=0.2)


def test_servegen_windows_give_rate_and_burstiness():
    windows = RateWindows(np.array([0.0, 600.0]), 1200.0, np.array([2.0, 4.0]), np.array([1.0, 30.0]))
    load, gaps = servegen(windows, rate_scale=0.5, time_scale=0.1)
    assert load.rate_at(np.array([0.0, 60.0, 120.0])).tolist() == [1, 2, 1]
    first, second, again = (gaps.quantile(UNIFORM, np.full(len(UNIFORM), t)) for t in (0.0, 60.0, 120.0))
    np.testing.assert_allclose(first, -np.log1p(-UNIFORM))
    np.testing.assert_array_equal(first, again)
    # 30 is clipped to 8.
    np.testing.assert_allclose(second, WeibullGaps(8.0).quantile(UNIFORM, ZERO_S))


def test_constant():
    assert constant(4.0).time_at(np.array([2.0, 10.0])).tolist() == [0.5, 2.5]
