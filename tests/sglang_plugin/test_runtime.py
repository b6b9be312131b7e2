"""The hooks around a scheduler's loop, joined as in a server; SGLang's side and the client are stand-ins."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from specgov.proto.v1 import specgov_pb2 as pb
from specgov.sglang_plugin import runtime as runtime_module
from specgov.sglang_plugin import versions
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.hooks import Hooks, check_start
from specgov.sglang_plugin.runtime import Runtime
from specgov.sglang_plugin.settings import Settings
from specgov.sglang_plugin.versions import Ranks

ALONE = Ranks(0, 1, None)


class Arguments:
    speculative_algorithm = "EAGLE"
    speculative_adaptive = True
    speculative_num_steps = 3
    speculative_eagle_topk = 1
    model_path = "target"
    port = 30000
    skip_server_warmup = True


class PauseGenerationReqInput:
    pass


class UpdateWeightsFromTensorReqInput:
    pass


class Engine:
    """A rank of a server: SGLang's calls in SGLang's order, without overlap."""

    def __init__(
        self, fakes: Any, client: Any, monkeypatch: Any, ranks: Ranks = ALONE, **settings: Any
    ) -> None:
        self.fakes, self.client = fakes, client
        monkeypatch.setattr(runtime_module, "connect", self._connect)
        monkeypatch.setattr(versions, "installed_version", lambda: "0.5.23")
        monkeypatch.setattr(versions, "ranks_of", lambda scheduler: ranks)
        monkeypatch.setattr(versions, "switch_records", lambda server_args: [self.record])
        self.record: list[Any] = []
        self.infos: list[pb.EngineInfo] = []
        self.rule = fakes.EnginesRule(steps=5)
        self.runtime = Runtime(Settings("unix:///s", tiers=(0, 1, 3), fallback="threshold:4:3", **settings))
        self.hooks = Hooks(self.runtime)
        self.scheduler = fakes.Scheduler()
        self.scheduler.server_args = Arguments()
        self.scheduler.max_running_requests = 48
        self.policy = self.runtime.make_policy(self.rule, 3)
        self.policy.set_cuda_graph_bs(None)

    def _connect(self, settings: Settings, info: pb.EngineInfo) -> Any:
        self.infos.append(info)
        return self.client

    def serve(self, loop: Callable[[], Any]) -> Any:
        return self.hooks.around_event_loop(lambda scheduler: loop(), self.scheduler)

    def receive(self, requests: list[Any] | None, network: Callable[[Any], Any] = lambda r: r) -> list[Any]:
        return self.hooks.around_broadcast(lambda receiver, r: network(r), object(), requests)

    def step(self, reqs: list[Any], accepted: list[int]) -> int:
        """One round of the loop; returns the tier of the step."""
        self.receive([])
        self.scheduler.forward_ct += 1
        tier = self.policy.get_steps_for_batch(len(reqs))
        batch = self.fakes.Batch(reqs, self.scheduler.forward_ct)

        def process(scheduler: Any, batch: Any, result: Any) -> str:
            self.policy.on_verify_complete(result.num_correct_drafts_per_req_cpu, len(batch.reqs))
            return "processed"

        result = self.fakes.Result(tier + 1, accepted)
        assert self.hooks.around_result(process, self.scheduler, batch, result) == "processed"
        return tier


@pytest.fixture
def client(fakes: Any) -> Any:
    return fakes.FakeClient()


@pytest.fixture
def engine(fakes: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(fakes, client, monkeypatch)


def test_a_life(
    engine: Engine, client: Any, fakes: Any, decide: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reqs = [fakes.Request("a")]

    def loop() -> str:
        assert engine.step(reqs, [3]) == 3  # no decision yet: the fallback, 3 below batch size 4
        client.decision = decide(9, 1, (1, 8))
        assert engine.step(reqs, [1]) == 1
        client.decision = None  # too old
        assert engine.step(reqs, [1]) == 3
        assert engine.receive([PauseGenerationReqInput()])
        return "end"

    assert engine.serve(loop) == "end"
    (info,) = engine.infos
    assert list(info.tiers) == [0, 1, 3]
    assert (info.max_running_requests, info.decision_lag_steps, info.model) == (48, 1, "target")
    assert info.engine_id.endswith("-30000")
    assert [(r.step_id, r.num_steps, r.decision_id) for r in client.reports] == [
        (1, 3, 0),
        (2, 1, 9),
        (3, 3, 0),
    ]
    assert client.asked == [1, 2, 3]  # each decision is asked for with the step that it is for
    assert client.events == [(pb.EngineEvent.KIND_PAUSED, 3), (pb.EngineEvent.KIND_SHUTTING_DOWN, 3)]
    assert client.closed
    (line,) = [r.getMessage() for r in caplog.records if "is live" in r.getMessage()]
    assert (
        "target unix:///s, mode active, tiers 0,1,3, tensor-parallel ranks 1, fallback threshold:4:3" in line
    )


def test_the_stream_ends_also_when_the_loop_fails(engine: Engine, client: Any) -> None:
    def loop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.serve(loop)
    assert client.closed


def test_a_weight_update_is_told_and_breaks_the_interval(engine: Engine, client: Any, fakes: Any) -> None:
    reqs = [fakes.Request("a")]

    def loop() -> None:
        engine.step(reqs, [3])
        engine.step(reqs, [3])
        engine.receive([UpdateWeightsFromTensorReqInput()])
        engine.step(reqs, [3])

    engine.serve(loop)
    assert client.events[0] == (pb.EngineEvent.KIND_WEIGHTS_UPDATED, 2)
    assert [r.step_time_valid for r in client.reports] == [False, True, False]


def test_a_sidecar_in_shadow_leaves_the_tiers_to_sglang(
    engine: Engine, client: Any, fakes: Any, decide: Any
) -> None:
    reqs = [fakes.Request("a")]

    def loop() -> None:
        client.last = decide(4, 0, (1, 8), reason=7)
        engine.rule.steps = 1
        assert engine.step(reqs, [1]) == 1

    engine.serve(loop)
    assert engine.rule.results == [([1], 1)]
    assert [(r.decision_id, r.engine_rule_num_steps) for r in client.reports] == [(0, 1)]


def test_a_plugin_in_shadow_reports_sglangs_choices(
    fakes: Any, client: Any, decide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(fakes, client, monkeypatch, mode="shadow")
    client.decision = decide(9, 1, (1, 8))  # an active sidecar's decision is not applied either

    def loop() -> None:
        engine.rule.switch_to = 3
        assert engine.step([fakes.Request("a")], [2]) == 5

    engine.serve(loop)
    assert list(engine.infos[0].tiers) == [0, 1, 3, 5]  # all that SGLang's rule may use
    assert [(r.num_steps, r.engine_rule_num_steps) for r in client.reports] == [(5, 5)]


def test_reports_of_tiers_that_the_sidecar_does_not_know_are_left_out(
    engine: Engine, client: Any, fakes: Any, decide: Any
) -> None:
    def loop() -> None:
        client.last = decide(4, 0, (1, 8), reason=7)
        assert engine.step([fakes.Request("a")], [2]) == 5

    engine.serve(loop)
    assert client.reports == []


def test_an_order_reaches_every_rank_at_the_same_step(
    fakes: Any, client: Any, decide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Engine(fakes, client, monkeypatch, Ranks(rank, 2, None)) for rank in range(2)]
    connected = []
    monkeypatch.setattr(runtime_module, "connect", lambda settings, info: connected.append(info) or client)
    for rank, engine in enumerate(ranks):
        monkeypatch.setattr(versions, "ranks_of", lambda scheduler, rank=rank: Ranks(rank, 2, None))
        engine.runtime.start(engine.scheduler)
        assert len(connected) == 1  # rank 0's alone

    sent: list[list[Any]] = []

    def iterate(batch_size: int) -> list[int]:
        sent.clear()
        ranks[0].receive(["request"], lambda r: sent.append(r) or list(r))
        got = ranks[1].receive(None, lambda r: list(sent[0]))
        assert got == ["request"]
        return [engine.policy.get_steps_for_batch(batch_size) for engine in ranks]

    assert iterate(2) == [3, 3]
    client.decision = decide(9, 1, (1, 8))
    # A decision that comes after the broadcast waits for the next one, on rank 0 too.
    assert [engine.policy.get_steps_for_batch(2) for engine in ranks] == [3, 3]
    assert iterate(2) == [1, 1]
    assert len(sent[0]) == 2
    client.decision = decide(10, 1, (1, 8))
    assert iterate(2) == [1, 1]
    assert len(sent[0]) == 1  # the same tiers are no news
    client.decision = None
    assert iterate(2) == [3, 3]
    assert iterate(5) == [0, 0]  # the fallback, on the batch that formed
    ranks[0].runtime.guard.tripped = True
    assert iterate(2) == [5, 5]  # SGLang's rule, on both


def test_a_hook_that_fails_ends_the_plugin_and_not_the_server(
    engine: Engine, client: Any, fakes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reqs = [fakes.Request("a")]
    closed = threading.Event()
    client.close = closed.set

    def loop() -> None:
        engine.step(reqs, [3])
        monkeypatch.setattr(engine.runtime._observer, "after", lambda *args: 1 / 0)
        assert [engine.step(reqs, [0]) for _ in range(5)] == [3, 3, 3, 5, 5]  # after three, SGLang's rule
        assert closed.wait(10)

    engine.serve(loop)
    assert len(client.reports) == 1
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


@pytest.mark.parametrize("where", ["before_broadcast", "after_broadcast"])
def test_a_broken_share_never_swallows_requests_nor_lets_an_order_through(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(engine.runtime, where, lambda *args: 1 / 0)
    order = ("specgov.order", 2, ())
    assert engine.receive(["request"], lambda r: [order, *r] if where == "after_broadcast" else r) == [
        "request"
    ]


def test_a_start_that_fails_leaves_the_server_to_sglang(
    engine: Engine, fakes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "server_facts", lambda arguments: 1 / 0)
    assert engine.serve(lambda: "served") == "served"
    assert "could not start" in caplog.text


def test_a_prefill_worker_stays_off(
    engine: Engine, client: Any, fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.scheduler.server_args.disaggregation_mode = "prefill"
    assert engine.serve(lambda: engine.policy.get_steps_for_batch(1)) == 5
    assert engine.infos == []
    assert "a prefill worker makes no decode steps" in caplog.text


def test_replicas_are_engines_of_their_own(fakes: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fakes, client, monkeypatch, Ranks(0, 1, 3), engine_id="left")
    engine.serve(lambda: None)
    assert engine.infos[0].engine_id == "left-dp3"


def test_the_start_check_lists_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.5.23")
    monkeypatch.setattr(versions, "engine_tiers", lambda path: (0, 1, 3))
    arguments = Arguments()
    check_start(Settings("unix:///s"), arguments)
    arguments.speculative_eagle_topk = 4
    arguments.pp_size = 2
    with pytest.raises(PluginError) as error:
        check_start(Settings("unix:///s", tiers=(2,)), arguments)
    assert str(error.value).count("\n- ") == 3
    arguments.speculative_algorithm = None
    check_start(Settings("unix:///s"), arguments)  # no speculation: nothing to govern, nothing wrong


def test_the_record_of_switches_is_kept_short(engine: Engine, client: Any, fakes: Any, decide: Any) -> None:
    reqs = [fakes.Request("a")]

    def loop() -> None:
        for number in range(1000):
            client.decision = decide(number, number % 2, (1, 8))
            engine.step(reqs, [0])
            engine.record.append(("adaptive_spec.restore", {"speculative_num_steps": number % 2}))
            assert len(engine.record) <= 258

    engine.serve(loop)
