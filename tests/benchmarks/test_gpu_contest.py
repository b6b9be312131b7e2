"""Who decides in a run of the GPU benchmark, without SGLang: its policy object is a stand-in here."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU), str(GPU / "plugin")]

from contest import line_up, parse_arguments  # noqa: E402
from contestants import ALL, ContestantError, Tuned, contestant  # noqa: E402
from loads import get_load  # noqa: E402
from presence import half_width, presence  # noqa: E402
from report import collect, load_table, write_page  # noqa: E402
from runs import compare_ranks  # noqa: E402
from specgov_gpu_benchmark.contest import BenchmarkError, Contest  # noqa: E402
from specgov_gpu_benchmark.rid import RequestId, Run  # noqa: E402
from specgov_gpu_benchmark.texts import Texts  # noqa: E402

from specgov.policies.profile import load_profile  # noqa: E402
from specgov.sglang_plugin.guarded import Guard  # noqa: E402
from specgov.sglang_plugin.orders import OWN_RULE, Kind  # noqa: E402
from specgov.sglang_plugin.policy import GovernedPolicy  # noqa: E402

TIERS = [0, 1, 3]
PROFILE = "h200-llama-3.1-8b"


class SglangPolicy:
    """The members of SGLang's own policy; its tier says which configuration it was made with."""

    def __init__(self, initial_steps: int, cfg_path: str | None) -> None:
        self.made_with = (initial_steps, cfg_path)
        self.candidate_steps = [0, 7] if cfg_path == "too-deep.json" else TIERS

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self.graphs = cuda_graph_bs

    def get_steps_for_batch(self, batch_size: int) -> int:
        return 1 if self.made_with[1] is None else 3

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        return None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        return self.graphs


def governed_contest() -> tuple[Contest, GovernedPolicy]:
    own = SglangPolicy(3, "server.json")
    policy = GovernedPolicy(own, TIERS, lambda graphs: None, lambda: (OWN_RULE, 0), Guard(3), initial_steps=3)  # type: ignore[arg-type]
    policy._graphs = [1, 2, 4, 8]
    contest = Contest()
    contest.make_sglang_policy, contest.own_config = SglangPolicy, "server.json"
    contest.govern(policy, 3)
    return contest, policy


def begin(contest: Contest, rule: str, count: int, name: str = "1") -> None:
    run = Run(name, rule, 1)
    contest.begin_step(
        [
            SimpleNamespace(rid=RequestId(run, "code", n).text(), origin_input_ids=[1] * 100)
            for n in range(count)
        ]
    )


def test_a_rule_of_the_request_decides_and_specgov_is_silent() -> None:
    contest, _ = governed_contest()
    begin(contest, "threshold:4:3", 3)
    assert contest.chosen is not None
    assert (contest.chosen.num_steps, contest.chosen.kind) == (3, Kind.OWN_RULE)
    assert not contest.follows_specgov
    begin(contest, "threshold:4:3", 4)
    assert contest.chosen.num_steps == 0


def test_specgov_decides_where_the_request_says_so_and_where_no_run_is() -> None:
    contest, _ = governed_contest()
    contest.begin_step([SimpleNamespace(rid="warm-up", origin_input_ids=[1])])
    assert contest.chosen is None
    begin(contest, "static:1", 2)
    assert not contest.follows_specgov
    begin(contest, "specgov", 2, name="2")
    assert contest.chosen is None
    assert contest.follows_specgov


def test_sglangs_policy_is_made_anew_for_a_run_and_gone_after_it() -> None:
    contest, policy = governed_contest()
    own = policy._engines_rule
    begin(contest, "sglang:default", 2)
    first = policy._engines_rule
    assert first.made_with == (3, None)  # type: ignore[attr-defined]
    assert first.graphs == [1, 2, 4, 8]  # type: ignore[attr-defined]
    assert contest.chosen is not None
    assert (contest.chosen.num_steps, contest.chosen.kind) == (1, Kind.ENGINES_RULE)
    begin(contest, "sglang:default", 2)
    assert policy._engines_rule is first
    begin(contest, "sglang:server", 2, name="2")
    assert policy._engines_rule.made_with == (3, "server.json")  # type: ignore[attr-defined]
    begin(contest, "static:1", 2, name="3")
    assert policy._engines_rule is own


def test_tiers_that_are_not_prepared_end_the_contest() -> None:
    contest, _ = governed_contest()
    with pytest.raises(BenchmarkError, match=r"\[7\]"):
        begin(contest, "sglang:too-deep.json", 2)


def test_a_tier_that_was_not_chosen_ends_the_contest() -> None:
    contest, _ = governed_contest()
    begin(contest, "static:3", 2)
    with pytest.raises(BenchmarkError, match="3 was chosen, 1 is verified"):
        contest.write(2, 1)


def test_tiers_in_turn() -> None:
    contest, _ = governed_contest()
    chosen = []
    for _ in range(6):
        begin(contest, "cycle:2", 2)
        assert contest.chosen is not None
        chosen.append(contest.chosen.num_steps)
    assert chosen == [0, 1, 1, 3, 3, 0]
    begin(contest, "cycle:1:0,3", 2, name="2")
    assert contest.chosen is not None
    first = contest.chosen.num_steps
    begin(contest, "cycle:1:0,3", 2, name="2")
    assert {first, contest.chosen.num_steps} == {0, 3}


@pytest.mark.parametrize("size", [1, 8])
def test_the_oracle_takes_the_tier_with_the_largest_rate(size: int) -> None:
    contest, _ = governed_contest()
    begin(contest, f"oracle:{PROFILE}", size)
    texts = Texts()
    rows = texts.rows([RequestId(Run("1", f"oracle:{PROFILE}", 1), "code", n).text() for n in range(size)])
    survival = texts.survival(rows).sum(axis=0)
    step_time = load_profile(PROFILE).step_time.with_graph_batch_sizes((1, 2, 4, 8))
    rates = [
        (size + survival[:tier].sum()) / float(step_time.step_ms(size, tier, 100 * size)) for tier in TIERS
    ]
    assert contest.chosen is not None
    assert contest.chosen.num_steps == TIERS[int(np.argmax(rates))]


def test_contestants_say_what_they_lack(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    slots = {"1": {"candidate_steps": [1]}}
    file.write_text(json.dumps({"loads": {"ramp": {"threshold": "threshold:9:3", "sglang-adaptive": slots}}}))
    tuned = Tuned.read(file, tmp_path)
    assert contestant("threshold-tuned", "ramp", tuned, None).rule == "threshold:9:3"
    rule = contestant("sglang-adaptive-tuned", "ramp", tuned, None).rule
    assert json.loads(Path(rule.removeprefix("sglang:")).read_text()) == slots
    with pytest.raises(ContestantError, match="to be tuned"):
        contestant("schedule-tuned", "ramp", tuned, None)
    with pytest.raises(ContestantError, match="--profile"):
        contestant("oracle", "ramp", tuned, None)
    with pytest.raises(ContestantError, match="no contestant"):
        contestant("nobody", "ramp", tuned, None)
    profile = tmp_path / "mine.json"
    assert contestant("oracle", "ramp", tuned, profile).rule == f"oracle:{profile}"
    assert contestant("specgov-greedy", "ramp", tuned, profile).profile == str(profile)
    assert len(ALL) == 16


def run_of(who: str, rates: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {
            "load": "steady_8",
            "contestant": who,
            "seed": seed,
            "output_tokens_per_s": rate,
            "tpot_ms": {"p50": 5.0, "p99": 6.0},
            "ttft_ms": {},
            "tier_time_shares": {"3": 1.0},
            "tier_switches": 0,
            "step_ms": {},
            "most_waiting": 0,
            "errors": {},
        }
        for seed, rate in enumerate(rates)
    ]


def test_the_table_sets_everybody_against_the_best_peer_and_the_oracle() -> None:
    runs = [
        *run_of("static-3", [100, 90, 110]),
        *run_of("specgov-greedy", [104, 105, 106]),
        *run_of("oracle", [110]),
        *run_of("static-0", [50]),
    ]
    lines = load_table(collect([{"runs": runs}])["steady_8"]).splitlines()
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert names == ["oracle", "specgov-greedy", "**static-3**", "static-0"]
    greedy = [cell.strip() for cell in lines[3].split("|")]
    # Seed by seed 104 / 100, 105 / 90 and 106 / 110: 104 / 100 is the median; the oracle has seed 0 alone.
    assert greedy[2:5] == ["105 (104 to 106)", "+4.0%", "94.5%"]


def test_who_played_easier_requests_is_no_better_for_it() -> None:
    runs = [*run_of("static-3", [100, 50]), *run_of("static-1", [90]), *run_of("specgov-greedy", [101, 51])]
    lines = load_table(collect([{"runs": runs}])["steady_8"]).splitlines()
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert names == ["specgov-greedy", "**static-3**", "static-1"]
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["+1.5%", "+0.0%", "-10.0%"]


def test_the_cost_of_presence_is_a_ratio_of_pairs() -> None:
    runs = collect([{"runs": [*run_of("on", [99, 196, 300]), *run_of("off", [100, 200, 300, 400])]}])
    ratios = [math.log(0.99), math.log(0.98), 0.0]
    mean = sum(ratios) / 3
    half = 4.30 * math.sqrt(sum((r - mean) ** 2 for r in ratios) / 2) / math.sqrt(3)
    assert half_width(ratios) == pytest.approx(half)
    cells = [cell.strip() for cell in presence(runs, "on", "off").splitlines()[2].split("|")]
    assert cells[2:5] == [
        "3",
        f"{math.exp(mean):.4f}",
        f"{math.exp(mean - half):.4f} to {math.exp(mean + half):.4f}",
    ]


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="no place for the tables: it needs '<!-- gpu: begin"):
        write_page(page, "new", "gpu")
    assert page.read_text() == "nothing\n"


def test_ranks_are_compared_step_by_step(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.mkdir()
    tiers = {0: {1: 3, 2: 3, 3: 0, 4: 1}, 1: {1: 3, 2: 1, 3: 0}}
    for rank, by_step in tiers.items():
        lines = [f"step,1,{step}.5,{step},2,2,{tier},4,100,1,7,0\n" for step, tier in by_step.items()]
        (record / f"steps.{rank}.csv").write_text(f"head,0.5.17,{rank}\n" + "".join(lines))
    found = compare_ranks(tmp_path)
    assert (found["ranks"], found["steps_by_rank"], found["steps_compared"]) == (2, [4, 3], 3)
    assert (found["steps_that_differ"], found["first_that_differ"]) == (1, [2])
    assert (found["tier_switches"], found["steps_by_tier"]) == (1, {"0": 1, "3": 2})


def test_a_load_may_have_its_own_contestants_and_be_played_but_once(tmp_path: Path) -> None:
    words = ["-o", str(tmp_path / "out.json"), "--loads", "ramp,steady_8", "--contestants", "oracle,static-3"]
    words += ["--only", "steady_8=static-3", "--once", "mixed=specgov-greedy", "--", "--model-path", "m"]
    options = parse_arguments(words)
    assert (options.loads, options.contestants) == (["ramp", "steady_8"], ["oracle", "static-3"])
    assert (options.only, options.once) == ({"steady_8": ["static-3"]}, [("mixed", ["specgov-greedy"])])
    assert options.server == ["--model-path", "m"]


def test_who_lacks_something_is_left_out_and_that_is_noted(tmp_path: Path) -> None:
    contest = SimpleNamespace(options=SimpleNamespace(plain="", profile=None), document={"left_out": []})
    names = ["static-3", "oracle", "threshold-tuned"]
    found = line_up(contest, get_load("ramp"), Tuned({}, tmp_path), names)  # type: ignore[arg-type]
    assert [who.name for who in found] == ["static-3"]
    assert [line.split()[:2] for line in contest.document["left_out"]] == [
        ["ramp:", "oracle"],
        ["ramp:", "threshold-tuned"],
    ]
