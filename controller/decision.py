"""A rule's choice as a ``Decision`` message."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specgov.policies.types import Choice, EngineSpec, Policy, PolicyError, Reason, TierRange
from specgov.proto.v1 import specgov_pb2 as pb

MAX_NEIGHBOURS_EACH_SIDE = 32


class DecisionBuilder:
    """Builds the decisions of one policy for one engine.

    The message for a range is kept as long as the policy's ranges stay the same, and the last one with its
    estimates as long as the choice is the same object: most decisions differ from the last only in their
    numbers.
    """

    def __init__(self, engine: EngineSpec, policy: Policy, ttl_steps: int, ttl_ms: int) -> None:
        self._engine = engine
        self._policy = policy
        self._ttl_steps = ttl_steps
        self._ttl_ms = ttl_ms
        self._ranges: tuple[TierRange, ...] = ()
        self._range_ends: list[int] = []
        self._templates: dict[int, pb.Decision] = {}
        self._choice: Choice | None = None
        self._index = -1
        self._message = pb.Decision()

    def build(
        self, choice: Choice, batch_size: int, decision_id: int, known_step_id: int, reason: Reason
    ) -> pb.Decision:
        """The decision for a batch of ``batch_size``.

        Raises:
            PolicyError: the choice names a tier that the engine does not have, or no range at all.

        """
        self.check(choice)
        index = min(bisect_left(self._range_ends, batch_size), len(self._ranges) - 1)
        if choice is not self._choice or index != self._index:
            self._message = self._filled(choice, index)
            self._choice, self._index = choice, index
        decision = pb.Decision()
        decision.CopyFrom(self._message)
        decision.decision_id = decision_id
        decision.known_step_id = known_step_id
        decision.reason = reason  # type: ignore[assignment]  # the enums' values are the same
        return decision

    def check(self, choice: Choice) -> None:
        """Check that it is one for the engine.

        Raises:
            PolicyError: it names a tier that the engine does not have, no range at all, or overlapping ones.

        """
        if choice.ranges is not self._ranges and choice.ranges != self._ranges:
            self._keep(choice.ranges)

    def _keep(self, ranges: tuple[TierRange, ...]) -> None:
        check_ranges(ranges, self._engine, self._policy.name)
        self._ranges = ranges
        self._range_ends = [tier_range.batch_size_max for tier_range in ranges]
        self._templates = {}

    def _filled(self, choice: Choice, index: int) -> pb.Decision:
        """The message for a range, with what the choice says beside its ranges."""
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = self._template(index)
        message = pb.Decision()
        message.CopyFrom(template)
        if choice.propensity is not None:
            message.propensity = choice.propensity
        add_estimates(message, self._engine.tiers, choice.expected_tokens, choice.expected_ms)
        return message

    def _template(self, index: int) -> pb.Decision:
        own = self._ranges[index]
        below = self._ranges[max(0, index - MAX_NEIGHBOURS_EACH_SIDE) : index]
        above = self._ranges[index + 1 : index + 1 + MAX_NEIGHBOURS_EACH_SIDE]
        return pb.Decision(
            num_steps=own.num_steps,
            batch_size_min=own.batch_size_min,
            batch_size_max=own.batch_size_max,
            neighbours=[
                pb.TierRange(
                    batch_size_min=other.batch_size_min,
                    batch_size_max=other.batch_size_max,
                    num_steps=other.num_steps,
                )
                for other in (*below, *above)
            ],
            ttl_steps=self._ttl_steps,
            ttl_ms=self._ttl_ms,
            policy=self._policy.name,
            policy_version=self._policy.version,
        )


def check_ranges(ranges: tuple[TierRange, ...], engine: EngineSpec, policy: str) -> None:
    """Check that a policy's choice is one for this engine.

    Raises:
        PolicyError: it names a tier that the engine does not have, no range at all, or ranges that overlap.

    """
    unknown = {tier_range.num_steps for tier_range in ranges} - set(engine.tiers)
    if unknown or not ranges:
        raise PolicyError(
            f"policy {policy} chose {sorted(unknown) or 'nothing'}, "
            f"but the engine's tiers are {list(engine.tiers)}"
        )
    if any(part.batch_size_min > part.batch_size_max for part in ranges) or any(
        after.batch_size_min <= before.batch_size_max for before, after in pairwise(ranges)
    ):
        raise PolicyError(f"policy {policy} chose ranges of batch sizes that do not ascend: {ranges}")


def add_estimates(
    decision: pb.Decision,
    tiers: tuple[int, ...],
    expected_tokens: NDArray[np.float64] | None,
    expected_ms: NDArray[np.float64] | None,
) -> None:
    """Add what is expected of each tier, where the rule has such a model."""
    if expected_tokens is None or expected_ms is None:
        return
    for num_steps, tokens, step_ms in zip(tiers, expected_tokens.tolist(), expected_ms.tolist(), strict=True):
        decision.estimates.add(num_steps=num_steps, expected_tokens=tokens, expected_ms=step_ms)
