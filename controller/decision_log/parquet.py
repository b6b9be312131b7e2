"""Rows as Parquet: one row group a part. Needs pyarrow.

The columns are the fields of ``step`` and ``decision`` rows by their names; ``engine`` rows, whose fields
grow with the protocol, are one column of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from specgov.controller.decision_log.rows import SCHEMA, SCHEMA_VERSION, Row

_DECISION = pa.struct(
    [
        ("decision_id", pa.uint64()),
        ("known_step_id", pa.uint64()),
        ("num_steps", pa.int32()),
        ("reason", pa.string()),
        ("policy", pa.string()),
        ("policy_version", pa.string()),
        ("propensity", pa.float64()),
        ("guard_cause", pa.string()),
        ("by_candidate", pa.bool_()),
        ("expected_tokens", pa.list_(pa.float64())),
        ("expected_ms", pa.list_(pa.float64())),
    ]
)

COLUMNS = pa.schema(
    [
        ("kind", pa.string()),
        ("time_s", pa.float64()),
        ("engine_id", pa.string()),
        ("step_id", pa.uint64()),
        ("batch_size", pa.int32()),
        ("padded_batch_size", pa.int32()),
        ("cuda_graph_ran", pa.bool_()),
        ("num_steps", pa.int32()),
        ("accepted", pa.list_(pa.int32())),
        ("sum_seq_len_tokens", pa.uint64()),
        ("max_seq_len_tokens", pa.uint64()),
        ("waiting_requests", pa.int64()),
        ("kv_use_ratio", pa.float64()),
        ("step_ms", pa.float64()),
        ("flags", pa.list_(pa.string())),
        ("followed_decision_id", pa.uint64()),
        ("lag_steps", pa.int64()),
        ("engine_rule_num_steps", pa.int32()),
        ("reports_dropped", pa.int64()),
        ("mode", pa.string()),
        ("decision", _DECISION),
        ("engine", pa.string()),
    ],
    metadata={"schema": SCHEMA, "schema_version": str(SCHEMA_VERSION)},
)


class Parquet:
    """Collects rows as record batches, a tenth of the memory of the rows themselves."""

    suffix = ".parquet"

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows in."""
        self._batches.append(_batch(rows))

    def part(self, first: Sequence[Row], now_s: float) -> bytes:  # noqa: ARG002 Parquet has no header row
        """The part's bytes."""
        batches, self._batches = [_batch(first), *self._batches], []
        table = pa.Table.from_batches(batches, COLUMNS)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", row_group_size=max(1, table.num_rows))
        return bytes(sink.getvalue())


def _batch(rows: Sequence[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([_flat(row) for row in rows], COLUMNS)


def _flat(row: Row) -> Row:
    if row["kind"] != "engine":
        return row
    return {key: row[key] for key in ("kind", "time_s", "engine_id")} | {"engine": json.dumps(row)}
