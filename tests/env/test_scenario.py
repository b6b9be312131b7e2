"""Scenarios: the bundled ones run, users' files work, and errors name line and field."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from specgov.env.rng import environment_keys
from specgov.env.scenario import (
    ScenarioError,
    load_scenario,
    parse_scenario,
    scenario_names,
    scenario_text,
)
from specgov.env.toml_lines import line_of
from specgov.policies.profile import load_profile

SHARED = Path(__file__).parents[3] / "shared/data/traces"

MINE = """# A comment
[mine]
tests = "Something."
duration_s = 10
engine = { max_running_requests = 8, kv_capacity_tokens = 9000 }

[mine.arrivals]
kind = "steady"
rate_rps = 4

[[mine.classes]]
acceptance = "chat"
prompt = { median_tokens = 100 }
output = { median_tokens = 20 }

[[mine.classes]]
conditional_acceptance = [0.8, 0.5]
prompt = { median_tokens = 100 }
output = { median_tokens = 20, sigma = 0.5, max_tokens = 400 }
"""


def mine(*changes):
    text = MINE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def arrivals(lines):
    return ('kind = "steady"\nrate_rps = 4', lines)


def test_there_are_the_named_scenarios():
    assert set(scenario_names()) == {
        "quiet_chat", "saturated_batch", "day_and_night", "flash_crowd", "code_by_day_creative_by_night",
        "mixed_classes", "poor_drafter", "moe", "long_context", "agentic_bursts", "drift_after_weight_update",
        "cold_draft_kv", "host_hiccups",
    }  # fmt: skip


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_runs_and_says_what_it_tests(name):
    scenario = load_scenario(name)
    assert scenario.tests.endswith((".", ")."))
    assert scenario.name == name
    server = scenario.build(2, seed=1)
    tiers = np.array(scenario.engine.tiers)
    tokens = 0
    for step in range(100):
        result = server.step(np.full(2, tiers[step % len(tiers)]))
        tokens += int(result.output_tokens.sum())
    assert tokens > 100
    assert not server.exhausted.any()


@pytest.mark.parametrize("name", scenario_names())
def test_a_bundled_scenario_can_be_copied_into_a_file(tmp_path, name):
    path = tmp_path / "copy.toml"
    path.write_text(scenario_text(name))
    assert load_scenario(path).table == load_scenario(name).table


def test_a_users_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    scenario = load_scenario(path)
    assert scenario.name == "mine"
    assert scenario.duration_s == 10
    engine = scenario.engine
    assert engine.max_running_requests == 8
    assert engine.tiers == load_profile("h200-llama-3.1-8b").tiers
    assert engine.decision_lag_steps == 3  # 2 of the overlap loop, 1 of the transport
    own = scenario.server_config().acceptance.classes[1]
    np.testing.assert_allclose(own.survival, [0.8, 0.4])


def test_one_of_several_scenarios_of_a_file(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(MINE + MINE.replace("mine", "other").replace("duration_s = 10", "duration_s = 20"))
    assert load_scenario(f"{path}:other").duration_s == 20
    with pytest.raises(
        ScenarioError, match=r"holds 2 tables \(mine, other\): say which, as in .*two.toml:NAME"
    ):
        load_scenario(path)
    with pytest.raises(ScenarioError, match=r"no scenario \[third\]; there are mine, other"):
        load_scenario(f"{path}:third")


ENGINE = "f:5: mine.engine."
THREE_SHARES = mine(
    ("[mine.arrivals]", "mix = { start_s = [0, 5] }\n[mine.arrivals]"),
    ('"chat"', '"chat"\nshare = [1, 2, 3]'),
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (mine(("duration_s = 10", "duration_s = 0")), "f:4: mine.duration_s: must be greater than 0, not 0"),
        (
            mine(("duration_s = 10", 'duration_s = "long"')),
            "f:4: mine.duration_s: must be a valid number, not 'long'",
        ),
        (
            mine(("duration_s", "length_s")),
            "f:4: mine.length_s: unknown field; there are tests, profile, durat",
        ),
        (
            mine(("max_running_requests = 8", "max_running = 8")),
            ENGINE + "max_running: unknown field: did you mean max_running_r",
        ),
        (mine(("max_running_requests = 8", "tiers = [3, 1]")), ENGINE + "tiers: must ascend"),
        (mine(("max_running_requests = 8", "tiers = 3")), ENGINE + "tiers: must be a list, not 3"),
        (
            mine(("rate_rps = 4", "rate_rps = 'much'")),
            "f:9: mine.arrivals.rate_rps: must be a valid number, not 'much'",
        ),
        (
            mine(("rate_rps = 4", "rate_rps = 4\nperiod_s = 4")),
            "f:10: mine.arrivals.period_s: unknown field; there are gaps, cv, random_phase, kind, rate_rps",
        ),
        (mine(("rate_rps = 4\n", "")), "f:7: mine.arrivals.rate_rps: Field required"),
        (
            mine(('"steady"', '"sturdy"')),
            "f:8: mine.arrivals.kind: there is no 'sturdy'; there are 'steady', 'di",
        ),
        (mine(('kind = "steady"\n', "")), "f:7: mine.arrivals.kind: Field required"),
        (
            mine(('[mine.arrivals]\nkind = "steady"\nrate_rps = 4', "arrivals = 4")),
            "f:7: mine.arrivals: must be a table, not 4",
        ),
        (
            mine(('"chat"', '"chatty"')),
            "f:12: mine.classes.0.acceptance: no acceptance class 'chatty'; there",
        ),
        (mine(('acceptance = "chat"\n', "")), "f:11: mine.classes.0: give one of acceptance"),
        (
            mine(('"chat"', '"chat"\nshare = -1')),
            "f:13: mine.classes.0.share.0: must be greater than or equal to 0, not -1",
        ),
        (
            mine(("0.8, 0.5", "0.8, 1.5")),
            "f:17: mine.classes.1.conditional_acceptance.1: must be less .*, not 1.5",
        ),
        (mine(("sigma = 0.5", "sigma = -1")), "f:19: mine.classes.1.output.sigma: must be .*, not -1"),
        (mine(("{ median_tokens = 100 }", "100")), "f:13: mine.classes.0.prompt: must be a table, not 100"),
        (
            mine(("max_tokens = 400", "min_tokens = 9, max_tokens = 4")),
            "f:19: .*output.min_tokens: 9 is above max_tokens 4",
        ),
        (mine(("[mine.arrivals]", 'profile = "no"\n[mine.arrivals]')), "f:7: mine.profile: .*no"),
        (
            mine(("[mine.arrivals]", "mix = { start_s = [] }\n[mine.arrivals]")),
            "f:7: mine.mix.start_s: .*at least 1",
        ),
        (
            mine(("[mine.arrivals]", "mix = { start_s = [5] }\n[mine.arrivals]")),
            "f:7: mine.mix.start_s: must ascend from 0",
        ),
        (mine(("duration_s = 10", "duration_s = ")), r"f:4: not TOML: .*\(column 14\)"),
        ("[mine]\ntests = [", "f: not TOML: .*at end of document"),
        (THREE_SHARES, "f:14: mine.classes.0.share: 3 values, but mix.start_s has 2"),
        (
            mine(arrivals('kind = "pieces"\nstart_s = [0, 5]\nrate_rps = [1]')),
            "f:10: mine.arrivals.rate_rps: 1 values, but start_s has 2",
        ),
        (
            mine(arrivals('kind = "closed"\nstart_s = [1]\nconcurrency = 4')),
            "f:9: mine.arrivals.start_s: must ascend from 0",
        ),
        (
            mine(arrivals('kind = "closed"\nconcurrency = 0')),
            "f:9: mine.arrivals.concurrency: .*one must be above 0",
        ),
        (
            mine(arrivals('kind = "steady"\nrate_rps = 4\nrandom_phase = true')),
            "f:10: .*random_phase: needs period_s",
        ),
        (
            mine(
                arrivals(
                    'kind = "flash_crowd"\nbase_rps = 1\npeak_rps = 2\nat_s = 3\ncrowd_s = 4\nperiod_s = 7'
                )
            ),
            "f:13: .*period_s: must be above at_s",
        ),
        ("", "f: holds 0 tables"),
    ],
)
def test_what_is_wrong_is_said_with_line_and_field(text, message):
    """One mistake is one line, whatever stands around it."""
    with pytest.raises(ScenarioError, match=f"^{message}") as error:
        parse_scenario(text, "f")
    assert len(str(error.value).splitlines()) == 1


def test_all_mistakes_of_a_file_are_said_at_once():
    text = mine(("duration_s = 10", "duration_s = 0"), ("rate_rps = 4", "rate_rps = -4"))
    with pytest.raises(ScenarioError) as error:
        parse_scenario(text, "mine.toml")
    assert [line.split(":")[1] for line in str(error.value).splitlines()] == ["4", "9"]


def test_what_is_not_there(tmp_path):
    with pytest.raises(
        ScenarioError, match="no scenario 'quite_chat': name a TOML file or one of quiet_chat, "
    ):
        load_scenario("quite_chat")
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")
    with pytest.raises(ScenarioError, match="no bundled scenario"):
        scenario_text("none")


@pytest.mark.parametrize(
    ("lines", "cv"),
    [
        ('kind = "diurnal"\nmean_rps = 4\nperiod_s = 5', 1.0),
        ('kind = "pieces"\nstart_s = [0, 5]\nrate_rps = [2, 6]\nperiod_s = 10', 1.0),
        ('kind = "flash_crowd"\nbase_rps = 2\npeak_rps = 22\nat_s = 5\ncrowd_s = 1\nperiod_s = 10', 1.0),
        ('kind = "steady"\nrate_rps = 4\ngaps = "gamma"\ncv = 2', 2.0),
        ('kind = "steady"\nrate_rps = 4\ngaps = "weibull"\ncv = 0.5', 0.5),
    ],
)
def test_open_loops_have_their_mean_rate(lines, cv):
    """4/s on average, so 40 requests in 10 s; and (cv² - 1) / 2 more, since the process begins at an arrival.

    That is the renewal theorem; the mean of 300 environments lies within 4 of its standard deviations.
    """
    workload = parse_scenario(mine(arrivals(lines)), "f").workload()
    workload.start(environment_keys(0, 300))
    counts = np.zeros(300)
    while (due := np.flatnonzero(workload.next_arrival_s() < 10.0)).size:
        workload.take(due, np.zeros(len(due)))
        counts[due] += 1
    assert abs(counts.mean() - 40.0 - (cv**2 - 1) / 2) < 4 * cv * math.sqrt(40.0 / 300)


def test_a_trace_is_found_beside_the_file(tmp_path):
    (tmp_path / "trace.csv").write_text("t_s,in_tok,out_tok\n0,10,3\n2,20,4\n")
    (tmp_path / "mine.toml").write_text(
        mine(arrivals('kind = "trace"\npath = "trace.csv"\ntime_scale = 0.5\nrepeat = false'))
    )
    server = load_scenario(tmp_path / "mine.toml").build(1, 0)
    tokens = 0
    while not server.exhausted[0]:
        tokens += int(server.step(np.array([0])).output_tokens[0])
    assert tokens == 7
    (tmp_path / "trace.csv").unlink()
    with pytest.raises(ScenarioError, match=r"scenario mine: .*trace.csv: cannot be read"):
        load_scenario(tmp_path / "mine.toml").workload()


def test_a_profile_is_found_beside_the_file(tmp_path, monkeypatch):
    """As a trace is, wherever the command is run; a bundled name stays one."""
    bundled = files("specgov.policies.profiles") / "h200-qwen3-30b-a3b.json"
    folder = tmp_path / "scenarios"
    (folder / "profiles").mkdir(parents=True)
    (folder / "profiles/own.json").write_text(bundled.read_text())
    (folder / "mine.toml").write_text(
        mine(("duration_s = 10", 'duration_s = 10\nprofile = "profiles/own.json"'))
    )
    monkeypatch.chdir(tmp_path)
    assert load_scenario("scenarios/mine.toml").profile.hash == load_profile("h200-qwen3-30b-a3b").hash
    (folder / "profiles/own.json").rename(tmp_path / "own.json")
    with pytest.raises(
        ScenarioError, match=r"mine.toml:5: mine.profile: cannot read the profile scenarios.prof"
    ):
        load_scenario("scenarios/mine.toml")


@pytest.mark.skipif(not SHARED.exists(), reason="the published traces are not here")
def test_servegen_windows_as_load():
    table = 'path = "trace_servegen_windows.csv"\ncategory = "language/m-large"\nrate_scale = 0.01'
    lines = f'kind = "servegen"\n{table}'
    workload = parse_scenario(mine(arrivals(lines)), "mine.toml", folder=SHARED).workload()
    workload.start(np.arange(3, dtype=np.uint64))
    assert (workload.next_arrival_s() > 0).all()


def test_line_of():
    text = 'a = 1\n[t]\nb = 2\n[[t.list]]\nc.d = 3\n[[t.list]]\n"e" = { f = 4 }\n[t.list.sub]\ng = 1\n'
    places = {
        ("a",): 1, ("t",): 2, ("t", "b"): 3, ("t", "list", 0): 4, ("t", "list", 0, "c", "d"): 5,
        ("t", "list", 1): 6, ("t", "list", 1, "e", "f"): 7, ("t", "list", 1, "sub", "g"): 9,
        ("t", "none"): 2, ("none",): None,
    }  # fmt: skip
    assert {path: line_of(text, path) for path in places} == places
