"""The emulated engine from the shell, rules in hindsight, and the demo, against a sidecar of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specgov.controller.cli.demo import stretched
from specgov.controller.cli.demo_view import changes_of_tier, status_line
from specgov.controller.cli.emulate import find_scenario
from specgov.controller.cli.engine_run import EngineRun
from specgov.controller.cli.errors import CliError
from specgov.controller.cli.hindsight import play_fixed_rules, static_rules, threshold_rules
from specgov.controller.cli.sidecar_process import sidecar_process
from specgov.env.emulated import run_in_process
from specgov.policies.registry import make_policy
from specgov.policies.types import EngineSpec, PolicyContext


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with sidecar_process(tmp_path_factory.mktemp("s"), ["--policy", "static:3"]) as target:
        yield target


# The demo's load in 1.6 s of simulated time: enough to go up to a batch of hundreds and back.
SHORT_S = 1.6


@pytest.mark.parametrize("rule", ["static:0", "static:7", "threshold:16:3"])
def test_hindsight_plays_what_a_server_of_its_own_would(rule: str) -> None:
    scenario = stretched(find_scenario("demo"), SHORT_S)
    others = [*static_rules(scenario.engine), rule, "threshold:2:1"]
    trace = play_fixed_rules(scenario, others, 5, SHORT_S)[-2]
    policy = make_policy(rule, PolicyContext(scenario.engine, np.random.default_rng(0), lambda: 0.0))
    alone = []
    for step in run_in_process(policy, scenario.build(1, 5)):
        if step.result.time_ns[0] * 1e-9 > SHORT_S:
            break
        alone.append(step.result)
    assert trace.name == rule
    assert trace.end_s.tolist() == [float(result.time_ns[0]) * 1e-9 for result in alone]
    assert trace.num_steps.tolist() == [int(result.num_steps[0]) for result in alone]
    assert trace.output_tokens.tolist() == [int(result.output_tokens[0]) for result in alone]


def test_rules_tried_in_hindsight() -> None:
    engine = EngineSpec((0, 1, 3), max_running_requests=8)
    assert static_rules(engine) == ["static:0", "static:1", "static:3"]
    assert threshold_rules(engine) == [f"threshold:{size}:{tier}" for tier in (1, 3) for size in (2, 4, 8)]


def test_stretching_keeps_the_proportions() -> None:
    whole, half = (
        find_scenario("demo"),
        stretched(find_scenario("demo"), find_scenario("demo").duration_s / 2),
    )
    assert half.duration_s == whole.duration_s / 2
    assert half.table.arrivals.concurrency == whole.table.arrivals.concurrency
    assert half.table.arrivals.start_s == tuple(start / 2 for start in whole.table.arrivals.start_s)
    assert half.table.mix.start_s == tuple(start / 2 for start in whole.table.mix.start_s)


def test_emulate_follows_the_sidecar(run, sidecar: str) -> None:
    options = ("--target", sidecar, "--duration-s", "1", "--fast", "--json")
    ran = run("emulate", *options)
    assert (ran.code, ran.err) == (0, "")
    facts = json.loads(ran.out)
    assert facts["tier_shares"] == {"3": 1.0}
    assert facts["steps_by_own_rule"] == 0
    assert facts["simulated_s"] >= 1
    again = json.loads(run("emulate", *options).out)
    assert again["output_tokens_per_s"] == facts["output_tokens_per_s"]  # the same seed, in lockstep
    other = json.loads(run("emulate", *options, "--seed", "1").out)
    assert other["output_tokens_per_s"] != facts["output_tokens_per_s"]


def test_emulate_in_words_and_the_engine_is_known_afterwards(run, sidecar: str) -> None:
    ran = run(
        "emulate", "--target", sidecar, "--load", "quiet_chat", "--duration-s", "0.5", "--engine-id", "e7"
    )
    assert ran.code == 0
    for said in ("quiet_chat", "tokens/s", "100 % at 3", "p50", "0 reports dropped"):
        assert said in ran.out
    (engine,) = [
        e
        for e in json.loads(run("engines", "--json", "--target", sidecar).out)
        if e["info"]["engine_id"] == "e7"
    ]
    assert engine["info"]["engine"] == "emulated"
    assert engine["reports"] > 0
    assert engine["reports_rejected"] == 0


def test_decide_asks_a_real_sidecar(run, sidecar: str) -> None:
    ask = ("decide", "--batch-size", "256", "--target", sidecar, "--json", "--tiers", "0,3")
    # Break-even at batch size 256 and num_steps 3 is an accept length of about 2.4 with these step times.
    below = json.loads(run(*ask, "--accept-length", "1.5", "--at-num-steps", "3").out)
    above = json.loads(run(*ask, "--accept-length", "3.5", "--at-num-steps", "3").out)
    assert (below["num_steps"], above["num_steps"]) == (0, 3)
    # 256 requests with an accept length of 3.5 make 896 tokens in a step.
    assert above["estimates"][1]["expected_tokens"] == pytest.approx(896, rel=1e-6)
    refused = run(*ask, "--accept-length", "9", "--at-num-steps", "3")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("--target", "unix:///nowhere/s.sock"), 3, "specgov serve"),
        (("--load", "nonsense"), 1, "nonsense"),
        (("--speed", "0"), 2, "--speed"),
        (("--duration-s", "-1"), 2, "--duration-s"),
        (("--duration-s", "nan"), 2, "must be above 0"),
        (("--duration-s", "inf"), 2, "must be above 0"),
        (("--speed", "nan"), 2, "must be above 0"),
        (("--engine-id", ""), 2, "--engine-id is empty"),
    ],
)
def test_emulate_refuses_in_one_line(run, argv: tuple[str, ...], code: int, said: str) -> None:
    ran = run("emulate", *argv)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert said in ran.err


def test_a_sidecar_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="nonsense"), sidecar_process(tmp_path, ["--policy", "nonsense"]):
        pytest.fail("it started")


# Runs the command in a process that cannot find what only the extras install.
WITHOUT_EXTRAS = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("torch", "gymnasium", "stable_baselines3", "matplotlib"):
            return None
        return self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from specgov.controller.cli.main import main
sys.exit(main())
"""


def test_the_demo_on_the_base_install(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-c",
        WITHOUT_EXTRAS,
        "demo",
        "--duration-s",
        str(SHORT_S),
        "--policy",
        "threshold:8:3",
    ]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [line.split()[0] for line in ended.stdout.splitlines() if " %" in line]
    assert rows[0] == "threshold:8:3"
    assert [row for row in rows if row.startswith("static")] == [
        f"static:{tier}" for tier in (0, 1, 2, 3, 5, 7)
    ]
    assert "best of 40 thresholds" in ended.stdout
    assert "p99" in ended.stdout
    svg = ET.parse(tmp_path / "specgov-demo.svg").getroot()
    assert any(text.text == "batch size" for text in svg.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize(
    "argv", [("--policy", "nonsense"), ("--duration-s", "0"), ("--plot", "/nowhere/x.svg")]
)
def test_the_demo_refuses_before_it_starts(run, argv: tuple[str, ...]) -> None:
    ran = run("demo", *argv)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "specgov.controller.cli.main", "demo", "--duration-s", "30"]
    demo = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = iter(demo.stdout.readline, "")
        assert any("tokens/s" in line for line in lines)  # the engine runs
        assert processes_that_mention(tmp_path)
        demo.send_signal(number)
        _, said = demo.communicate(timeout=30)
    finally:
        demo.kill()
    assert (demo.returncode, said) == (code, "")
    assert not processes_that_mention(tmp_path)
    assert not list(tmp_path.iterdir())


def processes_that_mention(path: Path) -> list[str]:
    """The command lines that hold ``path``: the sidecar's holds its socket's."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(path).encode() in (line := file.read_bytes()):
                found.append(line.decode())
    return found


def engine_run() -> EngineRun:
    """Five steps of half a second: 2 tokens each, tiers 0 0 3 3 1."""
    return EngineRun([0.5, 1.0, 1.5, 2.0, 2.5], [1, 1, 2, 2, 4], [0, 0, 3, 3, 1], [2, 2, 2, 2, 2], [0.5, 1.5])


def test_where_a_run_stands() -> None:
    run = engine_run()
    assert run.switches == 2
    assert run.recent_rate(1.0) == 4.0  # the two steps that ended after 1.5 s
    assert run.recent_rate(10.0) == 4.0  # all 10 tokens in the 2.5 s so far
    assert run.round_trip_ms(0.5) == 1.0
    assert changes_of_tier(run, 8) == [(2.5, 4, 3, 1), (1.5, 2, 0, 3)]
    assert changes_of_tier(run, 1) == [(2.5, 4, 3, 1)]
    assert status_line(run) == "  2.5 s  batch   4  num_steps 1       4 tokens/s  2 switches"
