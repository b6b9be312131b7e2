"""``specgov simulate`` and ``specgov scenarios``."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from specgov.controller.cli.simulated_run import simulate_policy
from specgov.env.scenario import load_scenario, parse_scenario, scenario_names

REQUEST = """[one]
tests = "One request, and another after a pause."
arrivals = { kind = "trace", path = "trace.csv", repeat = false }
[[one.classes]]
acceptance = "chat"
prompt = { median_tokens = 9 }
output = { median_tokens = 9 }
"""


def summary(run, tmp_path, *options):
    """The JSON of a short run and the rows of its trajectory."""
    files = ("--plot", str(tmp_path / "run.svg"), "--trajectory", str(tmp_path / "run.csv"))
    ran = run("simulate", "--json", "--duration-s", "2", *files, *options)
    assert (ran.code, ran.err) == (0, "")
    with (tmp_path / "run.csv").open() as file:
        return json.loads(ran.out), list(csv.DictReader(file))


def test_figures_agree_with_the_trajectory(run, tmp_path):
    facts, rows = summary(run, tmp_path, "--scenario", "mixed_classes", "--policy", "static:3", "--seed", "4")
    tokens = sum(int(row["output_tokens"]) for row in rows)
    assert facts["steps"] == len(rows)
    assert facts["output_tokens"] == tokens
    assert facts["simulated_s"] == 2.0
    assert facts["output_tokens_per_s"] == tokens / 2.0
    assert facts["requests_finished"] == sum(int(row["finished_requests"]) for row in rows)
    assert {row["num_steps"] for row in rows} == {"3"}
    assert facts["tiers"] == {"3": {"time": 1.0, "steps": 1.0}}
    # The clock is the sum of what passed.
    passed_ms = sum(float(row[name]) for row in rows for name in ("step_ms", "prefill_ms", "idle_ms"))
    assert passed_ms == pytest.approx(1000 * float(rows[-1]["end_s"]), rel=1e-4)
    assert ET.parse(tmp_path / "run.svg").getroot().tag.endswith("svg")


def test_the_same_seed_gives_the_same_run_and_another_one_does_not(run, tmp_path):
    first, second, other = (
        summary(run, tmp_path, "--scenario", "flash_crowd", "--seed", seed) for seed in "112"
    )
    assert first == second
    assert first[0]["output_tokens"] != other[0]["output_tokens"]


def test_time_at_each_tier(run, tmp_path):
    """A threshold of 8 requests on a load of 4 and then 40: both tiers are used, their shares make one."""
    path = tmp_path / "mine.toml"
    path.write_text(
        '[mine]\ntests = "Two loads."\n'
        'arrivals = { kind = "closed", start_s = [0, 1], concurrency = [4, 40] }\n'
        '[[mine.classes]]\nacceptance = "chat"\n'
        "prompt = { median_tokens = 50 }\noutput = { median_tokens = 300 }\n"
    )
    facts, rows = summary(run, tmp_path, "--scenario", str(path), "--policy", "threshold:8:3")
    assert set(facts["tiers"]) == {"0", "3"}
    assert sum(share["time"] for share in facts["tiers"].values()) == pytest.approx(1)
    step_ms = np.array([float(row["step_ms"]) for row in rows])
    at_3 = np.array([row["num_steps"] == "3" for row in rows])
    assert facts["tiers"]["3"]["time"] == pytest.approx(step_ms[at_3].sum() / step_ms.sum(), rel=1e-4)
    assert facts["tier_switches"] == 1


def test_latencies_of_one_request(tmp_path):
    """Alone in the system: 4 tokens after the first at tier 0, so TPOT is the mean of its 4 steps."""
    (tmp_path / "trace.csv").write_text("t_s,in_tok,out_tok\n0,10,4\n")
    run = simulate_policy(parse_scenario(REQUEST, "f", folder=tmp_path), "static:0", seed=0, duration_s=60.0)
    assert len(run.rows) == 4
    # Step times pass on the server's clock in whole nanoseconds.
    assert run.tpot_ms == pytest.approx([sum(row.step_ms for row in run.rows) / 4], abs=1e-5)
    assert run.ttft_ms == pytest.approx([run.rows[0].prefill_ms], abs=1e-5)


@pytest.mark.parametrize(("duration_s", "steps"), [(60.0, 8), (5.0, 4)])
def test_time_is_decode_prefill_or_idle_up_to_the_end(tmp_path, duration_s, steps):
    """Two requests of 4 tokens, 20 s apart: the run ends with the load, or idle at its own end."""
    (tmp_path / "trace.csv").write_text("t_s,in_tok,out_tok\n0,10,4\n20,10,4\n")
    run = simulate_policy(parse_scenario(REQUEST, "f", folder=tmp_path), "static:0", 0, duration_s)
    assert len(run.rows) == steps
    facts = run.summary()
    end_s = run.rows[-1].end_s if steps == 8 else 5.0
    assert facts["simulated_s"] == end_s
    decode_s = sum(row.step_ms for row in run.rows) / 1e3
    prefill_s = sum(row.prefill_ms for row in run.rows) / 1e3
    assert facts["time_shares"] == {
        "decode": pytest.approx(decode_s / end_s),
        "prefill": pytest.approx(prefill_s / end_s),
        "idle": pytest.approx((end_s - decode_s - prefill_s) / end_s, abs=1e-6),
    }
    assert facts["output_tokens_per_s"] == steps / end_s


def test_progress_follows_simulated_time():
    seen = []
    simulate_policy(load_scenario("quiet_chat"), "static:3", seed=0, duration_s=3.0, progress=seen.append)
    assert seen == sorted(seen)
    assert 2.5 < seen[-1] <= 3.0
    assert len(seen) <= 30


def test_for_people(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = run("simulate", "--scenario", "quiet_chat", "--duration-s", "2", "--policy", "threshold:16:3")
    assert (ran.code, ran.err) == (0, "")
    for word in (
        "output rate",
        "time per output token",
        "time to first token",
        "% decode",
        "waiting at the end",
        "k=3",
        "p99",
    ):
        assert word in ran.out
    assert (tmp_path / "simulate-quiet_chat-threshold-16-3-0.svg").exists()
    assert (tmp_path / "simulate-quiet_chat-threshold-16-3-0.csv").exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--scenario", "quiet_cat"), 1, "no scenario 'quiet_cat': name a TOML file or one of quiet_chat"),
        (("--policy", "static:99"), 2, "this engine has no tier 99"),
        (("--policy", "oracles"), 2, "oracles"),
        (("--duration-s", "0"), 2, "--duration-s must be above 0"),
        (("--seed", "-1"), 2, "--seed 0 or more"),
    ],
)
def test_what_cannot_be_run(run, tmp_path, monkeypatch, options, code, message):
    monkeypatch.chdir(tmp_path)
    ran = run("simulate", *options)
    assert ran.code == code
    assert message in ran.err
    assert list(tmp_path.iterdir()) == []


def test_scenarios_are_listed_with_what_they_test(run):
    for argv in (("scenarios",), ("scenarios", "list")):
        ran = run(*argv)
        assert ran.code == 0
        for name in scenario_names():
            assert f"{name} " in ran.out
            assert load_scenario(name).tests in ran.out


def test_a_scenario_is_shown_as_a_file_that_works(run, tmp_path):
    ran = run("scenarios", "show", "moe")
    path = tmp_path / "mine.toml"
    path.write_text(ran.out)
    assert load_scenario(path).table == load_scenario("moe").table
    assert run("scenarios", "show", "none").code == 1
