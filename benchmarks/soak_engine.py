"""An engine of the soak: it follows its decisions, and finds out which are wrong or never come."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from decision_check import StreamCheck
from engine_load import TIERS, RawEngine

from specgov.proto.v1 import specgov_pb2 as pb

LOST_S = 30.0
"""A report without a decision that knows it, or a later one, for so long is lost."""
EXACT_BATCH, EXACT_NUM_STEPS = 32, 3
EXACT_POLICY = f"threshold:{EXACT_BATCH}:{EXACT_NUM_STEPS}"
"""Of every second engine: what it decides for a batch can be told beforehand."""
STEP_US_BY_TIER = {0: 5_000, 1: 5_400, 3: 6_200}
MAX_PROBLEMS = 20


@dataclass
class Tally:
    """What all engines saw together."""

    reports: int = 0
    decisions: int = 0
    not_sent: int = 0
    reconnects: int = 0
    cut_with_reports_under_way: int = 0
    reports_under_way_at_a_cut: int = 0
    lost: int = 0
    streams_ended_by_the_sidecar: int = 0
    exact_decisions: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    by_cause: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    problems: list[str] = field(default_factory=list)
    round_trips_s: array[float] = field(default_factory=lambda: array("f"))

    def note(self, engine_id: str, problems: list[str]) -> None:
        """Count a wrong decision, and keep the first few texts."""
        self.wrong += 1
        for problem in problems:
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(f"{engine_id}: {problem}")


class SoakEngine(RawEngine):
    """One stream of an engine; ``last_step`` and ``batch_size`` go on from the engine's stream before.

    The batch wanders between 1 and 63 requests; of each three drafts one or two are accepted.
    """

    def __init__(
        self, socket_path: str, number: int, boot_id: str, last_step: int, seed: int, tally: Tally
    ) -> None:
        self.number, self.boot_id = number, boot_id
        self.engine_id = f"soak-{number}"
        self.is_exact = number % 2 == 0
        self.has_decision = False
        self._tally = tally
        self._check = StreamCheck(TIERS)
        self._rng = np.random.default_rng((seed, number, last_step))
        self._batch_size = int(self._rng.integers(1, 64))
        self._pending: deque[tuple[int, float, int]] = deque()  # step, sent, batch size
        self._batches = {last_step: self._batch_size}
        self._decision: pb.Decision | None = None
        super().__init__(socket_path, self.engine_id, 64, boot_id)
        self.steps = last_step
        self.socket.settimeout(LOST_S)

    def send_step(self, now_s: float) -> None:
        """Make a step under the newest decision, and report it."""
        self._batch_size = int(min(63, max(1, self._batch_size + self._rng.integers(-2, 3))))
        num_steps = self._num_steps()
        report = self._report
        report.step_id = self.steps + 1
        report.batch_size = report.padded_batch_size = self._batch_size  # what its step times follow
        report.num_steps = num_steps
        live = np.arange(self._batch_size) % 3
        report.accepted_drafts = np.minimum(live, num_steps).astype(np.uint8).tobytes()
        report.slots_u16le = np.arange(self._batch_size, dtype="<u2").tobytes()
        report.slot_generations_u8 = bytes(self._batch_size)
        report.sum_seq_len_tokens, report.max_seq_len_tokens = 1_000 * self._batch_size, 1_000
        report.step_time_us = STEP_US_BY_TIER[num_steps] + 20 * self._batch_size
        report.decision_id = 0 if self._decision is None else self._decision.decision_id
        if not self._send_message(pb.EngineMessage(report=report)):
            self._tally.not_sent += 1
            return
        self.steps += 1
        self._tally.reports += 1
        self._pending.append((self.steps, now_s, self._batch_size))

    @property
    def is_answered(self) -> bool:
        """Whether a decision knows the newest report."""
        return not self._pending

    def count_lost(self, now_s: float) -> None:
        """Count the reports that have waited too long, once each."""
        while self._pending and now_s - self._pending[0][1] > LOST_S:
            step, _, _ = self._pending.popleft()
            self._tally.lost += 1
            self._tally.problems.append(f"{self.engine_id}: no decision knows step {step}")

    def cut(self) -> None:
        """Close the connection as a crash would."""
        self._tally.cut_with_reports_under_way += bool(self._pending)
        self._tally.reports_under_way_at_a_cut += len(self._pending)
        self.close()

    def _num_steps(self) -> int:
        if self._decision is None:
            return 0
        for part in (self._decision, *self._decision.neighbours):
            if part.batch_size_min <= self._batch_size <= part.batch_size_max:
                return part.num_steps
        return 0

    def _take_decision(self, decision: pb.Decision, now_s: float) -> None:
        self._tally.decisions += 1
        self.has_decision = True
        self._tally.by_reason[pb.Reason.Name(decision.reason)] += 1
        if decision.guard_cause:
            self._tally.by_cause[pb.GuardCause.Name(decision.guard_cause)] += 1
        problems = self._check.problems(decision, self.steps)
        batch_size: int | None = None
        while self._pending and self._pending[0][0] <= decision.known_step_id:
            step, sent_s, size = self._pending.popleft()
            self._tally.round_trips_s.append(now_s - sent_s)
            batch_size = size if step == decision.known_step_id else batch_size
        if batch_size is not None:
            problems += self._content_problems(decision, batch_size)
        if problems:
            self._tally.note(self.engine_id, [f"{problem}: {decision}"[:600] for problem in problems])
        self._decision = decision

    def _content_problems(self, decision: pb.Decision, batch_size: int) -> list[str]:
        """Whether it is for the batch of the step that it knows, and as the exact policy has it."""
        found = []
        if not decision.batch_size_min <= batch_size <= decision.batch_size_max:
            found.append(f"it is for another batch than the {batch_size} of step {decision.known_step_id}")
        if self.is_exact and decision.policy == "threshold" and not decision.guard_cause:
            self._tally.exact_decisions += 1
            right = EXACT_NUM_STEPS if batch_size < EXACT_BATCH else 0
            if decision.num_steps != right:
                found.append(f"{EXACT_POLICY} gives {right} for a batch of {batch_size}")
        return found
