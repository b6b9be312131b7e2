"""Rows of a log as the sidecar writes them, for tests."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def engine_row(
    time_s: float = 0.0, engine_id: str = "e", tiers: tuple[int, ...] = (0, 3), **changes: Any
) -> Row:
    row = {
        "kind": "engine",
        "time_s": time_s,
        "engine_id": engine_id,
        "tiers": list(tiers),
        "policy": "greedy",
    }
    return (
        row
        | {"model": "", "gpu": "", "tensor_parallel_size": 0, "graph_batch_sizes": [], "profile": ""}
        | changes
    )


def decision(decision_id: int, num_steps: int, **changes: Any) -> Row:
    row = {"decision_id": decision_id, "known_step_id": 0, "num_steps": num_steps, "reason": "policy"}
    row |= {"policy": "greedy", "policy_version": "1", "propensity": 1.0, "guard_cause": None}
    return row | {"by_candidate": False, "expected_tokens": None, "expected_ms": None} | changes


def decision_row(time_s: float, made: Row, mode: str = "active") -> Row:
    return {"kind": "decision", "time_s": time_s, "engine_id": "e", "mode": mode, "decision": made}


def step_row(
    step_id: int, num_steps: int, accepted: list[int], after: Row | None, followed: int = 0, **changes: Any
) -> Row:
    """A step of ``sum(accepted)`` requests, of which ``accepted[i]`` had i accepted drafts."""
    size = sum(accepted)
    row: Row = {
        "kind": "step",
        "time_s": float(step_id),
        "engine_id": "e",
        "step_id": step_id,
        "batch_size": size,
    }
    row |= {"num_steps": num_steps, "accepted": accepted, "sum_seq_len_tokens": 512 * size, "step_ms": 5.0}
    row |= {"padded_batch_size": 0, "max_seq_len_tokens": 512, "waiting_requests": 0, "kv_use_ratio": None}
    row |= {"flags": [], "followed_decision_id": followed, "lag_steps": 1, "engine_rule_num_steps": None}
    return row | {"reports_dropped": 0, "mode": "active", "decision": after} | changes


def placed(*rows: Row) -> list[tuple[str, Row]]:
    """The rows with where they stand."""
    return [(f"log, line {number}", row) for number, row in enumerate(rows, start=1)]
