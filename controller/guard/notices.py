"""Log lines about what the guard does, few enough to be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from specgov.controller.guard.causes import GuardCause
from specgov.controller.logs import get_logger
from specgov.policies.types import Reason

QUIET_S = 60.0
"""After a line about a cause the next one about it comes no sooner, and says how many it stands for."""


class Notices:
    """Log lines of one engine's guard; ``clock`` gives seconds."""

    def __init__(self, engine_id: str, clock: Callable[[], float]) -> None:
        self._engine_id = engine_id
        self._clock = clock
        self._said_s: dict[str, float] = {}
        self._times: Counter[str] = Counter()

    def say(self, cause: GuardCause, **facts: object) -> None:
        """The guard steps in."""
        severe = cause.reason is Reason.FALLBACK
        self._write("warning" if severe else "info", _TEXTS[cause], cause, facts)

    def end(self, cause: GuardCause) -> None:
        """An alarm ended."""
        self._write("info", "alarm ended; the policy decides and learns again", cause, {})

    def _write(self, level: str, text: str, cause: GuardCause, facts: dict[str, object]) -> None:
        kind = f"{text} {cause}"
        self._times[kind] += 1
        now_s, said_s = self._clock(), self._said_s.get(kind)
        if said_s is not None and 0 <= now_s - said_s < QUIET_S:
            return
        self._said_s[kind] = now_s
        write = getattr(get_logger(), level)
        write(text, engine_id=self._engine_id, cause=cause.word, times=self._times.pop(kind), **facts)


_TEXTS = {
    GuardCause.IMPOSSIBLE_REPORT: "alarm: a report cannot be true; the baseline decides, nothing is learnt",
    GuardCause.STEP_TIME: "alarm: step times cannot be trusted; the baseline decides, nothing is learnt",
    GuardCause.ZERO_ACCEPTANCE: "alarm: no draft is accepted; smallest tier, nothing is learnt",
    GuardCause.REPORTS_STOPPED: "alarm: steps were not reported; the baseline decides, nothing is learnt",
    GuardCause.CLOCK_STEPPED: "alarm: the clock went back; the baseline decides, nothing is learnt",
    GuardCause.OUTPUT_RATE: "the output rate fell short of the baseline's estimate; the baseline decides",
    GuardCause.THRASHING: "the policy changes tiers too often; the tier is kept",
    GuardCause.BUDGET: "the policy's estimated losses are at their limit; the baseline decides",
    GuardCause.LATENCY: "the policy's tier would break a latency target; another one is used",
    GuardCause.POLICY_FAILED: "the policy failed; smallest tier",
}
