"""What the engine's thread and the stream's threads share: reports one way, the newest decision the other.

Nothing here waits on the engine's side. Every field has one writer, and single reads and writes of attributes
and deques are atomic in Python, so there is no lock to contend for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from specgov.client.life import DecisionLife
from specgov.client.messages import Decision, Report
from specgov.proto.v1 import specgov_pb2 as pb

MAX_EVENTS = 64
"""Events that wait for a connection; more than these drop the oldest."""


class Mailbox(DecisionLife):
    """Bounded reports and events out, the newest decision in.

    A report is queued with its number, from 1 without gaps, so that the sending side sees from the numbers
    alone how many were dropped; an event is queued with the number of the last report before it.

    ``on_decision`` is called with each decision, on the thread that received it.
    """

    __slots__ = (
        "_arrived",
        "_on_decision",
        "_waiting",
        "_wake",
        "events",
        "reports",
        "submitted",
    )

    def __init__(self, queue_size: int, on_decision: Callable[[Decision], None] | None = None) -> None:
        super().__init__()
        self.reports: deque[tuple[int, Report]] = deque(maxlen=queue_size)
        self.events: deque[tuple[int, pb.EngineEvent.Kind.ValueType, int]] = deque(maxlen=MAX_EVENTS)
        self.submitted = 0
        self._on_decision = on_decision
        # A binary semaphore: locked = nothing new. Cheaper to signal than Event or Condition.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._arrived = threading.Condition()
        self._waiting = 0

    def signal(self) -> None:
        """Wake the sender; never waits."""
        if self._wake.locked():
            try:
                self._wake.release()
            except RuntimeError:  # another thread signalled in between, which serves as well
                return

    def wait_for_signal(self) -> None:
        """Sleep until the next ``signal``, or return at once where one came since the last call."""
        self._wake.acquire()

    def hold(self, decision: Decision, max_ttl_steps: int, max_ttl_s: float) -> None:
        """As ``DecisionLife.hold``; wakes whoever waits in ``wait_for_step``."""
        super().hold(decision, max_ttl_steps, max_ttl_s)
        if self._on_decision is not None:
            self._on_decision(decision)
        if self._waiting:
            with self._arrived:
                self._arrived.notify_all()

    def wait_for_step(self, step_id: int, timeout_s: float) -> Decision | None:
        """The newest decision once it knows ``step_id``; None after ``timeout_s``."""
        with self._arrived:
            self._waiting += 1
            try:
                self._arrived.wait_for(lambda: self._knows(step_id), timeout_s)
                return self.newest() if self._knows(step_id) else None
            finally:
                self._waiting -= 1

    def _knows(self, step_id: int) -> bool:
        decision = self.newest()
        return decision is not None and decision.known_step_id >= step_id
