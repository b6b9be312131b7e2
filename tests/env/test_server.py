"""The simulated server, step by step against hand calculations, and its laws on random configurations."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgov.env.acceptance import AcceptanceModel, Drift, Shift
from specgov.env.server import Server, SimulationError, StepResult
from specgov.policies.step_time import PrefillCost, StepNoise


def k(*num_steps: int) -> np.ndarray:
    return np.array(num_steps)


def equal(a: StepResult, b: StepResult, env: int) -> None:
    """b, of one environment, is environment ``env`` of a, in every field."""
    for name in StepResult.__slots__:
        if name in ("live", "finished"):
            whole, part = getattr(a, name), getattr(b, name)
            here = whole.env == env
            for column in type(whole).__slots__:
                if column != "env":
                    assert getattr(whole, column)[here].tolist() == getattr(part, column).tolist(), column
        else:
            assert np.array_equal(getattr(a, name)[env], getattr(b, name)[0], equal_nan=True), name


def test_a_request_by_hand(small: SimpleNamespace) -> None:
    # Arrives at 1 s with 100 prompt tokens: prefill 2 ms + 100 x 0.1 ms = 12 ms. Everything is accepted,
    # so the five tokens asked for take a step at k=3 (4 tokens; 4 + 3 + 0.01 = 7.01 ms) and one at k=1 (1
    # of 2; 5.01 ms).
    config = small.config(classes=(small.always,), prefill=PrefillCost(2.0, 0.1))
    server = Server(config, small.listed([(1.0, 100, 5)]))
    first = server.step(k(3))
    assert first.step_id[0] == 1
    assert first.idle_ms[0] == pytest.approx(1000.0, abs=1e-5)
    assert first.prefill_ms[0] == pytest.approx(12.0)
    assert (first.after_idle[0], first.after_prefill[0], first.step_ms_valid[0]) == (True, True, False)
    assert first.step_ms[0] == pytest.approx(7.01)
    assert (first.output_tokens[0], first.sum_seq_len_tokens[0], first.max_seq_len_tokens[0]) == (4, 100, 100)
    assert first.accepted_histogram[0].tolist() == [0, 0, 0, 1]
    assert not first.exhausted[0]
    second = server.step(k(1))
    assert (second.output_tokens[0], second.sum_seq_len_tokens[0], second.step_ms_valid[0]) == (1, 104, True)
    assert second.live.accepted.tolist() == [1]  # the engine verified one draft, whatever was asked for
    assert (second.finished_requests[0], second.exhausted[0]) == (1, True)
    done = second.finished
    assert (done.prompt_tokens[0], done.output_tokens[0]) == (100, 5)
    # One nanosecond is left to rounding at the idle gap.
    assert done.arrival_ns[0] == 1_000_000_000
    assert done.first_token_ns[0] == pytest.approx(1_012_000_000, abs=1)
    assert done.finish_ns[0] == pytest.approx(1_024_020_000, abs=1)
    third = server.step(k(1))
    assert (third.batch_size[0], third.step_ms[0], third.output_tokens[0], third.step_id[0]) == (0, 0.0, 0, 2)
    assert third.time_ns[0] == second.time_ns[0]


def test_a_request_waits_for_a_slot_and_takes_it_over(small: SimpleNamespace) -> None:
    # One slot, never accepted: one token a step. The second request arrives during the first one's second
    # step.
    config = small.config(classes=(small.never,), max_running_requests=1)
    server = Server(config, small.listed([(0.0, 10, 3), (0.005, 20, 1)]))
    results = [server.step(k(0)) for _ in range(4)]
    assert [int(r.waiting_requests[0]) for r in results] == [0, 0, 1, 0]
    assert [int(r.sum_seq_len_tokens[0]) for r in results] == [10, 11, 12, 20]
    assert [r.live.slot.tolist() for r in results] == [[0]] * 4
    assert [r.live.generation.tolist() for r in results] == [[1], [1], [1], [2]]
    # Steps of 4.01 ms: the second request starts after three of them, at 12.03 ms, with no prefill cost.
    assert results[3].finished.arrival_ns[0] == 5_000_000
    assert results[3].finished.first_token_ns[0] == 12_030_000
    assert results[3].finished.finish_ns[0] == 16_040_000


def test_prefill_interrupts_decode_in_chunks(small: SimpleNamespace) -> None:
    # Chunks of 100 tokens at 0.1 ms a token and 1 ms a chunk. The first request runs from 0 on; the
    # second, of 250 tokens, is prefilled before three steps: 11, 11 and 6 ms. It is in the third batch.
    config = small.config(
        classes=(small.never,),
        prefill=PrefillCost(1.0, 0.1),
        prefill_chunk_tokens=100,
        kv_capacity_tokens=1000,
    )
    server = Server(config, small.listed([(0.0, 100, 9), (0.011, 250, 9)]))
    results = [server.step(k(0)) for _ in range(5)]
    assert [float(r.prefill_ms[0]) for r in results] == pytest.approx([11.0, 11.0, 11.0, 6.0, 0.0])
    assert [int(r.batch_size[0]) for r in results] == [1, 1, 1, 2, 2]
    assert [bool(r.step_ms_valid[0]) for r in results] == [False, False, False, False, True]
    # KV: prompt and output of those that run, and what is prefilled of the one that waits.
    assert [float(r.kv_use_ratio[0]) for r in results] == pytest.approx([0.1, 0.201, 0.302, 0.353, 0.355])


def test_several_short_prompts_share_a_chunk_and_a_long_one_starts_alone(small: SimpleNamespace) -> None:
    # Nothing runs at first, so the prompt of 250 tokens is prefilled in full: 3 chunks, 3 + 25 ms. Then
    # two of 40 tokens in one chunk (1 + 8 ms), and the third of 40 takes the 20 tokens left of the chunk:
    # 2 ms.
    config = small.config(classes=(small.never,), prefill=PrefillCost(1.0, 0.1), prefill_chunk_tokens=100)
    server = Server(config, small.listed([(0.0, 250, 9), (0.001, 40, 9), (0.001, 40, 9), (0.001, 40, 9)]))
    results = [server.step(k(0)) for _ in range(3)]
    assert [float(r.prefill_ms[0]) for r in results] == pytest.approx([28.0, 11.0, 1.0 + 2.0])
    assert [int(r.batch_size[0]) for r in results] == [1, 3, 4]


def test_the_youngest_is_retracted_and_comes_back_first(small: SimpleNamespace) -> None:
    # Verify width 2 (tiers 0, 1); capacity 60. Two requests of 20 prompt tokens: 40 + 2 x 2 <= 60. Both
    # write a token a step; after 9 steps they hold 58, and 58 + 4 > 60: the one of the higher slot index?
    # Both have 9 tokens: the first of equals, slot 0, goes. It needs 29 + 29 + 4 = 62 > 60 to join again,
    # so it waits until the other ends.
    config = small.config(classes=(small.never,), tiers=(0, 1), kv_capacity_tokens=60, kv_headroom=0.0)
    server = Server(config, small.listed([(0.0, 20, 12), (0.0, 20, 12), (0.0, 20, 1)]))
    results = [server.step(k(0)) for _ in range(17)]
    sizes = [int(r.batch_size[0]) for r in results]
    assert [int(r.retracted_requests[0]) for r in results] == [0] * 9 + [1] + [0] * 7
    # 9 steps of two, 3 of one (the other ends at 12), then the retracted one beside the third request
    # (which was behind it in the queue and ends at once), then alone.
    assert sizes == [2] * 9 + [1] * 3 + [2, 1, 1] + [0, 0]
    assert [int(r.waiting_requests[0]) for r in results[8:13]] == [1, 2, 2, 2, 0]
    ended = [r.finished.output_tokens.tolist() for r in results if r.finished_requests[0]]
    assert ended == [[12], [1], [12]]


def test_impossible_requests_and_settings_say_what_to_do(small: SimpleNamespace) -> None:
    with pytest.raises(SimulationError, match="raise kv_capacity_tokens"):
        Server(small.config(kv_capacity_tokens=100), small.listed([(0.0, 90, 10)]))
    with pytest.raises(SimulationError, match="no prompt or no output"):
        Server(small.config(), small.listed([(0.0, 10, 0)]))
    with pytest.raises(SimulationError, match="at least one environment"):
        Server(small.config(), small.listed([]), n_envs=0)
    with pytest.raises(SimulationError, match="tiers must ascend"):
        small.config(tiers=(3, 1))
    with pytest.raises(SimulationError, match="max_running_requests"):
        small.config(max_running_requests=0)
    with pytest.raises(SimulationError, match="no class"):
        small.config(classes=())
    server = Server(small.config(), small.keyed(), n_envs=2)
    for wrong in (
        np.array([2, 0]),
        np.array([-1, 0]),
        np.array([-4, 0]),
        np.array([4, 0]),
        np.array([0]),
        np.array([0.0, 1.0]),
    ):
        with pytest.raises(SimulationError, match="num_steps must be"):
            server.step(wrong)


def test_noise_is_lognormal_about_the_expected_time_and_stalls_are_rare(small: SimpleNamespace) -> None:
    # 400 environments x 50 steps: standard error of the mean log 0.1 / 141 = 0.0007, of a share of 0.02:
    # 0.001.
    config = small.config(noise=StepNoise(0.1, 0.02, 50.0))
    server = Server(config, small.keyed(concurrency=1), n_envs=400)
    step_ms = np.array([server.step(np.zeros(400, int)).step_ms for _ in range(50)])
    stalled = step_ms > 30.0
    assert stalled.mean() == pytest.approx(0.02, abs=0.005)
    logs = np.log(step_ms[~stalled] / 4.01)
    assert logs.mean() == pytest.approx(0.0, abs=0.004)
    assert logs.std() == pytest.approx(0.1, abs=0.004)


def test_cold_drafts(small: SimpleNamespace) -> None:
    # Conditional acceptance 0.8 without spread; ln 2 on the log hazard squares it once, and only once.
    flat = type(small.half)("flat", (0.8,), spread=0.0)
    config = small.config(classes=(flat,), draft_kv_stays_warm=False)
    object.__setattr__(config.acceptance, "cold_log_hazard", np.log(2.0))
    for warm in (False, True):
        object.__setattr__(config.engine, "draft_kv_stays_warm", warm)
        server = Server(config, small.listed([(0.0, 10, 1000)]))
        before = server.truth().conditional_acceptance[0]
        server.step(k(3))
        server.step(k(0))
        server.step(k(0))
        after = server.truth().conditional_acceptance[0]
        assert before == pytest.approx([0.8, 0.8, 0.8], rel=1e-5)
        assert after == pytest.approx([0.8 if warm else 0.64] * 3, rel=1e-5)


def test_drift_reaches_the_requests(small: SimpleNamespace) -> None:
    flat = type(small.half)("flat", (0.8,), spread=0.0)
    model = AcceptanceModel((flat,), Drift((Shift(0.01, float(np.log(2.0))),)))
    server = Server(small.config(acceptance=model), small.listed([(0.0, 10, 1000)]))
    seen = []
    for _ in range(4):  # steps of 4.01 ms: the shift at 10 ms is met by the fourth
        seen.append(server.truth().conditional_acceptance[0, 0])
        server.step(k(0))
    assert seen == pytest.approx([0.8, 0.8, 0.8, 0.64], rel=1e-5)


def test_truth_by_hand(small: SimpleNamespace) -> None:
    # Conditional 0.8; one request with much left, one with two tokens left. k=1: 2 x 1.8; k=3: the first
    # 1 + 0.8 + 0.64 + 0.512, the second at most 2 tokens: 1.8. Conditional acceptance is not cut off.
    flat = type(small.half)("flat", (0.8,), spread=0.0)
    server = Server(small.config(classes=(flat,)), small.listed([(0.0, 10, 1000), (0.0, 10, 2)]))
    truth = server.truth()
    assert truth.expected_tokens[0] == pytest.approx([2.0, 3.6, 2.952 + 1.8], rel=1e-5)
    assert truth.expected_ms[0] == pytest.approx([4.02, 5.02, 7.02])
    assert truth.conditional_acceptance[0] == pytest.approx([0.8] * 3, rel=1e-5)


def test_truth_is_what_steps_bring_on_average(small: SimpleNamespace) -> None:
    # 2,000 environments, 20 steps, random tiers: the sum of (tokens - expected) over its standard error,
    # estimated from the same differences, is a standard normal; 4.5 is passed by chance once in 150,000
    # times.
    n = 2000
    server = Server(small.config(), small.keyed(concurrency=6), n_envs=n, seed=11)
    rng = np.random.default_rng(5)
    tiers = np.array(server.config.engine.tiers)
    excess = []
    for _ in range(20):
        truth, chosen = server.truth(), rng.integers(3, size=n)
        result = server.step(tiers[chosen])
        excess.append(result.output_tokens - truth.expected_tokens[np.arange(n), chosen])
        assert (result.step_ms == truth.expected_ms[np.arange(n), chosen]).all()  # no noise here
    per_step = np.array(excess)
    assert abs(per_step.sum() / (per_step.std() * np.sqrt(per_step.size))) < 4.5


def test_single_is_a_row_of_many(small: SimpleNamespace) -> None:
    config = small.config(
        kv_capacity_tokens=1200,
        draft_kv_stays_warm=False,
        noise=StepNoise(0.05, 0.01, 50.0),
        prefill=PrefillCost(1.0, 0.02),
        prefill_chunk_tokens=150,
        acceptance=AcceptanceModel((small.half, small.good), Drift((Shift(0.2, 0.3, 1.0),), 0.2, 0.5)),
    )
    n = 5
    for load in ({"concurrency": 12}, {"gap_s": 0.02}):
        many = Server(config, small.keyed(**load), n_envs=n, seed=100)
        singles = [Server(config, small.keyed(**load), seed=100 + e) for e in range(n)]
        rng = np.random.default_rng(0)
        for step in range(150):
            tiers = rng.choice(config.engine.tiers, n)
            truth, result = many.truth(), many.step(tiers)
            for e, single in enumerate(singles):
                alone = single.truth()
                assert np.array_equal(alone.expected_tokens[0], truth.expected_tokens[e])
                assert np.array_equal(
                    alone.conditional_acceptance[0], truth.conditional_acceptance[e], equal_nan=True
                )
                equal(result, single.step(tiers[e : e + 1]), e)
            if step == 70:  # a new episode of some must not disturb the others
                many.reset(np.array([1, 3]))
                singles[1].reset()
                singles[3].reset()


def test_reset_with_a_seed_repeats_and_without_one_differs(small: SimpleNamespace) -> None:
    server = Server(small.config(), small.keyed(), n_envs=2, seed=3)

    def tokens() -> list[list[int]]:
        return [server.step(np.array([3, 3])).output_tokens.tolist() for _ in range(40)]

    first = tokens()
    server.reset()
    second = tokens()
    server.reset(seed=3)
    assert tokens() == first
    server.reset()
    assert tokens() == second
    assert first != second


loads = st.fixed_dictionaries(
    {
        "concurrency": st.integers(1, 20),
        "gap_s": st.sampled_from([0.0, 0.003, 0.03, 0.3]),
        "max_prompt": st.integers(1, 300),
        "max_output": st.integers(1, 80),
        "limit": st.integers(0, 30),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    load=loads,
    running=st.integers(1, 8),
    tight=st.floats(0.0, 3.0),
    headroom=st.sampled_from([0.0, 0.05, 0.3]),
    chunk=st.integers(1, 400),
    seed=st.integers(0, 2**32),
)
def test_laws(
    small: SimpleNamespace, load: dict, running: int, tight: float, headroom: float, chunk: int, seed: int
) -> None:
    """Nothing is lost, tokens out are tokens asked, limits hold, Little's law is exact: at every step."""
    n, width = 3, 4
    capacity = int((load["max_prompt"] + load["max_output"] + width) * (1.0 + tight))
    config = small.config(
        max_running_requests=running,
        kv_capacity_tokens=capacity,
        kv_headroom=headroom,
        prefill=PrefillCost(0.5, 0.01),
        prefill_chunk_tokens=chunk,
        noise=StepNoise(0.1, 0.01, 20.0),
    )
    workload = small.keyed(**load)
    server = Server(config, workload, n_envs=n, seed=seed)
    rng = np.random.default_rng(seed)
    tokens, finished, out, sojourn_ns, gone_arrivals_ns, last_ns = (np.zeros(n, np.int64) for _ in range(6))
    for _ in range(100_000 if load["gap_s"] else 200):
        in_system = server.batch_size + server.waiting_requests
        assert (server.kv_tokens + width * server.batch_size <= capacity).all()
        assert (server.batch_size <= running).all()
        assert (workload.count == finished + in_system).all()
        # Little's law: the time integral of the number in the system is the time that each has spent in it.
        present_ns = in_system * server.time_ns - (workload.arrivals_ns - gone_arrivals_ns)
        assert (server.request_ns == sojourn_ns + present_ns).all()
        if server.exhausted.all():
            break
        result = server.step(rng.choice(config.engine.tiers, n))
        assert (result.time_ns >= last_ns).all()
        last_ns = result.time_ns
        assert (result.accepted_histogram.sum(axis=1) == result.batch_size).all()
        assert np.array_equal(np.bincount(result.live.env, minlength=n), result.batch_size)
        tokens += result.output_tokens
        finished += result.finished_requests
        done = result.finished
        assert (done.arrival_ns <= done.first_token_ns).all()
        assert (done.first_token_ns < done.finish_ns).all()
        for total, values in (
            (out, done.output_tokens),
            (sojourn_ns, done.finish_ns - done.arrival_ns),
            (gone_arrivals_ns, done.arrival_ns),
        ):
            np.add.at(total, done.env, values)
    assert (out <= tokens).all()
    if load["gap_s"]:
        assert finished.tolist() == [load["limit"]] * n
        assert tokens.tolist() == workload.asked.tolist() == out.tolist()
        assert server.kv_tokens.tolist() == [0] * n
