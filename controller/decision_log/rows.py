"""Rows of the decision log, as the package's docstring says."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.json_format import MessageToDict

from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.step_record import StepRecord

SCHEMA = "specgov.decision_log"
SCHEMA_VERSION = 2
MAX_ENGINE_ROWS = 1024
ESTIMATE_DIGITS = 5
"""Significant digits of an estimate; more would say nothing and take a third of a row."""

Row = dict[str, Any]

FLAGS = ("after_prefill", "after_idle", "has_grammar", "warm_up")
_REASONS = {value: name.removeprefix("REASON_").lower() for name, value in pb.Reason.items()}
_GUARD_CAUSES = {
    value: name.removeprefix("GUARD_CAUSE_").lower() if value else None
    for name, value in pb.GuardCause.items()
}
_MODES = {value: name.removeprefix("MODE_").lower() for name, value in pb.Mode.items()}


def header_row(now_s: float) -> Row:
    """The first row of a file."""
    return {
        "kind": "log",
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "time_s": round(now_s, 6),
    }


def engine_row(now_s: float, info: pb.EngineInfo, policy: str) -> Row:
    """The row of a stream's start."""
    fields = MessageToDict(info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    fields.setdefault("draft_kv_stays_warm", None)
    fields["kv_capacity_tokens"] = info.kv_capacity_tokens  # the JSON mapping has 64-bit numbers as text
    return {"kind": "engine", "time_s": round(now_s, 6), **fields, "policy": policy}


def step_row(
    now_s: float, engine_id: str, record: StepRecord, decision: pb.Decision | None, mode: pb.Mode.ValueType
) -> Row:
    """The row of a step."""
    step = record.step
    return {
        "kind": "step",
        "time_s": round(now_s, 6),
        "engine_id": engine_id,
        "step_id": step.step_id,
        "batch_size": step.batch_size,
        "padded_batch_size": step.padded_batch_size,
        "cuda_graph_ran": step.cuda_graph_ran,
        "num_steps": step.num_steps,
        "accepted": np.bincount(step.accepted, minlength=step.num_steps + 1).tolist(),
        "sum_seq_len_tokens": step.sum_seq_len_tokens,
        "max_seq_len_tokens": step.max_seq_len_tokens,
        "waiting_requests": step.waiting_requests,
        "kv_use_ratio": step.kv_use_ratio,
        "step_ms": step.step_ms,
        "flags": [flag for flag in FLAGS if getattr(step, flag)],
        "followed_decision_id": record.followed_decision_id,
        "lag_steps": record.lag_steps,
        "engine_rule_num_steps": record.engine_rule_num_steps,
        "reports_dropped": record.reports_lost,
        "mode": _MODES[mode],
        "decision": None if decision is None else _decision(decision),
    }


def decision_row(now_s: float, engine_id: str, decision: pb.Decision, mode: pb.Mode.ValueType) -> Row:
    """The row of a decision that no step called for."""
    return {
        "kind": "decision",
        "time_s": round(now_s, 6),
        "engine_id": engine_id,
        "mode": _MODES[mode],
        "decision": _decision(decision),
    }


def line(row: Row) -> bytes:
    """The row as a line of JSON."""
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class KnownEngines:
    """The newest row of each engine, with which a new file begins."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def remember(self, row: Row) -> None:
        """Keep the row if it is an engine's; the oldest of too many is let go."""
        if row["kind"] != "engine":
            return
        self._rows.pop(row["engine_id"], None)
        self._rows[row["engine_id"]] = row
        while len(self._rows) > MAX_ENGINE_ROWS:
            del self._rows[next(iter(self._rows))]

    def rows(self) -> list[Row]:
        """All that are kept, oldest first."""
        return list(self._rows.values())


def _decision(decision: pb.Decision) -> Row:
    known = decision.HasField("propensity") and math.isfinite(decision.propensity)
    estimates = decision.estimates
    return {
        "decision_id": decision.decision_id,
        "known_step_id": decision.known_step_id,
        "num_steps": decision.num_steps,
        "reason": _REASONS[decision.reason],
        "policy": decision.policy,
        "policy_version": decision.policy_version,
        "propensity": decision.propensity if known else None,
        "guard_cause": _GUARD_CAUSES[decision.guard_cause],
        "by_candidate": decision.by_candidate,
        "expected_tokens": [_short(each.expected_tokens) for each in estimates] or None,
        "expected_ms": [_short(each.expected_ms) for each in estimates] or None,
    }


def _short(value: float) -> float | None:
    return float(f"{value:.{ESTIMATE_DIGITS}g}") if math.isfinite(value) else None
