"""How many messages an engine may send, and log lines it may cause: buckets that fill with time."""

from __future__ import annotations

import threading

MAX_MESSAGES_PER_S = 5_000
"""Unless told otherwise. The fastest engines make a thousand steps a second."""
BURST_S = 2.0
"""What a stream may send at once, in seconds of its limit: an engine that was stopped, or a sidecar that was,
finds in the connection's buffers what was reported meanwhile."""
ENDURED_S = 10.0
"""How far a stream may be beyond its limit before it is ended, in seconds of the limit."""

MAX_REFUSED = 256
"""Engines and causes of which refusals are counted; the one counted first gives way to another."""


class MessagePace:
    """What one stream may send: ``per_s`` messages a second, and ``BURST_S`` seconds' worth at once.

    What is too much is to be shed by whoever asks. A stream that has more than ``ENDURED_S`` seconds' worth
    shed, less what its limit would have let through since, ``is_hopeless``: that takes more than twice the
    limit, for long. No engine makes so many steps.
    """

    def __init__(self, per_s: int, now_s: float) -> None:
        self.per_s = per_s
        self._burst = self._room = BURST_S * per_s
        self._shed = 0.0
        self._last_s = now_s

    def surplus(self, count: int, now_s: float) -> int:
        """How many of ``count`` messages are too many; ``now_s`` is monotonic."""
        earned = self.per_s * (now_s - self._last_s) if now_s > self._last_s else 0.0
        self._last_s = now_s
        room = self._room + earned
        if room > self._burst:
            room = self._burst
        if count <= room and not self._shed:  # as nearly always
            self._room = room - count
            return 0
        taken = min(count, int(room))
        self._room = room - taken
        surplus = count - taken
        self._shed = max(0.0, self._shed - earned) + surplus
        return surplus

    @property
    def is_hopeless(self) -> bool:
        """Whether the stream should be ended."""
        return self._shed > ENDURED_S * self.per_s


class LinePace:
    """How often one kind of log line may be written: ``burst`` times, and again ``per_s`` times a second."""

    def __init__(self, burst: int, per_s: float, now_s: float) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._room = float(burst)
        self._last_s = now_s
        self._suppressed = 0

    def take(self, now_s: float) -> int | None:
        """How many lines were suppressed before this one, which may be written; None: it may not."""
        self._room = min(self._burst, self._room + self._per_s * max(0.0, now_s - self._last_s))
        self._last_s = now_s
        if self._room < 1.0:
            self._suppressed += 1
            return None
        self._room -= 1.0
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


class Refusals:
    """How often engines were refused, by id and cause; ids come from outside, so only so many are kept."""

    def __init__(self, most: int = MAX_REFUSED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._times: dict[tuple[str, str], int] = {}

    def count(self, engine_id: str, cause: str) -> int:
        """Count one more; how many there were."""
        with self._lock:
            times = self._times[engine_id, cause] = self._times.get((engine_id, cause), 0) + 1
            if len(self._times) > self._most:
                del self._times[next(iter(self._times))]
            return times
