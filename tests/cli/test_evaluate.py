"""``specgov evaluate`` and ``specgov plot`` on a suite of seconds."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from specgov.controller.cli import evaluate as evaluate_command

SUITE = """
[mine]
about = "Small."
seeds = 1
rules = ["oracle", "greedy@none", "greedy@learnt", "static:0", "static:3"]

[[mine.grids]]
name = "closed"
scenarios = ["mixed_classes"]
profiles = ["h200-llama-3.1-8b", "h200-qwen3-30b-a3b"]
time_scale = 0.01

[[mine.grids]]
name = "lag"
scenarios = ["mixed_classes"]
lag_steps = [1, 5]
time_scale = 0.01
rules = ["oracle", "static:3"]
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "mine.toml"
    path.write_text(SUITE)
    return path


def evaluate(run, suite: Path, path: Path, *options: str):
    ran = run("evaluate", "--suite", str(suite), "--jobs", "1", "-o", str(path), *options)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


def test_the_same_file_each_time_and_with_several_processes(run, suite, tmp_path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    rules = ("--policies", "static:3,static:0")
    evaluate(run, suite, one, *rules)
    assert run("evaluate", "--suite", str(suite), "--jobs", "2", "-o", str(two), *rules).code == 0
    assert one.read_text() == two.read_text()
    assert len(one.read_text().splitlines()) == 1 + 4 * 3  # four conditions, three rules with the oracle


def test_a_second_run_plays_what_is_missing_only(run, suite, tmp_path, monkeypatch) -> None:
    path = tmp_path / "results.jsonl"
    evaluate(run, suite, path, "--policies", "static:3")
    before = path.read_text()
    evaluate(run, suite, path, "--policies", "static:0")
    after = path.read_text()
    assert after.startswith(before)
    added = [json.loads(line) for line in after[len(before) :].splitlines()]
    assert {row["rule"] for row in added} == {"static:0"}
    monkeypatch.setattr("specgov.env.evaluation.play", lambda *_: pytest.fail("nothing was missing"))
    evaluate(run, suite, path, "--policies", "static:0,static:3")
    assert path.read_text() == after


def test_tables_pictures_and_documents(run, suite, tmp_path) -> None:
    path, document = tmp_path / "results.jsonl", tmp_path / "page.md"
    document.write_text("before\n<!-- results: mine -->\nold\n<!-- end of results: mine -->\nafter\n")
    text = evaluate(run, suite, path, "--update", str(document), "--markdown")
    for heading in ("Aims", "Grid closed", "Grid lag", "Learning loss"):
        assert f"### {heading}" in text
    assert "| rule | lag_steps=1 | lag_steps=5 |" in text
    page = document.read_text()
    assert "### Grid closed" in page
    assert "old" not in page
    assert (page.split("\n")[0], page.split("\n")[-2]) == ("before", "after")
    # Again: the same page.
    evaluate(run, suite, path, "--update", str(document))
    assert document.read_text() == page
    ran = run("plot", str(path), "-o", str(tmp_path / "pictures"))
    assert (ran.code, ran.err) == (0, "")
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [p.name for p in pictures] == ["evaluation-mine-conditions.svg", "evaluation-mine-profile.svg"]
    shown = [element.text for element in ET.parse(pictures[0]).iter() if element.text]
    assert "mixed_classes, h200-qwen3-30b-a3b" in shown
    assert "greedy@none" in shown


def test_what_is_written_meanwhile_stays(run, suite, tmp_path, monkeypatch) -> None:
    document = tmp_path / "page.md"
    marks = "<!-- results: mine -->\n<!-- end of results: mine -->\n"
    document.write_text(f"first draft\n{marks}")
    complete = evaluate_command._complete

    def edited_while_it_plays(*arguments) -> None:
        complete(*arguments)
        document.write_text(f"second draft\n{marks}")

    monkeypatch.setattr(evaluate_command, "_complete", edited_while_it_plays)
    evaluate(run, suite, tmp_path / "r.jsonl", "--policies", "static:3", "--update", str(document))
    assert document.read_text().startswith("second draft\n<!-- results: mine -->\nMade by")


def test_rows_for_programs_and_tables(run, suite, tmp_path) -> None:
    path = tmp_path / "results.csv"
    rows = json.loads(evaluate(run, suite, path, "--policies", "static:3", "--seeds", "2", "--json"))
    assert {(row["rule"], row["seed"]) for row in rows} == {
        (rule, seed) for rule in ("oracle", "static:3") for seed in (0, 1)
    }
    assert len(path.read_text().splitlines()) == 1 + len(rows)
    assert (tmp_path / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seeds", "0"), "--seeds must be 1 or more"),
        (("--suite", "none"), "no suite 'none'"),
        (("--policies", "greedy@never"), "after @ comes one of"),
        (("--policies", "nobody"), "unknown policy 'nobody'"),
    ],
)
def test_mistakes(run, suite, tmp_path, options, said) -> None:
    ran = run("evaluate", "--suite", str(suite), "-o", str(tmp_path / "r.jsonl"), *options)
    assert ran.code in (1, 2)
    assert said in ran.err
    assert not (tmp_path / "r.jsonl").exists()


def test_a_page_without_marks_is_left_alone(run, suite, tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n")
    ran = run("evaluate", "--suite", str(suite), "-o", str(tmp_path / "r.jsonl"), "--update", str(page))
    assert ran.code == 2
    assert "<!-- results: mine -->" in ran.err
    assert page.read_text() == "text\n"


def test_plot_says_what_is_missing(run, suite, tmp_path) -> None:
    path = tmp_path / "results.jsonl"
    evaluate(run, suite, path, "--policies", "static:3")
    ran = run("plot", str(path), "--policies", "static:7")
    assert ran.code == 2
    assert "nothing on 'static:7'" in ran.err
    assert run("plot", str(tmp_path / "none.jsonl")).code == 1
