"""Shares, intervals and profiles on cases worked out by hand, and results files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from specgov.env.contenders import Contender
from specgov.env.evaluation import Entry
from specgov.env.evaluation_results import (
    ConditionFacts,
    Results,
    ResultsError,
    export,
    open_results,
    read_results,
    record_path,
)
from specgov.env.evaluation_stats import (
    difference,
    headline_shares,
    interval,
    performance_profile,
    ratio_of,
    resampled_means,
    rules_of,
    shares_of,
    standing,
)
from specgov.env.suite import load_suite


def row(condition: str, rule: str, seed: int, **figures: float | None) -> dict[str, object]:
    return {"condition": condition, "rule": rule, "seed": seed, "tier_steps": {"0": 1, "3": 2}, **figures}


def facts(name: str, closed: bool = True) -> ConditionFacts:
    return ConditionFacts(name, "grid", name, "profile", "", closed, False)


@pytest.fixture
def results() -> Results:
    """One closed and one open condition; the rule has 90 and 80 %, and 50 % of the speed in the open one."""
    made = Results(
        Path("none"), "mine", "s", "c", {name: facts(name, name != "open") for name in ("a", "open")}
    )
    made.rows = [
        row("a", "oracle", 0, output_rate=100.0, tpot_ms=10.0, tokens_per_request_s=4.0, efficiency=1.0),
        row("a", "oracle", 1, output_rate=50.0, tpot_ms=10.0, tokens_per_request_s=4.0, efficiency=1.0),
        row("open", "oracle", 0, output_rate=7.0, tpot_ms=5.0, tokens_per_request_s=4.0, efficiency=1.0),
        row("a", "mine", 0, output_rate=90.0, tpot_ms=12.5, tokens_per_request_s=1.0, efficiency=0.9),
        row("a", "mine", 1, output_rate=40.0, tpot_ms=None, tokens_per_request_s=1.0, efficiency=0.8),
        row("open", "mine", 0, output_rate=7.0, tpot_ms=20.0, tokens_per_request_s=2.0, efficiency=0.4),
    ]
    return made


def test_shares_are_of_the_oracle_with_the_same_seed(results: Results) -> None:
    assert shares_of(results, "mine", "output_rate", ["a"]) == {"a": {0: 0.9, 1: 0.8}}
    # Of a latency it is the oracle's over the rule's; where there is none, nothing is said.
    assert shares_of(results, "mine", "tpot_ms", ["a", "open"]) == {"a": {0: 0.8}, "open": {0: 0.25}}
    assert shares_of(results, "mine", "efficiency", ["open"]) == {"open": {0: 0.4}}
    assert rules_of(results, ["open"]) == ["mine"]


def test_what_counts_differs_between_closed_and_open_loops(results: Results) -> None:
    assert headline_shares(results, "mine", ["a", "open"]) == {"a": {0: 0.9, 1: 0.8}, "open": {0: 0.5}}


def test_mean_and_worst_weigh_conditions_alike(results: Results) -> None:
    """(0.85 + 0.5) / 2, though one has two seeds."""
    stands = standing("mine", headline_shares(results, "mine", ["a", "open"]))
    assert stands is not None
    assert stands.share.mean == pytest.approx(0.675)
    assert (stands.worst, stands.worst_condition, stands.conditions) == (0.5, "open", 2)
    assert standing("nobody", {}) is None


def test_the_bootstrap_by_hand() -> None:
    """Two conditions of one seed, 0 and 1: a resample's mean is 0, 1/2, 1 with probability 1/4, 1/2, 1/4."""
    means = resampled_means({"a": {0: 0.0}, "b": {0: 1.0}}, seed=0, resamples=20_000)
    values, counts = np.unique(means, return_counts=True)
    assert values.tolist() == [0.0, 0.5, 1.0]
    # The standard deviation of such a share is below 0.004.
    assert counts / 20_000 == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


def test_the_bootstrap_draws_seeds_within_conditions() -> None:
    """One condition, two seeds: the same distribution; with three seeds of weights 1/3 its mean is theirs."""
    means = resampled_means({"a": {0: 0.0, 1: 1.0}}, seed=0, resamples=20_000)
    assert np.unique(means).tolist() == [0.0, 0.5, 1.0]
    # Unequal numbers of seeds: each condition counts once.
    means = resampled_means({"a": {0: 0.0, 1: 0.0, 2: 0.0}, "b": {0: 1.0}}, seed=0, resamples=20_000)
    assert np.unique(means).tolist() == [0.0, 0.5, 1.0]
    assert means.mean() == pytest.approx(0.5, abs=0.02)


def test_an_interval_of_equal_shares_is_a_point_and_the_same_each_time() -> None:
    shares = {"a": {0: 0.9, 1: 0.9}, "b": {0: 0.9, 1: 0.9}}
    found = interval(shares)
    assert (found.mean, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))
    spread = {"a": {0: 0.5, 1: 0.7}, "b": {0: 0.9, 1: 1.0}}
    assert interval(spread, seed=3) == interval(spread, seed=3)
    assert interval(spread).low < interval(spread).mean < interval(spread).high


def test_differences_are_taken_pair_by_pair() -> None:
    """Two rules whose shares vary alike differ by 0.1 for sure."""
    first = {"a": {0: 0.6, 1: 0.8}, "b": {0: 0.9}, "c": {0: 1.0}}
    second = {"a": {0: 0.5, 1: 0.7}, "b": {0: 0.8}}
    found = difference(first, second)
    assert found is not None
    assert (found.low, found.mean, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert difference(first, {}) is None


def test_a_ratio_of_two_rules() -> None:
    ratio = ratio_of({"a": {0: 0.6, 1: 0.5}, "b": {0: 1.0}}, {"a": {0: 0.8}})
    assert ratio == {"a": {0: pytest.approx(0.75)}}


def test_a_performance_profile_by_hand() -> None:
    """Means 0.95, 0.9 and 0.6."""
    shares = {"a": {0: 0.9, 1: 1.0}, "b": {0: 0.9}, "c": {0: 0.6}}
    found = performance_profile(shares, [0.5, 0.6, 0.7, 0.9, 0.95, 0.96])
    assert found == pytest.approx([1, 1, 2 / 3, 2 / 3, 1 / 3, 0])


def test_a_file_is_continued_where_it_ended(tmp_path: Path) -> None:
    suite = load_suite("quick").with_rules(["oracle", "static:3"])
    condition = suite.conditions[0]
    path = tmp_path / "results.jsonl"
    first = open_results(path, suite)
    assert len(first.missing(condition, 2)) == 4
    first.append([row(condition.name, "oracle", 0), row(condition.name, "oracle", 1)])
    with path.open("a") as file:
        file.write('{"condition": "cut o')  # killed while it wrote
    again = open_results(path, suite)
    assert again.rows == first.rows
    assert again.missing(condition, 2) == [Entry(Contender("static:3"), seed) for seed in (0, 1)]
    again.append([row(condition.name, "static:3", 0)])
    assert read_results(path).rows == again.rows
    assert len(read_results(path).rows) == 3


@pytest.mark.parametrize(
    ("field", "value"), [("code_hash", "other"), ("suite_hash", "other"), ("suite", "standard")]
)
def test_results_of_other_code_or_suites_do_not_mix(tmp_path: Path, field: str, value: str) -> None:
    path = tmp_path / "results.jsonl"
    suite = load_suite("quick")
    open_results(path, suite)
    header = json.loads(path.read_text())
    path.write_text(json.dumps(header | {field: value}) + "\n")
    with pytest.raises(ResultsError, match="do not mix"):
        open_results(path, suite)
    assert open_results(path, suite, renew=True).rows == []
    assert open_results(path, suite).suite == "quick"


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "nonsense\n", '{"schema": "specgov.results"}\n'])
def test_what_is_no_results_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(ResultsError, match=str(path)):
        read_results(path)


def test_a_table_holds_the_same_figures(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    assert record_path(path) == tmp_path / "results.jsonl"
    export(results, path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(results.rows)
    assert (rows[3]["condition"], rows[3]["rule"], rows[3]["output_rate"]) == ("a", "mine", "90.0")
    assert (rows[4]["tpot_ms"], rows[3]["steps_at_3"], rows[3]["is_closed_loop"]) == ("", "2", "True")


def test_parquet_holds_the_same_figures(results: Results, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "results.parquet"
    export(results, path)
    table = parquet.read_table(path).to_pylist()
    assert [r["output_rate"] for r in table] == [r["output_rate"] for r in results.rows]
    assert table[4]["tpot_ms"] is None


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResultsError, match="pip install pyarrow"):
        record_path(tmp_path / "results.parquet")
