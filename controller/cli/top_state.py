"""What ``specgov top`` knows: the engines as last listed, and the steps of a window of time."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from specgov.controller.cli.remote import enum_word
from specgov.proto.v1 import specgov_pb2 as pb

Value = TypeVar("Value", int, str)

MAX_SAMPLES = 4096
"""Steps that are kept of an engine at most."""


@dataclass(frozen=True, slots=True)
class Row:
    """An engine now. What is None is not known; means, shares and rates are over the window's steps.

    ``output_tokens_per_s`` is over the time in which steps were made, ``steps_per_s`` over all time.
    ``gain`` is the output rate that the policy's model expects, over the one that it expects of the baseline,
    minus 1. ``guard`` says why the guard does not ask the policy; empty where it does. ``idle_s`` is the time
    since its reports were seen to grow, or since it was first seen; None while they cannot be.

    """

    engine_id: str
    model: str
    policy: str
    mode: str
    connected: bool
    policy_failure: str
    guard: str
    batch_size: int | None
    num_steps: int | None
    waiting_requests: int | None
    kv_use_ratio: float | None
    accept_length: float | None
    step_ms: float | None
    output_tokens_per_s: float | None
    steps_per_s: float | None
    gain: float | None
    lag_steps: float | None
    round_trip_ms: float | None
    reports_lost: int
    tier_shares: tuple[tuple[int, float], ...]
    reason_shares: tuple[tuple[str, float], ...]
    idle_s: float | None


@dataclass(slots=True)
class _Listed:
    state: pb.EngineState
    reports_at: deque[tuple[float, int]]
    moved_s: float
    """When its reports were last seen to grow."""


class TopState:
    """Filled by two threads: one lists engines, the other follows their steps.

    Args:
        window_s: how long a step counts.
        clock: seconds, monotonic.

    """

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self.window_s = window_s
        self.problem = ""
        """Why there is nothing new; empty while there is."""
        self.watch_problem = ""
        """Why the steps cannot be followed though engines can be listed; empty while they can."""
        self.problem_since_s = 0.0
        self.ever_listed = False
        self._clock = clock
        self._lock = threading.Lock()
        self._listed: dict[str, _Listed] = {}
        self._steps: dict[str, deque[tuple[float, pb.StepSummary]]] = defaultdict(
            lambda: deque(maxlen=MAX_SAMPLES)
        )

    def stepped(self, step: pb.StepSummary) -> None:
        """A step was seen."""
        with self._lock:
            self._steps[step.engine_id].append((self._clock(), step))

    def listed(self, engines: Iterable[pb.EngineState]) -> None:
        """The sidecar listed its engines."""
        now_s = self._clock()
        with self._lock:
            before, self._listed = self._listed, {}
            for state in engines:
                name = state.info.engine_id
                known = before.get(name)
                counts = known.reports_at if known else deque[tuple[float, int]]()
                stands = known is not None and known.state.reports == state.reports
                if counts and counts[-1][1] > state.reports:
                    counts.clear()  # another sidecar, which counts from 0
                counts.append((now_s, state.reports))
                while len(counts) > 2 and counts[1][0] <= now_s - self.window_s:
                    counts.popleft()
                moved_s = known.moved_s if known and stands else now_s
                self._listed[name] = _Listed(state, counts, moved_s)
            for name in self._steps.keys() - self._listed.keys():
                del self._steps[name]
        self.problem = ""
        self.ever_listed = True

    def lost(self, problem: str) -> None:
        """The sidecar cannot be asked; what was known stays."""
        if not self.problem:
            self.problem_since_s = self._clock()
        self.problem = problem

    def problem_for_s(self) -> float:
        """How long the sidecar has not been there."""
        return self._clock() - self.problem_since_s

    def rows(self) -> list[Row]:
        """The engines: those that need an eye first, then those that are connected, each by id."""
        now_s = self._clock()
        with self._lock:
            rows = [
                self._row(name, one, tuple(self._steps[name]), now_s) for name, one in self._listed.items()
            ]
        return sorted(
            rows, key=lambda row: (not (row.policy_failure or row.guard), not row.connected, row.engine_id)
        )

    def _row(
        self, name: str, listed: _Listed, seen: tuple[tuple[float, pb.StepSummary], ...], now_s: float
    ) -> Row:
        state = listed.state
        steps = [step for at_s, step in seen if at_s > now_s - self.window_s]
        newest = seen[-1][1] if seen else (state.last_step if state.HasField("last_step") else None)
        timed = [step for step in steps if step.HasField("output_tokens_per_s") and step.step_ms > 0]
        timed_ms = sum(step.step_ms for step in timed)
        expected = [step for step in steps if step.HasField("expected_tokens_per_s")]
        baseline = sum(step.baseline_tokens_per_s for step in expected)
        accepted = [step.accept_length for step in steps if step.num_steps > 0]
        trips = [step.round_trip_ms for step in steps if step.HasField("round_trip_ms")]
        (first_s, first), (last_s, last) = listed.reports_at[0], listed.reports_at[-1]
        return Row(
            engine_id=name,
            model=state.info.model,
            policy=f"{state.policy} {state.policy_version}".strip(),
            mode=enum_word(pb.Mode.Name(state.mode)),
            connected=state.connected,
            policy_failure=state.policy_failure,
            guard=_guard(state.guard),
            batch_size=newest.batch_size if newest else None,
            num_steps=newest.num_steps if newest else None,
            waiting_requests=newest.waiting_requests if newest else None,
            kv_use_ratio=newest.kv_use_ratio if newest and newest.HasField("kv_use_ratio") else None,
            accept_length=_mean(accepted),
            step_ms=timed_ms / len(timed) if timed else None,
            output_tokens_per_s=(
                sum(step.output_tokens_per_s * step.step_ms for step in timed) / timed_ms if timed else None
            ),
            steps_per_s=(last - first) / (last_s - first_s) if last_s > first_s else None,
            gain=(
                sum(step.expected_tokens_per_s for step in expected) / baseline - 1 if baseline > 0 else None
            ),
            lag_steps=(state.decision_lag_steps_p50 if state.HasField("decision_lag_steps_p50") else None),
            round_trip_ms=_mean(trips),
            reports_lost=state.reports_dropped + state.reports_shed,
            tier_shares=tuple(sorted(_shares(step.num_steps for step in steps))),
            reason_shares=tuple(_shares(enum_word(pb.Reason.Name(step.reason)) for step in steps)),
            idle_s=None if self.problem else now_s - listed.moved_s,
        )


def _guard(guard: pb.GuardState) -> str:
    """Why it does not ask the policy; that an idle engine's newest report is old is no reason to look."""
    if guard.standing_cause in (pb.GUARD_CAUSE_UNSPECIFIED, pb.GUARD_CAUSE_STALE):
        return ""
    cause = pb.GuardCause.Name(guard.standing_cause).removeprefix("GUARD_CAUSE_").lower()
    steps = f", for {guard.clears_after_steps} steps at least" if guard.clears_after_steps else ""
    return f"{cause}{steps}"


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shares(values: Iterable[Value]) -> list[tuple[Value, float]]:
    """Each value with its share, the most frequent first."""
    counts = Counter(values)
    total = counts.total()
    return [(value, count / total) for value, count in counts.most_common()]
