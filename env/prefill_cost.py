"""What prefill costs by a calibration's recordings, as far as they tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specgov.env.logged_prefill import measured_prefill
from specgov.env.recording import Recording
from specgov.policies.profile import Profile
from specgov.policies.step_time import PrefillCost

LEAST_CHUNKS = 5
_MODEL, _RECORDED, _LOG = "parametric model", "recorded", "decision log"
_CHUNK_TOKENS = 4096


def prefill_cost(recordings: Sequence[Recording], profile: Profile) -> tuple[PrefillCost, dict[str, Any]]:
    """The cost and what it rests on: recorded chunks, else the interruptions of logged steps.

    Recorded chunks give the part for a token, and the model that for a chunk; interruptions give both, as
    far as they can (``specgov.env.logged_prefill``), and the model what is left.

    Args:
        recordings: of a calibration.
        profile: what the calibration found of decode steps; its prefill cost is not used.

    """
    model = profile.parametric
    fixed = model.coefficients.fixed_ms + model.coefficients.draft_extend_ms
    per_token, of_token, of_chunk = (
        (float(model.prefill_ms(_CHUNK_TOKENS)) - fixed) / _CHUNK_TOKENS,
        _MODEL,
        _MODEL,
    )
    tokens = np.concatenate([r.prefill_tokens for r in recordings if r.can_speculate])
    millis = np.concatenate([r.prefill_ms for r in recordings if r.can_speculate])
    has_chunks = len(tokens) >= LEAST_CHUNKS
    if has_chunks:
        per_token, of_token = float(np.median((millis - fixed) / tokens)), _RECORDED
    cost = PrefillCost(round(fixed, 4), round(max(per_token, 0.0), 6))
    found = [each for recording in recordings for each in recording.interruptions]
    if not found or has_chunks:
        return cost, {"chunks": len(tokens), "ms_per_token_from": of_token}
    measured, with_tokens = measured_prefill(found, profile.step_time, cost.ms_per_token), 0
    if measured is not None:
        cost, of_chunk, with_tokens = measured.cost, _LOG, measured.with_tokens
        of_token = _LOG if measured.tokens_told else of_token
    return cost, {
        "chunks": len(tokens),
        "interruptions": len(found),
        "interruptions_with_tokens": with_tokens,
        "ms_per_chunk_from": of_chunk,
        "ms_per_token_from": of_token,
    }
