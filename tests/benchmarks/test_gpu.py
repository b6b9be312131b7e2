"""The GPU benchmark's own parts: its texts are the simulator's, and its figures are what the lines say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU), str(GPU / "plugin")]

from figures import Recorded, RecordTail, Step, figures, step_times, tier_time_shares  # noqa: E402
from loads import get_load, load_names  # noqa: E402
from specgov_gpu_benchmark.contest import BenchmarkError, Contest, run_of  # noqa: E402
from specgov_gpu_benchmark.record import Recorder, tokens_beyond  # noqa: E402
from specgov_gpu_benchmark.rid import RequestId, Run, parse  # noqa: E402
from specgov_gpu_benchmark.rules import BySize  # noqa: E402
from specgov_gpu_benchmark.texts import Texts, request_key, steps_to_write  # noqa: E402

from specgov.env.server import Server  # noqa: E402
from specgov.policies.types import EngineSpec  # noqa: E402

SEED = 5


def tier_at(step: int) -> int:
    """Every tier in an order without a period that the test could hide behind."""
    return (0, 1, 7, 3, 5, 2, 7, 7, 0, 3)[(step * step + step // 7) % 10]


@pytest.mark.parametrize("name", ["steady_1", "useless", "ramp"])
def test_a_request_meets_the_text_that_it_meets_in_the_simulator(name: str) -> None:
    load = get_load(name, at_most=1)
    classes = [table.acceptance for table in load.scenario.table.classes]
    server: Server = load.scenario.build(1, SEED)
    texts, drawn = Texts(), 0
    number, left, rid = -1, 0, ""
    prompt_tokens = 0
    for step in range(900):
        if left <= 0:  # one at a time: the next request has begun
            number += 1
        result = server.step(np.array([tier_at(step)]))
        if left <= 0:
            asked = _request(load, number, float(result.time_ns[0] - result.step_ms[0] * 1e6) * 1e-9)
            class_index, prompt_tokens, left = asked
            rid = RequestId(Run("r", "none", SEED), classes[class_index], number).text()
        accepted = texts.write(texts.rows([rid], [prompt_tokens]), tier_at(step))
        assert accepted.tolist() == result.live.accepted.tolist(), (step, number)
        left -= int(accepted[0]) + 1
        drawn += int(accepted[0])
    assert number >= 2
    assert drawn > 50


def _request(load: Any, number: int, now_s: float) -> tuple[int, int, int]:
    """Class, prompt and output tokens of a request that arrives at ``now_s``."""
    from specgov.env.rng import environment_keys

    workload = load.scenario.workload()
    workload.start(environment_keys(SEED, 1))
    for _ in range(number + 1):
        batch = workload.take(np.array([0]), np.array([now_s]))
    return int(batch.class_index[0]), int(batch.prompt_tokens[0]), int(batch.output_tokens[0])


def test_how_a_text_is_cut_into_batches_does_not_change_it() -> None:
    ids = [RequestId(Run("r", "none", SEED), "code", n).text() for n in range(1500)]
    together, alone = Texts(), Texts()
    both = [together.write(together.rows(ids), 5) for _ in range(12)]
    for place in (0, 700, 1499):  # beyond the first capacity too
        single = [int(alone.write(alone.rows([ids[place]]), 5)[0]) for _ in range(12)]
        assert single == [int(accepted[place]) for accepted in both]


def test_steps_that_a_text_takes() -> None:
    useful, useless = (
        RequestId(Run("r", "none", SEED), name, 0).text() for name in ("code", "useless_drafter")
    )
    assert steps_to_write(useful, 32, 33, 0) == 32  # the first token is prefill's
    assert steps_to_write(useful, 32, 33, 7) < 20
    assert steps_to_write(useless, 32, 33, 7) > 25
    assert request_key(1, 0) != request_key(1, 1)


def test_ids_say_what_they_were_made_of() -> None:
    rid = RequestId(Run("12", "schedule:1=5:33=1", 3), "useless_drafter", 7)
    assert parse(rid.text()) == rid
    assert parse("HEALTH_CHECK_1") is None


def test_a_batch_belongs_to_the_run_of_its_newest_request() -> None:
    one, other = (RequestId(Run(name, "static:3", 1), "code", 0).text() for name in "ab")
    assert run_of([one, "warm-up"]) == Run("a", "static:3", 1)
    assert run_of(["warm-up"]) is None
    assert run_of([one, other]) == Run("b", "static:3", 1)


def test_a_draft_that_goes_cold_at_tier_0_is_accepted_less() -> None:
    ids = [RequestId(Run("r", "none", SEED), "code", n).text() for n in range(300)]
    means = {}
    for goes_cold in (False, True):
        texts = Texts(drafts_go_cold=goes_cold)
        rows = texts.rows(ids)
        before = texts.write(rows, 3).mean()
        texts.write(rows, 0)
        means[goes_cold] = (before, texts.write(rows, 3).mean())
    assert means[False][0] == means[True][0]
    # 0.86 a draft when warm; its log hazard grows by 0.7, which makes 0.86 ** exp(0.7) = 0.74 of it.
    assert means[True][1] < means[False][1] - 0.2


def test_a_contest_refuses_what_it_did_not_choose() -> None:
    contest = Contest()
    request = SimpleNamespace(rid=RequestId(Run("r", "none", SEED), "code", 0).text(), origin_input_ids=[1])
    contest.begin_step([request])
    assert contest.chosen is None  # there is no policy to take the place of
    assert contest.write(1, 3).shape == (1,)
    assert contest.context_tokens > 1
    with pytest.raises(BenchmarkError, match="2 requests are verified"):
        contest.write(2, 3)


def test_a_rule_by_batch_size() -> None:
    rule = BySize("threshold:64:3", EngineSpec((0, 1, 3), max_running_requests=256))
    assert [rule.num_steps(size, np.zeros(0, np.int64)) for size in (1, 63, 64, 256, 999)] == [3, 3, 0, 0, 0]


def test_lines_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, "0.5.17")
    tail = RecordTail(tmp_path / "steps.0.csv")
    recorder.enter("1")
    recorder.first_tokens("1", [0, 1])
    recorder.step("1", 10, 2, 2, 3, 5, 700, 2, 0, 0)
    recorder.ended("1", [(1, 40)])
    assert not tail.read()["1"].steps  # nothing was handed on yet
    recorder.enter("2")
    run = tail.read()["1"]
    assert [step[1:] for step in run.steps] == [(10, 2, 2, 3, 5, 700, 2, 0, 0)]
    assert set(run.first_s) == {0, 1}
    assert run.done[1][1] == 40


def test_figures_of_a_run() -> None:
    def step(t_s: float, step_id: int, num_steps: int, tokens: int) -> Step:
        return Step(t_s, step_id, 2, 2, num_steps, tokens, 100, 2, 0, 0)

    steps = [
        step(100.5, 1, 3, 8),
        step(101.25, 2, 3, 4),
        step(101.35, 3, 3, 5),
        step(101.45, 4, 1, 3),
        step(102.0, 5, 1, 9),
    ]
    recorded = Recorded(steps, first_s={0: 100.2, 1: 101.1}, done={0: (101.2, 11), 1: (103.0, 5)})
    found = figures(recorded, {0: 100.0, 1: 101.0}, 100.0, 1.0, 2.0)
    # One second counts, from 101 to 102: three steps of 4 + 5 + 3 tokens.
    assert found["output_tokens_per_s"] == 12
    assert found["steps"] == 3
    assert found["ttft_ms"]["p50"] == pytest.approx(100)  # request 1
    assert found["tpot_ms"]["p50"] == pytest.approx(100)  # request 0: a second for ten tokens after the first
    assert found["tier_time_shares"] == {"1": 0.5, "3": 0.5}
    assert found["timeline"]["output_tokens_per_s"][2] == 32  # 8 tokens in the quarter from 100.5 on


def test_step_times_are_those_of_like_neighbours() -> None:
    def step(t_ms: float, step_id: int, num_steps: int) -> Step:
        return Step(t_ms / 1e3, step_id, 4, 4, num_steps, 4, 0, 2, 0, 0)

    # 5 ms each; the third follows another tier, the fifth a gap in the iterations.
    steps = [step(0, 1, 1), step(5, 2, 1), step(30, 3, 3), step(35, 4, 3), step(90, 6, 3)]
    assert step_times(steps, least=1) == {"4": {"1": (5.0, 1), "3": (5.0, 1)}}
    assert tier_time_shares(steps[:1]) == {}


def test_tokens_beyond_the_wanted_length_do_not_count() -> None:
    def request(made: int, wanted: int) -> Any:
        return SimpleNamespace(output_ids=[0] * made, sampling_params=SimpleNamespace(max_new_tokens=wanted))

    assert tokens_beyond([request(12, 10), request(10, 10), request(3, 10)]) == 2


def test_every_load_can_be_played() -> None:
    names = load_names()
    assert names[:2] == ["ramp", "steady_64"]
    for name in names:
        load = get_load(name, duration_s=3.0)
        assert load.duration_s == 3.0
        assert 0 <= load.count_from_s < 3.0


def test_a_short_load_differs_in_its_outputs_alone() -> None:
    for name, short in (("ramp", "ramp_short"), ("steady_8", "steady_short_8"), ("useless", "useless_short")):
        long, brief = (get_load(which).scenario.table for which in (name, short))
        assert long.classes[0].output.median_tokens >= 3 * brief.classes[0].output.median_tokens
        outputs = tuple(kind.model_copy(update={"output": None}) for kind in long.classes)
        assert outputs == tuple(kind.model_copy(update={"output": None}) for kind in brief.classes)
        same = {"classes": None, "tests": None}
        assert long.model_copy(update=same) == brief.model_copy(update=same)


def test_the_accept_index_is_that_of_the_accepted_chain() -> None:
    torch = pytest.importorskip("torch")
    from specgov_gpu_benchmark.hooks import simulated_acceptance

    drawn = np.array([0, 2, 3], np.uint8)
    contest: Any = SimpleNamespace(write=lambda bs, k: drawn)
    make = simulated_acceptance(contest)
    candidates = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    target = torch.tensor([[101, 102, 103, 104], [105, 106, 107, 108], [109, 110, 111, 112]])
    index = torch.full((3, 4), -1, dtype=torch.int32)
    index[:, 0] = torch.tensor([0, 4, 8])
    predict = torch.zeros(12, dtype=torch.int32)
    correct = torch.zeros(3, dtype=torch.int32)
    found = make(index, predict, correct, candidates, target, 3, 3)
    assert found.tolist() == [[0, -1, -1, -1], [4, 5, 6, -1], [8, 9, 10, 11]]
    assert found.dtype == torch.int32
    assert correct.tolist() == [0, 2, 3]
    # Along the accepted nodes: the following draft tokens, then the target's.
    assert predict[found[0][:1].long()].tolist() == [101]
    assert predict[found[1][:3].long()].tolist() == [6, 7, 107]
    assert predict[found[2].long()].tolist() == [10, 11, 12, 112]
