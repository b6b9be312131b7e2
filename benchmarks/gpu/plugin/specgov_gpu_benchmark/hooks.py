"""SGLang's entry point for plugins: the hooks, in every process of a server.

Active where ``SPECGOV_BENCHMARK_RECORD`` names a folder. SGLang logs exceptions of plugins and goes on
without them, so everything here that must not fail silently ends the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .contest import BenchmarkError, Contest, folder, run_of
from .record import Recorder, tokens_beyond
from .rid import parse

VERIFY = "sglang.srt.speculative.spec_utils.generate_simulated_accept_index"
FORWARD = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation"
RESULTS = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"


def load() -> None:
    """Register the hooks.

    Raises:
        SystemExit: it cannot; SGLang would log any other exception and start without.

    """
    if not folder():
        return
    try:
        _load(Contest())
    except Exception as error:
        raise SystemExit(f"specgov_gpu_benchmark: cannot load: {type(error).__name__}: {error}") from error


def _load(contest: Contest) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    take_the_policys_place(contest)
    HookRegistry.register(VERIFY, simulated_acceptance(contest), HookType.REPLACE)
    HookRegistry.register(FORWARD, around_forward(contest), HookType.AROUND)
    HookRegistry.register(RESULTS, around_result(contest), HookType.AROUND)


def take_the_policys_place(contest: Contest) -> None:
    """Let the contest choose before Specgov's policy does, and silence Specgov while it does."""
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    from specgov.sglang_plugin.policy import GovernedPolicy
    from specgov.sglang_plugin.runtime import Runtime

    contest.make_sglang_policy = AdaptiveSpeculativeParams
    choose, make = GovernedPolicy._choose, Runtime.make_policy
    before, after = Runtime.before_result, Runtime.after_result

    def make_policy(self: Any, engines_rule: Any, initial_steps: int) -> Any:
        policy = make(self, engines_rule, initial_steps)
        contest.govern(policy, initial_steps)
        return policy

    def choose_first(self: Any, batch_size: int) -> Any:
        # Specgov would catch an exception here: what can fail was done before the launch.
        return choose(self, batch_size) if contest.chosen is None else contest.chosen

    def before_result(self: Any, batch: Any) -> Any:
        return before(self, batch) if contest.follows_specgov else None

    def after_result(self: Any, *arguments: Any) -> None:
        if contest.follows_specgov:
            after(self, *arguments)

    GovernedPolicy._choose = choose_first  # type: ignore[method-assign]
    Runtime.make_policy = make_policy  # type: ignore[method-assign]
    Runtime.before_result, Runtime.after_result = before_result, after_result  # type: ignore[method-assign]


def around_forward(contest: Contest) -> Any:
    """Tell the contest which requests a decode step is launched for, before its tier is chosen."""

    def around(original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_decode():
            contest.begin_step(batch.reqs)
        return original(worker, batch, *args, **kwargs)

    return around


def simulated_acceptance(contest: Contest) -> Any:
    """What takes the place of SGLang's ``generate_simulated_accept_index``.

    SGLang calls it eagerly, on the stream of the step, after the verify graph: what is accepted is drawn on
    the host while the step is launched and copied in stream order, so that nothing waits. As in SGLang's
    own, accepted drafts are the draft's real tokens, and the target's greedy token follows them.
    """
    import torch

    offsets: dict[tuple[Any, int], Any] = {}

    def accept_index_of(
        accept_index: Any,
        predict: Any,
        num_correct_drafts: Any,
        candidates: Any,
        target_predict: Any,
        bs: int,
        spec_steps: int,
        simulate_acc_len: float = -1.0,  # noqa: ARG001
        simulate_acc_method: str = "",  # noqa: ARG001
        simulate_acc_token_mode: str = "real-draft-token",
    ) -> Any:
        width, device = spec_steps + 1, accept_index.device
        if simulate_acc_token_mode != "real-draft-token" or target_predict is None:
            raise BenchmarkError("set SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token")
        if predict.numel() != bs * width or candidates.shape != (bs, width):
            raise BenchmarkError(f"not a chain: {tuple(candidates.shape)} candidates for {bs} requests")
        drawn = torch.from_numpy(contest.write(bs, spec_steps))
        if device.type == "cuda":
            drawn = drawn.pin_memory()
        accepted = drawn.to(device, non_blocking=True).to(num_correct_drafts.dtype)
        key = (device, width)
        if key not in offsets:
            offsets[key] = torch.arange(width, dtype=torch.int32, device=device)
        place, last = offsets[key], accepted[:, None]
        # topk is 1: the nodes of a request are its chain, one after the other.
        following = torch.cat([candidates[:, 1:], candidates[:, :1]], dim=1)
        tokens = torch.where(place < last, following, target_predict.reshape(bs, width).to(candidates.dtype))
        predict.view(bs, width).copy_(tokens)
        num_correct_drafts.copy_(accepted)
        return torch.where(place <= last, accept_index[:, :1] + place, -1).to(torch.int32)

    return accept_index_of


def around_result(contest: Contest) -> Any:
    """Record each result that the scheduler has processed."""

    def around(original: Any, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        decode, extend = batch.forward_mode.is_decode(), batch.forward_mode.is_extend()
        live: list[int] = []
        if decode:
            live = [
                place
                for place, r in enumerate(batch.reqs)
                if r.finished_reason is None and not r.is_retracted
            ]
        waiting = [r for r in batch.reqs if not r.output_ids] if extend else []
        returned = original(scheduler, batch, result, *args, **kwargs)
        recorder = contest.recorder or _begin(contest, scheduler)
        if decode:
            _record_step(contest, recorder, scheduler, batch, result, live)
        elif extend:
            _record_prefill(recorder, batch, waiting)
        return returned

    return around


def _begin(contest: Contest, scheduler: Any) -> Recorder:
    from specgov.sglang_plugin.versions import installed_version, ranks_of, server_facts

    contest.own_config = server_facts(scheduler.server_args).adaptive_config
    contest.recorder = Recorder(Path(folder()), ranks_of(scheduler).tp_rank, installed_version())
    return contest.recorder


def _record_step(
    contest: Contest, recorder: Recorder, scheduler: Any, batch: Any, result: Any, live: list[int]
) -> None:
    requests = batch.reqs
    known = parse(requests[live[0]].rid) if live else None
    run = known.run.name if known is not None else "-"
    recorder.enter(run)
    width = result.speculative_num_draft_tokens or 1
    if batch.spec_info is None and not result.speculative_num_draft_tokens:
        contest.count_context(requests)
    tokens = len(live)
    accepted = getattr(result, "num_correct_drafts_per_req_cpu", None)
    if width > 1 and accepted:
        tokens += sum(accepted) if len(live) == len(accepted) else sum(accepted[place] for place in live)
    ended = [requests[place] for place in live if requests[place].finished_reason is not None]
    launch = contest.finished
    chosen_by, decision_id = (int(launch.kind), launch.decision_id) if launch is not None else (0, 0)
    recorder.step(
        run,
        batch.forward_iter,
        len(requests),
        len(live),
        width - 1,
        tokens - tokens_beyond(ended),
        contest.context_tokens,
        chosen_by,
        decision_id,
        len(scheduler.waiting_queue),
    )
    if ended:
        known_ones = [(parse(r.rid), min(len(r.output_ids), r.sampling_params.max_new_tokens)) for r in ended]
        recorder.ended(run, [(k.number, tokens) for k, tokens in known_ones if k is not None])


def _record_prefill(recorder: Recorder, batch: Any, waiting: list[Any]) -> None:
    run = run_of([r.rid for r in batch.reqs])
    recorder.filled(run.name if run is not None else "-", batch.forward_iter, len(batch.reqs))
    begun = [parse(r.rid) for r in waiting if r.output_ids]
    for run in {k.run.name for k in begun if k is not None}:
        recorder.first_tokens(run, [k.number for k in begun if k is not None and k.run.name == run])
