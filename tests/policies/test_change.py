import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.policies.change import ChangeConfig, ChangeDetector


def steps_to_alarm(
    detector: ChangeDetector, rng: np.random.Generator, shift: float, limit: int = 100_000
) -> int:
    for step in range(1, limit + 1):
        if detector.update(float(rng.standard_normal()) + shift):
            return step
    return limit


def test_threshold_follows_from_the_false_alarm_rate() -> None:
    # By hand: drift 0.5 makes 2 d = 1, so one side's run length is 2 (exp(x) - x - 1) with x = threshold +
    # 1.166. At threshold 8: x = 9.166, exp(x) = 9566, so 2 * 9556 = 19112 for one side and half of it for
    # two.
    assert ChangeConfig(false_alarm_steps=9_556, drift=0.5).threshold == pytest.approx(8.0, abs=1e-3)


def test_a_constant_stream_alarms_when_its_sum_passes_the_threshold() -> None:
    # Threshold 8 as above; each innovation of 2.5 adds 2.5 - 0.5 = 2: after four it is at 8, the fifth
    # passes.
    detector = ChangeDetector(ChangeConfig(false_alarm_steps=9_560, drift=0.5))
    assert [detector.update(2.5) for _ in range(6)] == [False, False, False, False, True, False]
    assert detector.alarms == 1


def test_falls_are_found_as_rises_are() -> None:
    detector = ChangeDetector(ChangeConfig(false_alarm_steps=9_560, drift=0.5))
    assert [detector.update(-2.5) for _ in range(5)][-1]


def test_one_huge_innovation_raises_no_alarm() -> None:
    detector = ChangeDetector(ChangeConfig(false_alarm_steps=10_000, clip=4.0))
    assert not detector.update(1e9)
    assert detector.suspicion == pytest.approx(3.5 / ChangeConfig(false_alarm_steps=10_000).threshold)


def test_false_alarms_come_as_rarely_as_stated() -> None:
    # Run lengths are nearly exponential, so the mean of 400 has a standard error of 5 %; Siegmund's
    # approximation itself is good to a few per cent.
    rng = np.random.default_rng(5)
    lengths = [
        steps_to_alarm(ChangeDetector(ChangeConfig(false_alarm_steps=500)), rng, 0.0) for _ in range(400)
    ]
    assert 425 <= np.mean(lengths) <= 600


def test_a_shift_of_two_deviations_is_found_within_a_dozen_steps() -> None:
    # The sum grows by 2 - 0.5 a step towards the threshold of 9.7: 6.5 steps in the mean, and the overshoot.
    rng = np.random.default_rng(6)
    lengths = [steps_to_alarm(ChangeDetector(), rng, 2.0) for _ in range(200)]
    assert np.mean(lengths) < 9
    assert max(lengths) < 25


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50))
def test_suspicion_stays_between_0_and_1(innovations: list[float]) -> None:
    detector = ChangeDetector()
    for innovation in innovations:
        detector.update(innovation)
    assert 0.0 <= detector.suspicion <= 1.0


@pytest.mark.parametrize("bad", [{"false_alarm_steps": 1}, {"drift": 0}, {"clip": 0.5}, {"drift": math.nan}])
def test_parameters_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="change detection needs"):
        ChangeConfig(**bad)
