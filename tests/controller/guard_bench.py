"""A guarded rule on an engine that follows its decisions; the rule chooses what a test says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.guard import Guard, Verdict
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, EngineSpec, PolicyContext, StepObservation

ENGINE = EngineSpec(tiers=(0, 1, 3), max_running_requests=64, decision_lag_steps=1)
TOKENS, MS = np.array([4.0, 6.0, 8.0]), np.array([8.0, 8.0, 16.0])
"""A batch of 4: tier 1 brings 0.75 tokens a ms, tiers 0 and 3 bring 0.5. Beside tier 1 as the baseline a step
at tier 0 loses 2 of 6 tokens, and one at tier 3 loses 4 of 12."""
ACCEPTED = {0: (0, 0, 0, 0), 1: (1, 1, 0, 0), 3: (2, 2, 0, 0)}


def choice(num_steps: int, tokens: Any = TOKENS, ms: Any = MS, **changes: Any) -> Choice:
    ranges = tier_ranges(ENGINE, [(1, num_steps)])
    return Choice(ranges, propensity=1.0, expected_tokens=tokens, expected_ms=ms, **changes)


@dataclass
class Wants:
    """A rule that chooses what the test says."""

    name: ClassVar[str] = "wants"
    version: ClassVar[str] = "1"

    choice: Choice
    observed: list[int] = field(default_factory=list)
    asked: int = 0
    forgot: int = 0

    def choose(self, batch: BatchView) -> Choice:
        self.asked += 1
        return self.choice

    def observe(self, step: StepObservation) -> None:
        self.observed.append(step.step_id)

    def forget(self) -> None:
        self.forgot += 1

    def estimates(self) -> dict[str, float]:
        return {}


class Bench:
    """A guarded rule on an engine that follows its decisions; steps bring what ``TOKENS`` and ``MS`` say."""

    def __init__(self, wants: int = 1, **config: Any) -> None:
        self.now_s = 0.0
        self.step_id = 0
        fields = {"baseline": "static:1", "clear_steps": 5, **config}
        context = PolicyContext(ENGINE, np.random.default_rng(0), lambda: self.now_s)
        self.rule = Wants(choice(wants))
        self.guard = Guard(GuardConfig(**fields), "engine-1", context)
        self.newest: Verdict = self.decide()

    def decide(self) -> Verdict:
        self.newest = self.guard.decide(self.rule, BatchView(4, step_id=self.step_id))
        return self.newest

    @property
    def tier(self) -> int:
        return self.newest.choice.num_steps_for(4)

    def step(self, accepted: int | None = None, step_ms: float | None = None, **changes: Any) -> Verdict:
        """A step at the newest decision's tier, with so many drafts a request, and the next decision."""
        self.step_id += 1
        self.now_s += 0.01
        tier = self.tier
        seen = StepObservation(
            self.step_id,
            4,
            tier,
            np.array(ACCEPTED[tier] if accepted is None else [accepted] * 4, np.uint8),
            np.zeros(0, np.uint16),
            np.zeros(0, np.uint8),
            400,
            100,
            step_ms=MS[(0, 1, 3).index(tier)] if step_ms is None else step_ms,
        )
        followed = changes.get("followed", True)
        if self.guard.admit(seen, followed=followed, reports_dropped=changes.get("reports_dropped", 0)):
            self.rule.observe(seen)
        return self.decide()

    def steps(self, count: int, **changes: Any) -> list[GuardCause]:
        """The causes of so many decisions."""
        return [self.step(**changes).cause for _ in range(count)]
