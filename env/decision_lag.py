"""Decisions apply some steps after they are made; the physics applies what it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class DecisionLag(Generic[T]):
    """Holds decisions until the step that they apply to.

    With a lag of d, the decision that was pushed after step s (the newest result that it knows) applies
    to step s + d; the first d steps get ``first``. A lag of 1 is an engine that waits for each result.

    For many environments let T be an array of them; `held` then allows a reset of single entries.

    Raises:
        ValueError: a lag below 1: a decision cannot know the result of its own step.

    """

    def __init__(self, lag_steps: int, first: T) -> None:
        if lag_steps < 1:
            raise ValueError(f"the decision lag is {lag_steps}: it is at least 1 step")
        self._held: deque[T] = deque([first] * lag_steps, maxlen=lag_steps)

    @property
    def due(self) -> T:
        """What applies to the next step."""
        return self._held[0]

    def push(self, decision: T) -> None:
        """Add the decision that knows the step just made."""
        self._held.append(decision)

    def held(self) -> Iterator[T]:
        """The decisions held, the next due first; at the start all are the same object."""
        return iter(self._held)
