"""The local rule: what decides while there is no decision of the sidecar's that holds."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from specgov.policies.registry import make_policy
from specgov.policies.tiers import nearest_threshold
from specgov.policies.types import EngineSpec, Policy, PolicyContext
from specgov.sglang_plugin.settings import DEFAULT_FALLBACK_BATCH_SIZE, DEFAULT_FALLBACK_NUM_STEPS


def fallback_rule(
    text: str, tiers: Sequence[int], graph_batch_sizes: Sequence[int] = (), max_running_requests: int = 0
) -> Policy:
    """The rule that ``text`` names; "" is ``threshold:32:3``, with the nearest tiers that there are.

    Every rank makes it with the same arguments and shows it the same results, so that all choose alike.

    Raises:
        PolicyError: the rule wants tiers that are not among ``tiers``.

    """
    engine = EngineSpec(tuple(tiers), tuple(graph_batch_sizes), max_running_requests)
    context = PolicyContext(engine, np.random.default_rng(0), time.monotonic)
    return make_policy(text or default_fallback(tiers), context)


def default_fallback(tiers: Sequence[int]) -> str:
    """``threshold:32:3``, or what comes nearest to it with these tiers."""
    return nearest_threshold(tiers, DEFAULT_FALLBACK_BATCH_SIZE, DEFAULT_FALLBACK_NUM_STEPS)
