"""What is for SGLang 0.5.9 alone: where hooks go, what a result gets, what is refused, how it is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specgov.sglang_plugin import launch, versions
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.settings import Settings
from specgov.sglang_plugin.v059 import checks
from specgov.sglang_plugin.v059.governor import EVENT_LOOPS, Governor, ServersRule, install, wrap
from specgov.sglang_plugin.v059.steps import (
    at_stride,
    replaced,
    step_without_drafts_v1,
    step_without_drafts_v2,
)
from specgov.sglang_plugin.versions import facts_of

SETTINGS = Settings("unix:///s")


def facts(**arguments: Any) -> versions.ServerFacts:
    usual = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1, "speculative_num_steps": 3}
    return facts_of(SimpleNamespace(**(usual | arguments)))


class Vector(np.ndarray):
    """Of a tensor what ``at_stride`` uses."""

    def new_zeros(self, shape: tuple[int, int]) -> Any:
        return np.zeros(shape, self.dtype)

    def numel(self) -> int:
        return self.size


def worker_class(dotted: str) -> type[Any]:
    """A class that is taken for one of SGLang's; its steps tell whether drafts were made."""
    module, _, name = dotted.rpartition(".")

    def forward_batch_generation(self: Any, batch: Any) -> Any:
        batch.drafted = "draft" not in vars(self) and "draft" not in vars(self.draft_worker)
        accepted = [0 if not batch.drafted else 2] * len(batch.reqs)
        for request, n in zip(batch.reqs, accepted, strict=True):
            request.spec_accepted_tokens += n
        # EAGLEWorker cuts its own list where a request has come to its end.
        return SimpleNamespace(
            accept_length_per_req_cpu=[0] * len(accepted) if name == "EAGLEWorker" else accepted,
            can_run_cuda_graph=False,
            next_token_ids=np.array([5] * len(accepted)).view(Vector),
        )

    members = {"forward_batch_generation": forward_batch_generation, "__module__": module}
    return type(name, (), members)


def worker_of(kind: type[Any]) -> Any:
    worker = kind()
    worker.target_worker = SimpleNamespace(
        forward_batch_generation=None, model_runner=SimpleNamespace(graph_runner="graphs")
    )
    worker.draft_worker = SimpleNamespace(cuda_graph_runner_for_draft_extend="graphs")
    worker.speculative_num_steps, worker.speculative_num_draft_tokens = 3, 4
    return worker


def test_each_request_has_its_token_in_front_of_a_stride() -> None:
    assert at_stride(np.array([7, 8]).view(Vector), 4).tolist() == [7, 0, 0, 0, 8, 0, 0, 0]


def test_attributes_come_back_as_they_were_also_after_an_exception() -> None:
    class Owner:
        from_class = 1

    owner: Any = Owner()
    owner.own = 2

    def fail() -> None:
        with replaced(owner, from_class=3, own=4, new=5):
            assert (owner.from_class, owner.own, owner.new) == (3, 4, 5)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert vars(owner) == {"own": 2}
    assert owner.from_class == 1


@pytest.mark.parametrize("step", [step_without_drafts_v1, step_without_drafts_v2])
def test_no_graph_of_another_width_can_be_taken(step: Any) -> None:
    worker = worker_of(type("Worker", (), {}))
    seen = {}

    def forward(worker: Any, batch: Any) -> Any:
        seen["graphs"] = worker.target_worker.model_runner.graph_runner
        return SimpleNamespace(next_token_ids=np.array([5]).view(Vector))

    step(forward, worker, None)
    assert seen == {"graphs": None}
    assert worker.target_worker.model_runner.graph_runner == "graphs"
    assert worker.draft_worker.cuda_graph_runner_for_draft_extend == "graphs"
    assert (worker.speculative_num_steps, worker.speculative_num_draft_tokens) == (3, 4)


def test_hooks_go_on_a_worker_that_is_known_and_on_one_only() -> None:
    governor = Governor(SETTINGS)
    with pytest.raises(PluginError, match=r"MultiLayerEagleWorker makes the decode steps"):
        governor.bind(worker_class("sglang.srt.speculative.multi.MultiLayerEagleWorker"))
    governor.bind(worker_class(checks.WORKER_V1))
    with pytest.raises(PluginError, match=r"EAGLEWorkerV2 makes the decode steps, but .* on EAGLEWorker$"):
        governor.bind(worker_class(checks.WORKER_V2))


def scheduler_of(worker: Any, *, recurrent: object = None) -> Any:
    runner = SimpleNamespace(mambaish_config=recurrent, graph_runner=None)
    return SimpleNamespace(model_worker=worker, tp_worker=SimpleNamespace(model_runner=runner), forward_ct=7)


def test_hooks_on_a_worker_that_is_not_live_are_an_error() -> None:
    first, second = worker_class(checks.WORKER_V1), worker_class(checks.WORKER_V2)
    governor = Governor(SETTINGS)
    governor.bind(second)
    with pytest.raises(PluginError, match="the hooks are on EAGLEWorkerV2, but EAGLEWorker makes"):
        governor.check_live(scheduler_of(first()))
    governor.check_live(scheduler_of(second()))
    with pytest.raises(PluginError, match="recurrent"):
        governor.check_live(scheduler_of(second(), recurrent=object()))
    Governor(SETTINGS).check_live(scheduler_of(first()))  # nothing is bound: nothing to govern


@pytest.mark.parametrize("live", [checks.WORKER_V1, checks.WORKER_V2])
@pytest.mark.parametrize(("batch_size", "num_steps"), [(1, 3), (2, 0)])
def test_a_result_gets_what_newer_releases_have_in_theirs(
    fakes: Any, live: str, batch_size: int, num_steps: int
) -> None:
    governor = Governor(Settings("unix:///s", fallback="threshold:2:3"))
    kind = worker_class(live)
    governor.around_create_worker(
        lambda *_: kind,
        None,
        SimpleNamespace(speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_eagle_topk=1),
    )
    policy = governor.runtime.policy
    assert policy is not None
    policy.set_cuda_graph_bs(None)
    worker = worker_of(kind)
    governor._scheduler = scheduler_of(worker)
    batch = fakes.Batch([fakes.Request(str(n)) for n in range(batch_size)], forward_iter=0)
    batch.is_extend_in_batch = False
    for request in batch.reqs:
        request.spec_accepted_tokens = 10
    result = worker.forward_batch_generation(batch)
    assert batch.drafted == (num_steps == 3)
    assert result.speculative_num_draft_tokens == num_steps + 1
    processed = []
    governor.around_result(lambda *args: processed.append(args), governor._scheduler, batch, result)
    assert len(processed) == 1
    assert batch.forward_iter == 7
    assert result.num_correct_drafts_per_req_cpu == [2 if num_steps == 3 else 0] * batch_size
    assert policy.finished is not None
    assert policy.finished.num_steps == num_steps
    assert governor.runtime.guard.errors.total() == 0


def test_a_decode_step_that_went_past_the_hooks_is_no_silence(fakes: Any) -> None:
    governor = Governor(SETTINGS)
    governor.bind(worker_class(checks.WORKER_V1))
    for _ in range(3):
        governor.around_result(lambda *_: None, None, fakes.Batch([], 1), fakes.Result(None, None))
    assert governor.runtime.guard.tripped


def test_one_rank_looks_at_its_requests_and_several_at_the_broadcast() -> None:
    governor = Governor(SETTINGS)
    alone, several = SimpleNamespace(tp_size=1), SimpleNamespace(tp_size=2)
    assert governor.around_recv_requests(lambda scheduler: ["a"], alone) == ["a"]
    assert governor.around_recv_requests(lambda scheduler: ["b"], several) == ["b"]
    order = ("specgov.order", 1, ((1, 4, 0),))
    sent = governor.around_broadcast(lambda requests, rank, src: [order, "c"], None, 1, src=0)
    assert sent == ["c"]
    assert governor.runtime._share.in_force.num_steps_for(3) == 0


def test_a_function_is_wrapped_in_its_place() -> None:
    class Owner:
        def double(self, n: int) -> int:
            return 2 * n

    wrap(Owner, "double", lambda original, *args: original(*args) + 1)
    assert Owner().double(4) == 9
    assert Owner.double.__name__ == "double"


def test_the_servers_own_rule_is_its_tier() -> None:
    rule = ServersRule(3)
    assert rule.candidate_steps == [0, 3]
    assert rule.get_steps_for_batch(200) == 3
    assert rule.on_verify_complete([0], 1) is None
    assert rule.cuda_graph_bs_for_step(0) is None


def test_nothing_is_set_where_the_plugin_is_off_or_the_release_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install({})
    monkeypatch.setattr(versions, "installed_version", lambda: "0.5.10")
    with pytest.raises(PluginError, match=r"SGLang 0\.5\.10 is installed, and these hooks are for 0\.5\.9"):
        install({"SPECGOV_TARGET": "unix:///s"})


@pytest.mark.parametrize(
    ("arguments", "environment", "settings", "said"),
    [
        ({}, {}, SETTINGS, ""),
        ({"speculative_algorithm": "STANDALONE"}, {}, SETTINGS, "use EAGLE or EAGLE3"),
        (
            {"speculative_eagle_topk": 4},
            {},
            SETTINGS,
            "--speculative-eagle-topk is 4: drafts must be a chain",
        ),
        ({"enable_dp_attention": True}, {}, SETTINGS, "--enable-dp-attention"),
        ({"enable_multi_layer_eagle": True}, {}, SETTINGS, "--enable-multi-layer-eagle"),
        ({"enable_two_batch_overlap": True}, {}, SETTINGS, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, {}, SETTINGS, "--enable-pdmux"),
        ({"pp_size": 2}, {}, SETTINGS, "--pp-size is 2"),
        ({}, {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "True"}, SETTINGS, "leave it unset"),
        ({}, {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "0"}, SETTINGS, ""),
        ({}, {}, Settings("unix:///s", tiers=(0, 1)), "SPECGOV_TIERS names 1, but .* this server has 0, 3"),
        ({}, {}, Settings("unix:///s", fallback="static:2"), "SPECGOV_FALLBACK"),
        ({}, {}, Settings("unix:///s", fallback="static:2", mode="shadow"), ""),
        ({"speculative_num_steps": 5}, {}, Settings("unix:///s", fallback="threshold:5:5"), ""),
    ],
)
def test_what_is_refused(
    arguments: dict[str, Any], environment: dict[str, str], settings: Settings, said: str
) -> None:
    if not said:
        checks.check_start(settings, facts(**arguments), environment)
        return
    with pytest.raises(PluginError, match=f"cannot govern this server .*:\n- .*{said}"):
        checks.check_start(settings, facts(**arguments), environment)


def test_a_server_without_speculation_starts_as_always() -> None:
    checks.check_start(SETTINGS, facts(speculative_algorithm=None, speculative_eagle_topk=8), {})


def test_the_live_worker_is_named_with_what_makes_it_live() -> None:
    v2 = checks.worker_words(checks.WORKER_V2, {"SGLANG_ENABLE_SPEC_V2": "1"})
    assert v2 == "EAGLEWorkerV2: the overlap loop is on, since SGLANG_ENABLE_SPEC_V2=1"
    v1 = checks.worker_words(checks.WORKER_V1, {})
    assert v1 == "EAGLEWorker: the overlap loop is off, since SGLANG_ENABLE_SPEC_V2 is not set"


def test_every_loop_that_decodes_is_among_the_targets() -> None:
    named = {target.rpartition(".")[2] for target in checks.TARGETS}
    assert set(EVENT_LOOPS) <= named


def test_launch_starts_the_module_that_sets_the_hooks_and_adds_no_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(versions, "installed_version", lambda: "0.5.9")
    monkeypatch.setattr(launch, "diagnose", lambda *_: [])
    monkeypatch.setattr(launch.os, "execve", lambda program, arguments, environment: became.append(arguments))
    launch.start(["--model-path", "m"], {"SPECGOV_TARGET": "unix:///s"}, lambda checks: None)
    assert became[0][1:] == ["-m", "specgov.sglang_plugin.v059.server", "--model-path", "m"]
