"""The decision log: a row for each step, enough to calibrate step times, to replay decisions and to report.

Schema version 2 (docs/decision-log.md says what is new and how a log is stored). Every file stands alone.
Fields that are not known are null. ``time_s`` is the wall clock (seconds since 1970) at which the sidecar
handled the row. Rows by their ``kind``:

``log``, the first line of a file: ``schema`` ("specgov.decision_log"), ``schema_version`` (2), ``time_s``.
A Parquet file has the first two in its metadata instead.

``engine``, at the start of each stream, and again for every known engine at the start of a new file:
``time_s``, the fields of the protocol's ``EngineInfo`` by their names, and ``policy``, as in ``--policy``.

``step``, for each accepted report, in the engine's order:
  ``engine_id``, ``step_id``, ``batch_size``, ``padded_batch_size`` (0 = not known), ``cuda_graph_ran``,
  ``num_steps``;
  ``accepted``: how many live requests had 0, 1, ... num_steps accepted drafts (num_steps + 1 numbers);
  ``sum_seq_len_tokens``, ``max_seq_len_tokens``, ``waiting_requests``, ``kv_use_ratio``;
  ``step_ms`` (null where the step's time was not valid);
  ``flags``: those that hold of ``after_prefill``, ``after_idle``, ``has_grammar``, ``warm_up``;
  ``followed_decision_id`` (0 = the engine's own rule), ``lag_steps`` (from the newest step that this decision
  knew to this one), ``engine_rule_num_steps``, ``reports_dropped`` (lost before this one:
  dropped by the engine, or shed by the sidecar);
  ``mode``: ``active``, ``shadow``, ``frozen`` or ``off``;
  ``decision``: what was decided after the step: ``decision_id``, ``known_step_id`` (several steps share a
  decision when they arrived together), ``num_steps``, ``reason``, ``policy``, ``policy_version``,
  ``propensity``; since version 2 ``guard_cause`` (null where the guard did not step in), ``by_candidate`` (a
  canary's), ``expected_tokens`` (of the whole batch in one step) and ``expected_ms``, one number for each of
  the engine's tiers in their order, null where the rule has no such model. The whole is null where nothing
  was sent.

``decision``, since version 2, for a decision that no step called for (a stream's first, a changed mode or
policy): ``time_s``, ``engine_id``, ``mode``, ``decision`` as above.

Numbers that JSON lacks (NaN, infinity) are null.
"""

from __future__ import annotations

from specgov.controller.decision_log.errors import DecisionLogError
from specgov.controller.decision_log.files import LogFile, open_to_append
from specgov.controller.decision_log.writer import DecisionLog

__all__ = ["DecisionLog", "DecisionLogError", "LogFile", "open_to_append"]
