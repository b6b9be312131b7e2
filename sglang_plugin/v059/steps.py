"""A decode step without speculation on SGLang 0.5.9's two EAGLE workers, which know one width of verify only.

The target decodes one token for each request, as a server without speculation does, and captures its hidden
states; SGLang's own verify, with no drafts in it, takes the token; and SGLang's own draft-extend brings the
draft's KV cache and hidden state up to date by that one token. So a request that comes back to drafts is
where it would have been after a step whose drafts were all rejected.

The target's forward is a plain decode, since attention backends count on the width of verify that the server
was started with (``speculative_num_draft_tokens`` in most of layers/attention/), and it runs without a CUDA
graph, since the graphs are for that width and ``can_run`` does not look at it (cuda_graph_runner.py:385).

SGLang is imported inside the functions only, and torch not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Forward = Callable[[Any, Any], Any]
"""``forward_batch_generation`` of a worker: (worker, batch) to the result."""


def step_without_drafts_v1(forward: Forward, worker: Any, batch: Any) -> Any:
    """A step at num_steps 0 on ``EAGLEWorker``, which has no overlap: the batch is the scheduler's own.

    Its draft-extend takes as many tokens for each request as were accepted, so it needs no change.
    """
    target = worker.target_worker
    decode = target.forward_batch_generation
    with (
        replaced(worker, draft=_no_drafts_v1),
        replaced(target, forward_batch_generation=lambda batch, **more: decode(as_decode(batch), **more)),
        replaced(target.model_runner, graph_runner=None),
    ):
        return forward(worker, batch)


def step_without_drafts_v2(forward: Forward, worker: Any, batch: Any) -> Any:
    """A step at num_steps 0 on ``EAGLEWorkerV2``; the batch is the scheduler's ``ModelWorkerBatch``.

    This worker lays tokens out at fixed strides, and so takes on the width of one for the step. When the
    scheduler comes to the result other steps may have been launched, and it reads with the server's stride
    (scheduler_output_processor_mixin.py:350): the result leaves here in that layout.
    """
    draft_worker = worker.draft_worker
    stride = worker.speculative_num_draft_tokens
    narrow = {"speculative_num_steps": 0, "speculative_num_draft_tokens": 1}
    with (
        replaced(worker, **narrow),
        replaced(draft_worker, draft=_no_drafts_v2, cuda_graph_runner_for_draft_extend=None, **narrow),
        replaced(worker.target_worker.model_runner, graph_runner=None),
    ):
        result = forward(worker, batch)
    result.next_token_ids = at_stride(result.next_token_ids, stride)
    return result


def at_stride(tokens: Any, stride: int) -> Any:
    """One token for each request, spread to ``stride`` places for each; the places after the first are 0."""
    spread = tokens.new_zeros((tokens.numel(), stride))
    spread[:, 0] = tokens
    return spread.flatten()


def as_decode(batch: Any) -> Any:
    """A ``ModelWorkerBatch`` for the verify of one token, as a decode of that token.

    Verify counts the tokens before it in ``seq_lens``, decode those up to and with it.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    return dataclasses.replace(
        batch,
        forward_mode=ForwardMode.DECODE,
        seq_lens=batch.seq_lens + 1,
        seq_lens_cpu=batch.seq_lens_cpu + 1,
        seq_lens_sum=batch.seq_lens_sum + len(batch.seq_lens),
        capture_hidden_mode=CaptureHiddenMode.FULL,
        spec_info=None,
    )


def _no_drafts_v1(batch: Any) -> Any:
    """In the place of ``EAGLEWorker.draft``: what it does beside drafting (eagle_worker.py:384)."""
    batch.maybe_evict_swa()
    for request in batch.reqs:
        request.decode_batch_idx += 1
    penalties = batch.sampling_info.penalizer_orchestrator
    if penalties.is_required:
        penalties.cumulate_output_tokens(batch.spec_info.verified_id.long())
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    return _verify_of_one(batch)


def _no_drafts_v2(batch: Any) -> Any:
    """In the place of ``EagleDraftWorker.draft``."""
    verify = _verify_of_one(batch)

    def prepare(req_to_token_pool: Any, batch: Any, target_worker: Any) -> tuple[Any, bool]:
        """In the place of ``prepare_for_v2_verify``: the forward batch, and that no CUDA graph runs it."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        runner = target_worker.model_runner
        # Draft-extend reads both again. The scheduler has reserved the places.
        batch.input_ids = verify.draft_token
        batch.out_cache_loc = req_to_token_pool.req_to_token[batch.req_pool_indices, batch.seq_lens].long()
        forward_batch = ForwardBatch.init_new(as_decode(batch), runner)
        runner.attn_backend.init_forward_metadata(forward_batch)
        return forward_batch, False

    verify.prepare_for_v2_verify = prepare
    return verify


def _verify_of_one(batch: Any) -> Any:
    """SGLang's verify input for a tree that is its root alone: each request's newest token, no drafts."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    seq_lens = batch.seq_lens.long()
    none = seq_lens.new_full((len(seq_lens), 1), -1)
    return EagleVerifyInput(
        draft_token=batch.spec_info.verified_id.long(),
        custom_mask=none.new_empty(0).bool(),  # a decode has none
        positions=seq_lens,
        retrive_index=none.new_ones((len(seq_lens), 1)).cumsum(0) - 1,
        retrive_next_token=none,
        retrive_next_sibling=none.clone(),
        retrive_cum_len=None,
        spec_steps=0,
        topk=1,
        draft_token_num=1,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
    )


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object other attributes for a while, also ones that it has from its class."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)
