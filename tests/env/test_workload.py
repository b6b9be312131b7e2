"""Requests: lengths, classes, and the three ways in which they come."""

from __future__ import annotations

import numpy as np
import pytest

from specgov.env.arrivals import Intensity, constant
from specgov.env.lengths import ClassMix, LogNormalLength, LogNormalLengths, TraceLengths
from specgov.env.rng import environment_keys
from specgov.env.traces import Trace
from specgov.env.workload import ClosedLoop, OpenLoop, Replay, RequestMix

MIX = RequestMix(
    ClassMix(np.array([0.0, 10.0]), np.array([[1.0, 3.0], [1.0, 0.0]])),
    LogNormalLengths(
        [LogNormalLength(100, 0.5), LogNormalLength(1000, 0.0)],
        [LogNormalLength(50, 1.0, min_tokens=20, max_tokens=80), LogNormalLength(7, 0.0)],
    ),
)
TRACE = Trace(np.array([0.0, 1.0, 5.0]), np.array([10, 20, 30]), np.array([1, 2, 3]))


def started(workload, n, seed=0):
    workload.start(environment_keys(seed, n))
    return workload


def taken(workload, n, count, time_s=0.0):
    """``count`` requests of each of ``n`` environments: arrival, prompt, output, class, (count, n) each."""
    envs, times = np.arange(n), np.full(n, time_s)
    batches = [workload.take(envs, times) for _ in range(count)]
    fields = ("arrival_s", "prompt_tokens", "output_tokens", "class_index")
    return tuple(np.array([getattr(batch, name) for batch in batches]) for name in fields)


def test_class_by_uniform_and_time():
    """Weights 1 and 3: class 1 from a quarter on; after 10 s class 0 alone."""
    times = np.array([0.0, 0.0, 0.0, 9.9, 10.0])
    drawn = MIX.classes.draw(times, np.array([0.2, 0.25, 0.9, 0.3, 0.99]))
    assert drawn.tolist() == [0, 1, 1, 1, 0]
    repeated = ClassMix(MIX.classes.start_s, MIX.classes.weights, period_s=20.0)
    assert repeated.draw(np.array([15.0, 25.0]), np.array([0.9, 0.9])).tolist() == [0, 1]


def test_lengths_follow_their_lognormals():
    uniforms = np.random.default_rng(0).random((40_000, 2))
    prompt, output = MIX.lengths.draw(np.zeros(40_000, np.int64), uniforms)
    logs = np.log(prompt)
    assert logs.mean() == pytest.approx(np.log(100), abs=0.01)
    assert logs.std() == pytest.approx(0.5, abs=0.01)
    assert output.min() == 20
    assert output.max() == 80
    # The two are independent: normals from one pair of uniforms.
    assert abs(np.corrcoef(logs, np.log(output))[0, 1]) < 0.02
    fixed = MIX.lengths.draw(np.ones(3, np.int64), uniforms[:3])
    assert [tokens.tolist() for tokens in fixed] == [[1000] * 3, [7] * 3]


def test_trace_lengths_keep_pairs_together():
    lengths = TraceLengths(TRACE)
    prompt, output = lengths.draw(np.zeros(3, np.int64), np.array([[0.0, 0.9], [0.5, 0.1], [0.99, 0.5]]))
    assert prompt.tolist() == [10, 20, 30]
    assert output.tolist() == [1, 2, 3]


def test_open_loop_has_its_rate():
    """Poisson at 5/s: the 100th arrival comes after 20 s, sigma 2 s; of the mean of 400 it is 0.1 s."""
    arrivals, _, _, classes = taken(started(OpenLoop(MIX, constant(5.0)), 400), 400, 100)
    assert arrivals[-1].mean() == pytest.approx(20.0, abs=0.4)
    assert arrivals[-1].std() == pytest.approx(2.0, rel=0.15)
    assert (np.diff(arrivals, axis=0) > 0).all()
    early = arrivals < 10
    assert classes[early].mean() == pytest.approx(0.75, abs=0.02)
    assert classes[~early].max() == 0  # by its own arrival, not by the time at which it is taken


def test_open_loop_follows_a_changing_rate():
    """2/s for 10 s, then 10/s: 20 requests are expected in the first 10 s and 100 in the next."""
    load = started(OpenLoop(MIX, Intensity([0, 10], [2, 10])), 200)
    arrivals, *_ = taken(load, 200, 150)
    assert (arrivals < 10).sum(axis=0).mean() == pytest.approx(20, abs=1.0)
    assert ((arrivals >= 10) & (arrivals < 20)).sum(axis=0).mean() == pytest.approx(100, abs=2.5)


def test_next_arrival_is_that_of_the_next_request():
    load = started(OpenLoop(MIX, constant(5.0)), 3)
    for _ in range(5):
        expected = load.next_arrival_s().copy()
        np.testing.assert_array_equal(load.take(np.arange(3), np.zeros(3)).arrival_s, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OpenLoop(MIX, constant(5.0), random_phase_s=30.0),
        lambda: ClosedLoop(MIX, [0], [4]),
        lambda: Replay(MIX, TRACE, random_start=True),
    ],
)
def test_an_environment_alone_gets_the_requests_that_it_gets_among_others(make):
    """Environment e of seed s is environment 0 of seed s + e; others' requests and resets change nothing."""
    many = started(make(), 4, seed=7)
    many.take(np.array([0, 3]), np.zeros(2))
    many.reset(np.array([3]), environment_keys(99, 1))
    alone = started(make(), 1, seed=9)
    for _ in range(6):
        one, other = many.take(np.array([2]), np.array([1.0])), alone.take(np.array([0]), np.array([1.0]))
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "class_index"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert many.next_arrival_s()[2] == alone.next_arrival_s()[0]


def test_reset_begins_again():
    load = started(OpenLoop(MIX, constant(5.0)), 2)
    first = taken(load, 2, 5)
    load.reset(np.arange(2), environment_keys(0, 2))
    for one, other in zip(first, taken(load, 2, 5), strict=True):
        np.testing.assert_array_equal(one, other)


def test_random_phase_spreads_environments_over_the_pattern():
    """All load lies in the second half of a 100 s period: from a random phase the mean wait is 12.5 s."""
    load = started(OpenLoop(MIX, Intensity([0, 50], [0, 1000], 100.0), random_phase_s=100.0), 4000)
    first_s = load.next_arrival_s()
    # Half of the environments begin in the empty half and wait 25 s on average, the others not at all.
    assert first_s.mean() == pytest.approx(12.5, abs=0.8)
    assert first_s.min() >= 0


def test_closed_loop_script():
    load = started(ClosedLoop(MIX, [0, 10, 20], [0, 4, 0], period_s=30.0), 3)
    now = np.array([5.0, 12.0, 25.0])
    assert load.target_concurrency(now).tolist() == [0, 4, 0]
    assert load.resume_s(now).tolist() == [10, 12, 40]
    assert load.next_arrival_s().tolist() == [np.inf] * 3
    ended = started(ClosedLoop(MIX, [0, 10], [3, 0]), 2)
    assert ended.resume_s(np.array([5.0, 12.0])).tolist() == [5, np.inf]


def test_closed_loop_in_straight_lines():
    """0 to 3 in 9 s: the line passes the halves at 1.5, 4.5 and 7.5 s; back in 3 s at 9.5, 10.5 and 11.5."""
    load = started(ClosedLoop(MIX, [0, 9, 12], [0, 3, 0], interpolate=True), 1)
    changes = {0.0: 0, 1.4: 0, 1.6: 1, 4.4: 1, 4.6: 2, 7.6: 3, 9.4: 3, 9.6: 2, 10.6: 1, 11.6: 0, 50.0: 0}
    assert {t: load.target_concurrency(np.array([t]))[0] for t in changes} == changes


def test_closed_loop_draws_classes_at_the_time_of_asking():
    load = started(ClosedLoop(MIX, [0], [5]), 200)
    assert taken(load, 200, 1, time_s=11.0)[3].max() == 0
    assert taken(load, 200, 1, time_s=2.0)[3].mean() == pytest.approx(0.75, abs=0.1)


def test_replay_repeats_the_trace():
    """A period is the span of 5 s and a mean gap of 2.5 s."""
    arrivals, prompt, output, _ = taken(started(Replay(MIX, TRACE), 1), 1, 5)
    assert arrivals[:, 0].tolist() == [0, 1, 5, 7.5, 8.5]
    assert prompt[:, 0].tolist() == [10, 20, 30, 10, 20]
    assert output[:, 0].tolist() == [1, 2, 3, 1, 2]


def test_replay_once():
    load = started(Replay(MIX, TRACE, repeat=False), 1)
    taken(load, 1, 3)
    assert load.next_arrival_s().tolist() == [np.inf]


def test_replay_from_a_random_start_keeps_the_order():
    arrivals, prompt, *_ = taken(started(Replay(MIX, TRACE, random_start=True), 300), 300, 4)
    assert set(prompt[0].tolist()) == {10, 20, 30}
    following = {10: 20, 20: 30, 30: 10}
    assert all(following[one] == other for one, other in zip(prompt[0], prompt[1], strict=True))
    assert (arrivals >= 0).all()
    assert (arrivals <= 4 * 7.5).all()


def test_replay_with_lengths_of_the_classes():
    _, prompt, output, classes = taken(started(Replay(MIX, TRACE, own_lengths=False), 20), 20, 2)
    assert (prompt[classes == 1] == 1000).all()
    assert (output[classes == 1] == 7).all()
