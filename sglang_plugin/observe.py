"""Reads what SGLang knows of a decode step and makes the report of it; on rank 0 only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from specgov.client import Report
from specgov.client.messages import ReportFields
from specgov.sglang_plugin.members import Known, Members
from specgov.sglang_plugin.orders import Kind
from specgov.sglang_plugin.policy import Launch

_STEPS_BETWEEN_KV_READS = 8
_MAX_STEP_TIME_US = 2**32 - 1
_ENGINES_RULE = Kind.ENGINES_RULE  # to look an enum's member up is a call, in Python 3.11


Before: TypeAlias = tuple[Known, list[int] | None, int, int, int]
"""What must be read before SGLang processes a result, since requests may have finished after it: the live
requests, their indices in the batch (None = all are live), the batch size, and the sum and the largest of the
live requests' lengths in tokens. A plain tuple, since one is made at each step."""


@final
class Observer:
    """Makes a ``Report`` of each decode result. Holds what spans results: times, members, flags.

    Args:
        clock: seconds, monotonic.
        graph_batch_sizes: the CUDA graphs' batch sizes, ascending; empty without graphs.
        read_kv_use: the share of the KV cache in use, read once in a few steps.
        warm_up_comes: whether the server sends itself a first request, to warm up.

    """

    def __init__(
        self,
        clock: Callable[[], float],
        graph_batch_sizes: Sequence[int],
        read_kv_use: Callable[[], float | None],
        *,
        warm_up_comes: bool,
    ) -> None:
        self._clock = clock
        self._graphs = tuple(graph_batch_sizes)
        self._read_kv_use = read_kv_use
        self._members = Members(warm_up_comes=warm_up_comes)
        self._last_s = 0.0
        self._next_contiguous = -1  # the forward iteration that would follow the last decode result
        self._rounds = 0
        self._rounds_at_result = 0
        self._after_prefill = False
        self._after_idle = True
        self._kv_use: float | None = None
        self._kv_reads_due = 0
        self._last_size, self._last_padded = -1, 0
        self.last_step_id = 0

    def round_begins(self) -> None:
        """The scheduler's loop has come round: it looks for requests once a round.

        A busy scheduler processes one result a round, so a round more means that there was a gap.
        """
        self._rounds += 1
        if self._rounds - self._rounds_at_result == 2:  # a gap begins
            self._members.forget()

    def break_interval(self) -> None:
        """The time to the next result is not a step's: the engine was paused, or its weights changed."""
        self._next_contiguous = -1

    def before(self, batch: Any) -> Before | None:
        """Read the batch of a result that SGLang is about to process; None where it is no decode step.

        Live are the requests that had not finished, been aborted or been retracted after the launch: SGLang's
        list of accepted drafts has entries of the others too, which mean nothing.
        """
        if not batch.forward_mode.is_decode():
            return None
        reqs = batch.reqs
        all_live, sum_tokens, max_tokens = True, 0, 0
        for r in reqs:
            if r.finished_reason is not None or r.is_retracted:
                all_live = False
                continue
            tokens = len(r.origin_input_ids) + len(r.output_ids)
            sum_tokens += tokens
            if tokens > max_tokens:
                max_tokens = tokens
        if all_live:
            return self._members.of(reqs), None, len(reqs), sum_tokens, max_tokens
        indices = [i for i, r in enumerate(reqs) if r.finished_reason is None and not r.is_retracted]
        members = self._members.of([reqs[i] for i in indices])
        return members, indices, len(reqs), sum_tokens, max_tokens

    def after(
        self, scheduler: Any, batch: Any, result: Any, before: Before | None, launch: Launch | None
    ) -> Report | None:
        """The report of a result that SGLang has processed; None where there is nothing to report."""
        now_s = self._clock()
        if self._rounds - self._rounds_at_result > 1 or getattr(batch, "after_idle_gap", False):
            self._after_idle = True
        self._rounds_at_result = self._rounds
        if before is None:
            self._note_other(batch)
            return None
        (slots, generations, warm_up), live, batch_size, sum_seq_len_tokens, max_seq_len_tokens = before
        width, accepted = result.speculative_num_draft_tokens, result.num_correct_drafts_per_req_cpu
        if not width or accepted is None or len(accepted) != batch_size:
            self._next_contiguous = -1
            return None
        if live is not None:
            accepted = [accepted[i] for i in live]
        num_steps = width - 1
        decision_id, engine_rule_num_steps = 0, None
        if launch is not None and launch.num_steps == num_steps:
            decision_id = launch.decision_id
            if launch.kind is _ENGINES_RULE:
                engine_rule_num_steps = num_steps
        step_id = batch.forward_iter
        step_time_valid = (
            step_id == self._next_contiguous
            and not self._after_prefill
            and not self._after_idle
            and not _prefill_was_launched(scheduler)
        )
        step_time_us = int((now_s - self._last_s) * 1e6) if step_time_valid else 0
        if step_time_us > _MAX_STEP_TIME_US:
            step_time_us = _MAX_STEP_TIME_US
        graph_ran = bool(result.can_run_cuda_graph)
        if self._kv_reads_due == 0:
            self._kv_reads_due = _STEPS_BETWEEN_KV_READS
            self._kv_use = self._read_kv_use()
        self._kv_reads_due -= 1
        if batch_size != self._last_size:
            self._last_size, self._last_padded = batch_size, self._padded(batch_size)
        fields: ReportFields = (
            step_id,
            batch_size,
            num_steps,
            bytes(accepted),
            slots,
            generations,
            sum_seq_len_tokens,
            max_seq_len_tokens,
            len(scheduler.waiting_queue),
            step_time_us,
            step_time_valid,
            self._last_padded if graph_ran else 0,
            graph_ran,
            self._kv_use,
            self._after_prefill,
            self._after_idle,
            bool(batch.has_grammar),
            warm_up,
            decision_id,
            engine_rule_num_steps,
        )
        self._last_s = now_s
        self._next_contiguous = step_id + 1
        self._after_prefill = self._after_idle = False
        self.last_step_id = step_id
        return tuple.__new__(Report, fields)

    def _note_other(self, batch: Any) -> None:
        self._next_contiguous = -1
        if batch.forward_mode.is_extend():
            self._after_prefill = True

    def _padded(self, batch_size: int) -> int:
        """The batch size of the CUDA graph that runs ``batch_size`` requests, where one does."""
        index = bisect_left(self._graphs, batch_size)
        return self._graphs[index] if index < len(self._graphs) else batch_size


def _prefill_was_launched(scheduler: Any) -> bool:
    """Whether the overlapping loop launched a prefill before it came to process this result.

    A prefill without a CUDA graph holds up the scheduler while it is launched, and the result waits for that:
    steps before one seemed to last two to three times as long (H200, Llama 8B; docs/benchmarks-gpu.md).
    """
    queue = getattr(scheduler, "result_queue", None)
    return bool(queue and queue[-1][0].forward_mode.is_extend())
