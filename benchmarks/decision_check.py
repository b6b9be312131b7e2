"""What every decision of a stream must be, whatever was sent: for the soaks that abuse a sidecar."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from specgov.proto.v1 import specgov_pb2 as pb


class StreamCheck:
    """Looks at the decisions of one stream, in order, for an engine with ``tiers``.

    ``last_sent`` is the newest step that the engine has reported over its streams of this boot.
    """

    def __init__(self, tiers: Collection[int]) -> None:
        self.tiers = frozenset(tiers)
        self.known_step_id = 0
        self._decision_id = 0

    def problems(self, decision: pb.Decision, last_sent: int) -> list[str]:
        """What is wrong with the stream's next decision; empty where nothing is."""
        found = tier_problems(decision, self.tiers)
        if decision.decision_id != self._decision_id + 1:
            found.append(f"decision {decision.decision_id} follows {self._decision_id}")
        if not self.known_step_id <= decision.known_step_id <= last_sent:
            found.append(
                f"it knows step {decision.known_step_id}, the one before knew {self.known_step_id}, "
                f"and {last_sent} was sent last"
            )
        if decision.ttl_steps < 1 or decision.ttl_ms < 1:
            found.append("it lives no time")
        self._decision_id, self.known_step_id = decision.decision_id, decision.known_step_id
        return found


def tier_problems(decision: pb.Decision, tiers: Collection[int]) -> list[str]:
    """What is wrong with its tiers, ranges and numbers."""
    found = [f"{name} is {value}" for name, value in not_finite(decision)]
    own = pb.TierRange(
        batch_size_min=decision.batch_size_min,
        batch_size_max=decision.batch_size_max,
        num_steps=decision.num_steps,
    )
    ranges = sorted((own, *decision.neighbours), key=lambda part: part.batch_size_min)
    if unknown := {part.num_steps for part in ranges} - set(tiers):
        found.append(f"num_steps {sorted(unknown)} are none of the engine's {sorted(tiers)}")
    if any(not 1 <= part.batch_size_min <= part.batch_size_max for part in ranges):
        found.append("a range of batch sizes is empty")
    if any(after.batch_size_min <= before.batch_size_max for before, after in pairwise(ranges)):
        found.append("ranges of batch sizes overlap")
    if decision.HasField("propensity") and not 0.0 < decision.propensity <= 1.0:
        found.append(f"propensity is {decision.propensity}")
    return found


def not_finite(message: Message, path: str = "") -> Iterator[tuple[str, float]]:
    """Each number in a message that is NaN or infinite, with the name of its field."""
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        for item in _items(field, value):
            if isinstance(item, Message):
                yield from not_finite(item, f"{name}.")
            elif isinstance(item, float) and not math.isfinite(item):
                yield name, item


def _items(field: FieldDescriptor, value: Any) -> Iterator[Any]:
    if isinstance(value, Message | float):
        yield value
    elif hasattr(value, "values"):  # a map
        yield from value.values()
    elif field.is_repeated and field.cpp_type in (
        FieldDescriptor.CPPTYPE_DOUBLE,
        FieldDescriptor.CPPTYPE_FLOAT,
        FieldDescriptor.CPPTYPE_MESSAGE,
    ):
        yield from value
