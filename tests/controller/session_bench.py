"""A session without a server, whose rule a test can see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from specgov.controller import seat as seat_module
from specgov.controller.config import ServeConfig
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.telemetry import Telemetry
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    PolicyContext,
    StepObservation,
    TierRange,
)
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


@dataclass
class Recorder:
    """A rule that chooses what the test says and remembers what it saw."""

    name: ClassVar[str] = "recorder"
    version: ClassVar[str] = "7"

    engine: EngineSpec
    choice: Choice = field(default_factory=lambda: Choice((TierRange(1, 64, 3),)))
    observed: list[int] = field(default_factory=list)
    generations: list[list[int]] = field(default_factory=list)
    asked: list[BatchView] = field(default_factory=list)
    forgot: int = 0

    def observe(self, step: StepObservation) -> None:
        self.observed.append(step.step_id)
        self.generations.append(step.generations.tolist())

    def choose(self, batch: BatchView) -> Choice:
        self.asked.append(batch)
        return self.choice

    def forget(self) -> None:
        self.forgot += 1

    def estimates(self) -> dict[str, float]:
        return {"observed": float(len(self.observed))}


class Bench:
    """A session whose mailbox a test fills, and whose rule it can see."""

    def __init__(self, make_info: Make, make_report: Make) -> None:
        self.make_info, self.make_report = make_info, make_report
        self.engines = Engines(ServeConfig(policy="static"), clock=lambda: 0.0)
        self.telemetry = Telemetry(Metrics(), timer=lambda: 0.0)

    def connect(self, **changes: Any) -> tuple[Session, Iterator[pb.Decision]]:
        session = Session(self.engines, self.telemetry)
        session.deliver(pb.EngineMessage(info=self.make_info(**changes)))
        decisions = session.run()
        next(decisions)
        return session, decisions

    def report(self, session: Session, *step_ids: int, **changes: Any) -> None:
        for step_id in step_ids:
            session.deliver(pb.EngineMessage(report=self.make_report(step_id, **changes)))

    @property
    def engine(self) -> Engine:
        engine = self.engines.get("engine-1")
        assert engine is not None
        return engine

    @property
    def rule(self) -> Recorder:
        rule = self.engine.policy
        assert isinstance(rule, Recorder)
        return rule


def bench_with_recorders(monkeypatch: pytest.MonkeyPatch, make_info: Make, make_report: Make) -> Bench:
    """A bench whose engines' rules are ``Recorder``s, whatever policy is named."""

    def make_recorder(text: str, context: PolicyContext, *, files: bool) -> Recorder:
        return Recorder(context.engine)

    monkeypatch.setattr(seat_module, "make_policy", make_recorder)
    return Bench(make_info, make_report)
