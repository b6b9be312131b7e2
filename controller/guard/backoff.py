"""How long to wait before another try: twice as long after each failure, half as long after each success."""

from __future__ import annotations


class Backoff:
    """A wait in steps, from ``first_steps`` to ``largest_steps``.

    Attributes: left_steps: until the next try; 0 where there is nothing to wait for. failures: so far.

    """

    def __init__(self, first_steps: int, largest_steps: int) -> None:
        self._first_steps = first_steps
        self._largest_steps = largest_steps
        self._next_steps = first_steps
        self.left_steps = 0
        self.failures = 0

    def fail(self) -> None:
        """Wait; the next time longer."""
        self.failures += 1
        self.left_steps = self._next_steps
        self._next_steps = min(2 * self._next_steps, self._largest_steps)

    def succeed(self) -> None:
        """A try went well."""
        self._next_steps = max(self._next_steps // 2, self._first_steps)

    def step(self) -> None:
        """A step has passed."""
        self.left_steps = max(self.left_steps - 1, 0)

    def reset(self) -> None:
        """Forget all failures."""
        self._next_steps = self._first_steps
        self.left_steps = 0
