"""Each worker of SGLang 0.5.9 under sidecars of all kinds, one after another; every token is checked."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from servers import ACCEPTED, REJECTED, Server, wait_until
from servers059 import LAUNCH, SERVER, V1, V2, accepted_after, running, tier_pairs
from sidecars import Recorder, at_tier, decision, fake_sidecar, reports_of, sidecar_process

from specgov.proto.v1 import specgov_pb2 as pb

pytestmark = pytest.mark.sglang

STEPS = 1000
THRESHOLD = (
    5  # of the patch with which this release was first made to stop speculating: 3 below it, 0 from it on
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"unix://{tmp_path_factory.mktemp('s') / 's'}"


@pytest.fixture(scope="module", params=[V1, V2])
def worker(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(
    models: Path, worker: str, target: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    variables = {"SPECGOV_FALLBACK": f"threshold:{THRESHOLD}:3", "SPECGOV_ENGINE_ID": "old"}
    # Room for eight short requests, but not for eight long ones: SGLang takes them in and then retracts some.
    room = ("--max-total-tokens", "1600", "--schedule-conservativeness", "0.1")
    folder = tmp_path_factory.mktemp("server")
    command = LAUNCH if worker == V1 else SERVER
    with running(models, folder, worker, target, *room, command=command, **variables) as server:
        yield server


def use_until(server: Server, holds: Any, tokens: int = 20) -> None:
    """Keep one request after another running until something holds."""

    def once() -> bool:
        server.check(ACCEPTED, tokens)
        return bool(holds())

    wait_until(once)


def load(server: Server, steps: int) -> list[dict[str, Any]]:
    """Requests until enough steps were made, one to eight at a time and of many lengths; these steps."""
    before, starts = len(server.steps()), itertools.count()
    for width in itertools.cycle((8, 2, 5, 1)):
        with ThreadPoolExecutor(width) as pool:
            list(pool.map(lambda _: server.check(10 + 31 * (next(starts) % 8), 60), range(width)))
        if len(server.steps()) - before >= steps:
            return server.steps()[before:]
    raise AssertionError


def at_random(messages: Iterator[pb.EngineMessage], context: grpc.ServicerContext) -> Iterator[pb.Decision]:
    """Drafts or none by the toss of a coin."""
    rng = random.Random(7)
    for report in reports_of(messages):
        yield decision(report, rng.choice([0, 3]))


def test_launch_names_the_live_worker_and_says_what_was_not_run(server: Server, worker: str) -> None:
    said = " ".join(server.log.split())
    if worker == V1:  # the other was started without launch's checks, which take a while
        assert "EAGLEWorker: the overlap loop is off" in said
        assert "under Specgov was run on a CPU only" in said
    assert "Specgov 0.1.0 on SGLang 0.5.9 is live: engine old, " in said
    assert "tiers 0,3, tensor-parallel ranks 1, fallback threshold:5:3" in said


def test_without_a_sidecar_the_threshold_holds_on_every_step(server: Server) -> None:
    # Of 61 tokens the first comes from prefill; then a step gives 4 tokens where all drafts are accepted.
    assert server.check(ACCEPTED, 61) == math.ceil(60 / 4)
    assert server.check(REJECTED, 61) == 60
    steps = load(server, 150)
    assert [s for s in steps if s["num_steps"] != (3 if len(s["ids"]) < THRESHOLD else 0)] == []
    assert {s["num_steps"] for s in steps} == {0, 3}


def test_at_random_tiers_nothing_is_lost(server: Server, target: str, worker: str) -> None:
    with fake_sidecar(target, at_random) as recorder:
        use_until(server, lambda: recorder.reports)
        steps = load(server, STEPS)
        check_reports(recorder, steps, 2 if worker == V2 else 1)
        (info,) = recorder.infos
        assert list(info.tiers) == [0, 3]
        assert info.decision_lag_steps == (2 if worker == V2 else 1)
        assert (info.max_running_requests, info.kv_capacity_tokens, info.draft_kv_stays_warm) == (
            8,
            1600,
            True,
        )
    tiers = [step["num_steps"] for step in steps]
    assert sum(a != b for a, b in itertools.pairwise(tiers)) > STEPS / 10
    after_none = 0
    for tier_before, step, place in tier_pairs(steps):
        if step["num_steps"] == 3:
            last = step["last"][place]
            assert step["accepted"][place] == accepted_after(last)
            after_none += tier_before == 0 and last < REJECTED
    assert after_none > STEPS / 20


def check_reports(recorder: Recorder, steps: list[dict[str, Any]], lag_steps: int) -> None:
    """Every report tells what SGLang did, and no step is left out."""
    made = {step["step_id"] for step in steps}

    def lacking() -> set[int]:
        return made - {report.step_id for report in recorder.reports}

    wait_until(lambda: not lacking(), what=lambda: f"of {len(made)} steps not reported: {sorted(lacking())}")
    reports = recorder.reports
    by_step = {report.step_id: report for report in reports}
    for step in steps:
        report = by_step[step["step_id"]]
        assert (report.batch_size, report.num_steps) == (len(step["ids"]), step["num_steps"])
        accepted = [a for i, a in zip(step["ids"], step["accepted"], strict=True) if i in step["live"]]
        assert list(report.accepted_drafts) == accepted
        assert len(report.slots_u16le) == 2 * len(accepted)
        assert not report.cuda_graph_ran
    lags = [report.step_id - report.decision_id for report in reports if report.decision_id]
    assert lag_steps <= min(lags) <= lag_steps + 4
    valid = [report.step_time_us for report in reports if report.step_time_valid]
    assert len(valid) > 0.5 * len(reports)


def test_requests_that_were_retracted_come_to_the_same_end(server: Server, target: str) -> None:
    retracted = server.log.count("Retract")
    with fake_sidecar(target, at_random) as recorder:
        use_until(server, lambda: recorder.reports)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: server.check(20 + 25 * i, 300), range(8)))
    assert server.log.count("Retract") > retracted


def test_grammars_are_kept_at_every_tier(server: Server, target: str) -> None:
    """Texts that go along the model's cycle for a while and then elsewhere; 2 ends a sequence."""
    before = len(server.steps())
    with fake_sidecar(target, at_random) as recorder:
        use_until(server, lambda: recorder.reports)
        for text in ("bcdefghijk", "bcdexyzabc", "zzyyxxwwvvbcd"):
            for grammar, output in (
                ({"regex": text}, text),
                ({"json_schema": f'{{"enum": ["{text}"]}}'}, f'"{text}"'),
            ):
                sampling = {"temperature": 0, "max_new_tokens": 40, **grammar}
                answer = server.post("/generate", input_ids=[1, 2, 3, 97], sampling_params=sampling)
                assert answer["output_ids"] == [*output.encode(), 2]
    assert {step["num_steps"] for step in server.steps()[before:]} == {0, 3}


def test_the_real_sidecar_its_shadow_and_its_end(server: Server, target: str, tmp_path: Path) -> None:
    def newest_tiers() -> set[int]:
        return {step["num_steps"] for step in server.steps()[-10:]}

    unguarded = tmp_path / "specgov.toml"  # on a busy machine step times leap, and the guard would step in
    unguarded.write_text("[guard]\nenabled = false\n")
    options = ("--policy", "static:0", "--config", str(unguarded))
    with sidecar_process(Path(target.removeprefix("unix://")), *options) as sidecar:
        use_until(server, sidecar.is_connected)
        use_until(server, lambda: newest_tiers() == {0})
        assert sidecar.engine().reports_rejected == 0
        sidecar.set_mode(pb.MODE_SHADOW)
        use_until(server, lambda: newest_tiers() == {3})  # what SGLang 0.5.9 does by itself
        sidecar.set_mode(pb.MODE_ACTIVE)
        use_until(server, lambda: newest_tiers() == {0})
    use_until(server, lambda: newest_tiers() == {3})  # the fallback, for one request


def test_pauses_are_told(server: Server, target: str) -> None:
    with fake_sidecar(target, at_tier(0)) as recorder:
        use_until(server, lambda: recorder.reports)
        server.post("/pause_generation", mode="in_place")
        server.post("/continue_generation")
        wait_until(lambda: len(recorder.events) >= 2)
        assert recorder.events == [pb.EngineEvent.KIND_PAUSED, pb.EngineEvent.KIND_RESUMED]
        server.check(ACCEPTED, 20)


def test_last_of_all_a_hook_that_fails_leaves_the_server_as_it_would_be(server: Server, target: str) -> None:
    with fake_sidecar(target, at_tier(0)) as recorder:
        use_until(server, lambda: recorder.reports and server.steps()[-1]["num_steps"] == 0)
        (server.folder / "fail").touch()
        server.check_eight_at_once(40)
        server.check(REJECTED, 40)
        assert {step["num_steps"] for step in server.steps()[-10:]} == {3}
        wait_until(lambda: recorder.endings)
    assert server.log.count("Specgov gives up after 3 exceptions") == 1
    assert "RuntimeError: made to fail" in server.log
