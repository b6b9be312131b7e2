"""``specgov train``, ``export`` and ``policy show``: a run's life from the shell, and what is refused."""

from __future__ import annotations

import json

import pytest

from specgov.controller.cli.train import scenarios_of
from specgov.policies.bundle import load_bundle

SMALL = ("--steps", "512", "--n-envs", "12", "--scenario", "quiet_chat", "--time-limit-s", "0")


def test_train_export_show_and_use(run, tmp_path):
    folder, bundle = tmp_path / "run", tmp_path / "mine"
    trained = run("train", "--policy", "ppo", "--seed", "3", *SMALL, "-o", str(folder))
    assert trained.code == 0, trained.err
    assert "the best policy is" in trained.out
    assert json.loads((folder / "run.json").read_text())["recipe"]["scenarios"] == ["quiet_chat"]

    exported = run("export", str(folder), "-o", str(bundle), "--scenario", "quiet_chat", "--steps", "20")
    assert exported.code == 0, exported.err
    card = load_bundle(bundle).card
    assert card.training["seed"] == 3
    assert 0 < card.scores["quiet_chat"]["share_of_best_rate"] <= 100

    shown = run("policy", "show", str(bundle))
    assert "# Policy bundle mine" in shown.out
    assert card.weights_sha256 in shown.out
    assert json.loads(run("policy", "show", str(bundle), "--json").out)["name"] == "mine"

    options = ("--scenario", "quiet_chat", "--duration-s", "2", "--json")
    files = ("--plot", str(tmp_path / "p.svg"), "--trajectory", str(tmp_path / "t.csv"))
    played = run("simulate", "--policy", f"ppo:{bundle}", *options, *files)
    assert played.code == 0, played.err
    assert json.loads(played.out)["output_tokens"] > 0

    again = run("train", *SMALL, "-o", str(folder))
    assert again.code == 2
    assert "holds a run" in again.err
    resumed = run("train", "--seed", "3", *SMALL, "-o", str(folder), "--resume")
    assert resumed.code == 0, resumed.err


def test_mistakes_are_said(run, tmp_path):
    nothing = run("train", "-o", str(tmp_path / "none"), "--resume")
    assert nothing.code == 2
    assert "no run to resume" in nothing.err
    assert run("train", "-o", str(tmp_path / "none"), "--seed", "-1").code == 2
    unknown = run("train", "-o", str(tmp_path / "none"), "--scenario", "nowhere")
    assert unknown.code == 1
    assert "nowhere" in unknown.err
    odd = run("train", "-o", str(tmp_path / "none"), "--n-envs", "5")
    assert odd.code == 1
    assert "n_envs is 5" in odd.err
    empty = run("export", str(tmp_path), "-o", str(tmp_path / "b"))
    assert empty.code == 1
    assert "no bundle" in empty.err
    assert run("policy", "show", "nowhere").code == 1


@pytest.mark.parametrize(
    ("scenario", "logs", "expected"),
    [
        ("", (), ("random",)),
        ("", ("a.jsonl", "s3://b/c"), ("log:a.jsonl", "log:s3://b/c")),
        ("random, moe", ("a.jsonl",), ("random", "moe", "log:a.jsonl")),
    ],
)
def test_decision_logs_are_trained_on_alone_or_beside_scenarios(scenario, logs, expected):
    assert scenarios_of(scenario, logs) == expected


def test_a_decision_log_that_is_not_there_is_named(run, tmp_path):
    missing = run("train", "--log", str(tmp_path / "nowhere.jsonl"), "-o", str(tmp_path / "none"))
    assert missing.code == 1
    assert "nowhere.jsonl" in missing.err
