"""Reads what SGLang knows of a decode step and makes the report of it; on rank 0 only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from specgov.client import Report
from specgov.sglang_plugin.members import Known, Members
from specgov.sglang_plugin.orders import Kind
from specgov.sglang_plugin.policy import Launch

_STEPS_BETWEEN_KV_READS = 8
_MAX_STEP_TIME_US = 2**32 - 1


class Before(NamedTuple):
    """What must be read before SGLang processes a result: after it requests may have finished by it."""

    members: Known
    indices: list[int] | None  # of the live requests in the batch; None = all are
    batch_size: int
    sum_seq_len_tokens: int
    max_seq_len_tokens: int


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
        live = [r for r in reqs if r.finished_reason is None and not r.is_retracted]
        indices = None
        if len(live) != len(reqs):
            indices = [i for i, r in enumerate(reqs) if r.finished_reason is None and not r.is_retracted]
        lengths = [len(r.origin_input_ids) + len(r.output_ids) for r in live]
        members = self._members.of(live)
        return Before(members, indices, len(reqs), sum(lengths), max(lengths, default=0))

    def after(
        self, scheduler: Any, batch: Any, result: Any, before: Before | None, launch: Launch | None
    ) -> Report | None:
        """The report of a result that SGLang has processed; None where there is nothing to report."""
        now_s = self._clock()
        self._note_gaps(batch)
        if before is None:
            self._note_other(batch)
            return None
        width, accepted = result.speculative_num_draft_tokens, result.num_correct_drafts_per_req_cpu
        if not width or accepted is None or len(accepted) != before.batch_size:
            self._next_contiguous = -1
            return None
        if before.indices is not None:
            accepted = [accepted[i] for i in before.indices]
        slots, generations, warm_up = before.members
        step_id = batch.forward_iter
        step_time_us = min(int((now_s - self._last_s) * 1e6), _MAX_STEP_TIME_US)
        valid = (
            step_id == self._next_contiguous
            and not self._after_prefill
            and not self._after_idle
            and not _prefill_was_launched(scheduler)
        )
        followed = launch is not None and launch.num_steps == width - 1
        report = Report(
            step_id=step_id,
            batch_size=before.batch_size,
            num_steps=width - 1,
            accepted=bytes(accepted),
            slots=slots,
            generations=generations,
            sum_seq_len_tokens=before.sum_seq_len_tokens,
            max_seq_len_tokens=before.max_seq_len_tokens,
            waiting_requests=len(scheduler.waiting_queue),
            step_time_us=step_time_us if valid else 0,
            step_time_valid=valid,
            padded_batch_size=self._padded(before.batch_size) if result.can_run_cuda_graph else 0,
            cuda_graph_ran=bool(result.can_run_cuda_graph),
            kv_use_ratio=self._kv(),
            after_prefill=self._after_prefill,
            after_idle=self._after_idle,
            has_grammar=bool(batch.has_grammar),
            warm_up=warm_up,
            decision_id=launch.decision_id if launch is not None and followed else 0,
            engine_rule_num_steps=launch.num_steps
            if launch is not None and followed and launch.kind is Kind.ENGINES_RULE
            else None,
        )
        self._last_s = now_s
        self._next_contiguous = step_id + 1
        self._after_prefill = self._after_idle = False
        self.last_step_id = step_id
        return report

    def _note_gaps(self, batch: Any) -> None:
        if self._rounds - self._rounds_at_result > 1 or getattr(batch, "after_idle_gap", False):
            self._after_idle = True
        self._rounds_at_result = self._rounds

    def _note_other(self, batch: Any) -> None:
        self._next_contiguous = -1
        if batch.forward_mode.is_extend():
            self._after_prefill = True

    def _padded(self, batch_size: int) -> int:
        index = bisect_left(self._graphs, batch_size)
        return self._graphs[index] if index < len(self._graphs) else batch_size

    def _kv(self) -> float | None:
        if self._kv_reads_due == 0:
            self._kv_reads_due = _STEPS_BETWEEN_KV_READS
            self._kv_use = self._read_kv_use()
        self._kv_reads_due -= 1
        return self._kv_use


def _prefill_was_launched(scheduler: Any) -> bool:
    """Whether the overlapping loop launched a prefill before it came to process this result.

    A prefill without a CUDA graph holds up the scheduler while it is launched, and the result waits for that:
    steps before one seemed to last two to three times as long (H200, Llama 8B; docs/benchmarks-gpu.md).
    """
    queue = getattr(scheduler, "result_queue", None)
    return bool(queue and queue[-1][0].forward_mode.is_extend())
