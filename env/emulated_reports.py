"""What an emulated engine says of itself and of its steps."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from specgov.client import Report
from specgov.env.server import Server, StepResult
from specgov.policies.types import EngineSpec, StepObservation
from specgov.proto.v1 import specgov_pb2 as pb


def engine_info(server: Server, *, engine_id: str, boot_id: str, profile: str = "") -> pb.EngineInfo:
    """Who the emulated engine is. ``profile`` names step times that the sidecar may start from."""
    engine = server.config.engine
    return pb.EngineInfo(
        engine_id=engine_id,
        boot_id=boot_id,
        engine="emulated",
        tiers=engine.tiers,
        graph_batch_sizes=engine.graph_batch_sizes,
        max_running_requests=engine.max_running_requests,
        decision_lag_steps=engine.decision_lag_steps,
        draft_kv_stays_warm=engine.draft_kv_stays_warm,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        profile=profile,
    )


def observation_of(result: StepResult, engine: EngineSpec) -> StepObservation:
    """The step of a server of one environment as an engine can report it.

    Rounded as on the wire: step times to whole microseconds, the KV ratio to single precision.
    """
    batch_size = int(result.batch_size[0])
    padded, graph_ran = padded_batch_size(batch_size, engine)
    kv_use_ratio = float(np.float32(result.kv_use_ratio[0])) if engine.kv_capacity_tokens else None
    return StepObservation(
        step_id=int(result.step_id[0]),
        batch_size=batch_size,
        num_steps=int(result.num_steps[0]),
        accepted=result.live.accepted,
        slots=result.live.slot.astype(np.uint16),
        generations=result.live.generation,
        sum_seq_len_tokens=int(result.sum_seq_len_tokens[0]),
        max_seq_len_tokens=int(result.max_seq_len_tokens[0]),
        padded_batch_size=padded,
        cuda_graph_ran=graph_ran,
        waiting_requests=int(result.waiting_requests[0]),
        kv_use_ratio=kv_use_ratio,
        step_ms=round(float(result.step_ms[0]) * 1000) / 1000.0 if result.step_ms_valid[0] else None,
        after_prefill=bool(result.after_prefill[0]),
        after_idle=bool(result.after_idle[0]),
    )


def padded_batch_size(batch_size: int, engine: EngineSpec) -> tuple[int, bool]:
    """The batch size that runs, and whether a CUDA graph does: above the largest graph none, unpadded."""
    sizes = engine.graph_batch_sizes
    place = bisect_left(sizes, batch_size)
    return (sizes[place], True) if place < len(sizes) else (batch_size, False)


def report_of(step: StepObservation, decision_id: int) -> Report:
    """The report on a step that followed the decision ``decision_id``; 0 = the engine's own rule."""
    return Report(
        step_id=step.step_id,
        batch_size=step.batch_size,
        num_steps=step.num_steps,
        accepted=step.accepted,
        slots=step.slots,
        generations=step.generations,
        sum_seq_len_tokens=step.sum_seq_len_tokens,
        max_seq_len_tokens=step.max_seq_len_tokens,
        waiting_requests=step.waiting_requests,
        step_time_us=0 if step.step_ms is None else round(step.step_ms * 1000),
        step_time_valid=step.step_ms is not None,
        padded_batch_size=step.padded_batch_size,
        cuda_graph_ran=step.cuda_graph_ran,
        kv_use_ratio=step.kv_use_ratio,
        after_prefill=step.after_prefill,
        after_idle=step.after_idle,
        decision_id=decision_id,
    )
