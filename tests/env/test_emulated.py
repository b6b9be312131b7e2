"""The emulated engine: what it reports, what its steps follow, and equality with a run in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from specgov.client import StreamClient
from specgov.env.decision_lag import DecisionLag
from specgov.env.emulated import (
    BelowBatchSize,
    EmulatedEngine,
    EmulationError,
    EngineStep,
    Pace,
    engine_info,
    run_in_process,
)
from specgov.env.emulated_load import DEMO_CLASSES, ramp_load
from specgov.env.server import Server, SimulationError
from specgov.policies.step_time import PrefillCost, StepNoise
from specgov.policies.types import BatchView, Choice, StepObservation, TierRange
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc


class Alternating:
    """A rule that shows what it knew: its tiers depend on the newest step, and are two, by batch size."""

    name = "alternating"
    version = "1"

    def __init__(self) -> None:
        self.seen: list[StepObservation] = []

    def observe(self, step: StepObservation) -> None:
        self.seen.append(step)

    def choose(self, batch: BatchView) -> Choice:
        tiers = (0, 1, 3)
        small, large = tiers[batch.step_id % 3], tiers[batch.step_id // 3 % 3]
        return Choice((TierRange(1, 1, small), TierRange(2, 8, large)))

    def forget(self) -> None: ...

    def estimates(self) -> dict[str, float]:
        return {}


class AlternatingSidecar(pb_grpc.SpeculationControllerServicer):
    """The same rule behind real gRPC; silent after ``silent_after`` reports."""

    def __init__(self, silent_after: int | None = None) -> None:
        self.reports: list[pb.StepReport] = []
        self.infos: list[pb.EngineInfo] = []
        self._silent_after = silent_after

    def Control(self, request_iterator, context) -> Iterator[pb.Decision]:  # noqa: N802 gRPC's name
        rule = Alternating()
        for number, message in enumerate(request_iterator):
            if message.HasField("info"):
                self.infos.append(message.info)
            else:
                self.reports.append(message.report)
            if self._silent_after is not None and number > self._silent_after:
                continue
            step_id = message.report.step_id
            low, high = rule.choose(BatchView(1, step_id=step_id)).ranges
            yield pb.Decision(
                decision_id=number + 1,
                known_step_id=step_id,
                num_steps=low.num_steps,
                batch_size_min=1,
                batch_size_max=1,
                neighbours=[pb.TierRange(batch_size_min=2, batch_size_max=8, num_steps=high.num_steps)],
                ttl_steps=4,
                ttl_ms=10_000,
                reason=pb.REASON_POLICY,
            )


@pytest.fixture
def serve(tmp_path: Path) -> Iterator:
    """Starts a sidecar for a servicer; returns the target."""
    servers = []

    def start(servicer: pb_grpc.SpeculationControllerServicer) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_SpeculationControllerServicer_to_server(servicer, server)
        target = f"unix://{tmp_path}/s.sock"
        server.add_insecure_port(target)
        server.start()
        servers.append(server)
        return target

    yield start
    for server in servers:
        server.stop(0).wait()


@pytest.fixture
def make_server(small: SimpleNamespace):
    """A server with prefill, idle gaps, noise, and KV capacity, on a seeded open loop of 40 requests."""

    def make(lag_steps: int = 2) -> Server:
        config = small.config(
            prefill=PrefillCost(1.0, 0.01), noise=StepNoise(0.05, 0.0, 0.0), kv_capacity_tokens=1500
        )
        config = replace(config, engine=replace(config.engine, decision_lag_steps=lag_steps))
        return Server(config, small.keyed(gap_s=0.05, limit=40), seed=8)

    return make


def choices(steps: list[EngineStep]) -> list[int]:
    return [step.observation.num_steps for step in steps]


def test_decision_lag_by_hand() -> None:
    lag = DecisionLag(2, "first")
    applied = []
    for step in (1, 2, 3, 4):
        applied.append(lag.due)
        lag.push(f"knows {step}")
    assert applied == ["first", "first", "knows 1", "knows 2"]
    assert list(lag.held()) == ["knows 3", "knows 4"]
    with pytest.raises(ValueError, match="at least 1"):
        DecisionLag(0, "first")


@pytest.mark.parametrize("lag_steps", [1, 2, 3])
def test_a_step_follows_what_was_known_lag_steps_before(make_server, lag_steps: int) -> None:
    steps = list(run_in_process(Alternating(), make_server(lag_steps)))
    tiers = (0, 1, 3)
    assert len(steps) > 50
    for number, step in enumerate(steps, start=1):
        known = max(number - lag_steps, 0)
        expected = tiers[known % 3] if step.observation.batch_size == 1 else tiers[known // 3 % 3]
        assert (step.observation.step_id, step.observation.num_steps) == (number, expected)
    assert {step.observation.batch_size > 1 for step in steps} == {True, False}


def test_observations_are_what_an_engine_sees(make_server) -> None:
    steps = list(run_in_process(Alternating(), make_server()))
    padded = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
    for step in steps:
        seen, result = step.observation, step.result
        assert len(seen.accepted) == len(seen.slots) == len(seen.generations) == seen.batch_size
        assert len(set(seen.slots.tolist())) == seen.batch_size
        assert (seen.padded_batch_size, seen.cuda_graph_ran) == (padded[seen.batch_size], True)
        assert (seen.step_ms is None) == (seen.after_idle or seen.after_prefill)
        if seen.step_ms is not None:
            assert seen.step_ms == pytest.approx(result.step_ms[0], abs=0.0005)
        assert seen.kv_use_ratio == pytest.approx(result.kv_use_ratio[0], rel=1e-6)
    assert any(step.observation.after_idle for step in steps)
    assert any(step.observation.after_prefill and not step.observation.after_idle for step in steps)


def test_above_the_largest_graph_a_batch_runs_eagerly(small: SimpleNamespace) -> None:
    config = small.config()
    config = replace(config, engine=replace(config.engine, graph_batch_sizes=(1, 2)))
    step = next(run_in_process(Alternating(), Server(config, small.keyed(concurrency=3))))
    assert (step.observation.padded_batch_size, step.observation.cuda_graph_ran) == (3, False)
    assert step.observation.kv_use_ratio is None  # its capacity is not known


def test_lockstep_with_a_sidecar_equals_the_run_in_this_process(make_server, serve) -> None:
    servicer = AlternatingSidecar()
    client = StreamClient(
        serve(servicer), engine_info(make_server(), engine_id="e", boot_id="b", profile="p")
    )
    client.start()
    try:
        pace = Pace(lockstep=True, speed=None)
        remote = list(EmulatedEngine(make_server(), client, pace=pace).run())
    finally:
        client.close()
    local = list(run_in_process(Alternating(), make_server()))
    assert choices(remote) == choices(local)
    assert [s.result.time_ns[0] for s in remote] == [s.result.time_ns[0] for s in local]
    info = servicer.infos[0]
    assert (info.engine, info.profile, list(info.tiers), info.kv_capacity_tokens) == (
        "emulated",
        "p",
        [0, 1, 3],
        1500,
    )
    assert len(servicer.reports) == len(local)
    for report, step in zip(servicer.reports, local, strict=True):
        seen = step.observation
        assert report.accepted_drafts == seen.accepted.tobytes()
        assert report.slots_u16le == seen.slots.astype("<u2").tobytes()
        assert report.slot_generations_u8 == seen.generations.tobytes()
        assert (report.step_time_us / 1000 if report.step_time_valid else None) == seen.step_ms
        assert report.kv_use_ratio == seen.kv_use_ratio
        assert (report.sum_seq_len_tokens, report.max_seq_len_tokens) == (
            seen.sum_seq_len_tokens,
            seen.max_seq_len_tokens,
        )
        assert (report.after_prefill, report.after_idle) == (seen.after_prefill, seen.after_idle)
    # Step s follows the decision that knows s - 2, which is number s - 1; the first two steps follow the
    # first.
    assert [r.decision_id for r in servicer.reports[:5]] == [1, 1, 2, 3, 4]


def test_without_decisions_the_engine_follows_its_own_rule(make_server, serve) -> None:
    # The last decision answers report 4 and lives for 4 steps, so it may decide steps up to 8. The queue
    # holds all reports, so that the fourth to arrive is report 4 however slow the stream is.
    server = make_server()
    info = engine_info(server, engine_id="e", boot_id="b")
    client = StreamClient(serve(AlternatingSidecar(silent_after=4)), info, queue_size=10_000)
    client.start()
    try:
        assert client.wait_for_step(0, 30.0) is not None
        rule = BelowBatchSize(server.config.engine, batch_size=3, num_steps=2)
        steps = list(EmulatedEngine(server, client, engine_rule=rule, pace=Pace(speed=None)).run())
    finally:
        client.close()
    alone = [step for step in steps if step.observation.step_id > 8]
    assert len(alone) > 40
    assert all(step.followed is None for step in alone)
    assert choices(alone) == [1 if step.observation.batch_size < 3 else 0 for step in alone]
    assert {0, 1} == set(choices(alone))


def test_lockstep_says_when_nobody_answers(make_server, serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgov.env.emulated.LOCKSTEP_TIMEOUT_S", 0.05)
    client = StreamClient(
        serve(AlternatingSidecar(-1)), engine_info(make_server(), engine_id="e", boot_id="b")
    )
    client.start()
    try:
        engine = EmulatedEngine(make_server(), client, pace=Pace(lockstep=True, speed=None))
        with pytest.raises(EmulationError, match=r"knows step 0 came within 0\.05 s"):
            next(engine.run())
    finally:
        client.close()


def test_real_time_is_simulated_time_divided_by_the_speed(make_server, serve) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        assert seconds > 0
        now_s += seconds

    client = StreamClient(serve(AlternatingSidecar()), engine_info(make_server(), engine_id="e", boot_id="b"))
    client.start()
    try:
        server = make_server()
        began_ns = int(server.time_ns[0])
        pace = Pace(speed=4.0, clock=lambda: now_s, sleep=sleep)
        steps = EmulatedEngine(server, client, pace=pace).run()
        for step in islice(steps, 60):
            assert now_s == pytest.approx(
                100.0 + (int(step.result.time_ns[0]) - began_ns) * 1e-9 / 4.0, abs=1e-9
            )
    finally:
        client.close()
    with pytest.raises(SimulationError, match="speed"):
        Pace(speed=0.0)


def test_only_one_environment_can_be_played(small: SimpleNamespace) -> None:
    with pytest.raises(SimulationError, match="one environment"):
        run_in_process(Alternating(), Server(small.config(), small.keyed(), n_envs=2))


def test_below_batch_size_keeps_to_the_tiers(small: SimpleNamespace) -> None:
    engine = small.config(tiers=(1, 4)).engine
    rule = BelowBatchSize(engine, batch_size=8, num_steps=3)
    assert [rule(7), rule(8)] == [1, 1]  # 4 is more than 3; the smallest tier stands for 0
    assert BelowBatchSize(engine, batch_size=8, num_steps=5)(7) == 4


def test_the_demonstrations_load_ramps_and_changes_its_mix(small: SimpleNamespace) -> None:
    # By the docstring: sixths of the time of 1 client, a ramp of one and a half, 256, a ramp back, 1.
    load = ramp_load(60.0)
    load.start(np.arange(2000, dtype=np.uint64))
    times = np.array([0.0, 9.9, 17.5, 25.1, 34.9, 42.5, 50.1, 60.0])
    assert (
        np.abs(load.target_concurrency(np.resize(times, 2000))[:8] - [1, 1, 128, 256, 256, 129, 1, 1]).max()
        <= 1
    )
    everyone = np.arange(2000)
    early = load.take(everyone, np.zeros(2000)).class_index
    late = load.take(everyone, np.full(2000, 59.0)).class_index
    names = [c.name for c in DEMO_CLASSES]
    # Shares of 0.8 each over 2,000 requests: standard error 0.009.
    assert (early == names.index("code")).mean() == pytest.approx(0.8, abs=0.04)
    assert (late == names.index("creative")).mean() == pytest.approx(0.8, abs=0.04)
