"""What a session tells the world: metrics, decision log, watchers, traces; none of them can hold it up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specgov.controller.decision_log import DecisionLog
from specgov.controller.engine_metrics import Handled
from specgov.controller.limits import Refusals
from specgov.controller.logs import get_logger
from specgov.controller.metrics import Metrics
from specgov.controller.validation import Cause
from specgov.controller.watch import Watchers
from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from specgov.controller.engine import Engine
    from specgov.controller.step_record import StepRecord
    from specgov.controller.tracing import Tracing


class Telemetry:
    """Where sessions report what happened. ``timer`` (seconds) measures decision times."""

    def __init__(
        self,
        metrics: Metrics,
        decision_log: DecisionLog | None = None,
        timer: Callable[[], float] = time.perf_counter,
        tracing: Tracing | None = None,
    ) -> None:
        self.metrics = metrics
        self.decision_log = decision_log
        self.watchers = Watchers()
        self.timer = timer
        self.tracing = tracing
        self._refusals = Refusals()

    def connected(self, engine: Engine, *, superseded: bool) -> None:
        """A stream was accepted."""
        self.metrics.streams.inc()
        self.metrics.engines.connected(engine)
        if superseded:
            self.metrics.streams_superseded.inc()
        if self.decision_log is not None:
            self.decision_log.stream(engine.info, engine.policy_text)
        get_logger().info(
            "engine connected",
            engine_id=engine.info.engine_id,
            boot_id=engine.info.boot_id,
            model=engine.info.model,
            tiers=list(engine.spec.tiers),
            policy=engine.policy_text,
            superseded=superseded,
        )

    def disconnected(self, engine: Engine) -> None:
        """A stream ended and no other has the engine."""
        get_logger().info("engine disconnected", engine_id=engine.info.engine_id, reports=engine.reports)

    def refused(self, engine_id: str, cause: str, problem: str) -> None:
        """A stream was refused at its first message; an engine tries again and again, so not each is told."""
        times = self._refusals.count(engine_id, cause)
        if times & (times - 1) == 0:
            get_logger().warning(
                "engine refused", engine_id=engine_id, cause=cause, problem=problem, times=times
            )

    def rejected(self, cause: Cause) -> None:
        """A message was rejected."""
        self.metrics.count_rejected(cause)

    def log(self, engine: Engine, records: Sequence[StepRecord], decision: pb.Decision | None) -> None:
        """Log steps that were observed, and ``decision`` (None: none) on them; the engine's lock is held."""
        if self.decision_log is None:
            return
        if records:
            self.decision_log.steps(engine.info.engine_id, records, decision, engine.mode)
        elif decision is not None:
            self.decision_log.decided(engine.info.engine_id, decision, engine.mode)

    def handled(self, engine: Engine, handled: Handled) -> None:
        """A stream had its turn."""
        self.metrics.engines.handled(engine, handled)
        if self.tracing is not None and handled.decision is not None:
            self.tracing.decided(engine, handled.records, handled.decision, handled.seconds)

    def sent(self, engine: Engine, records: Sequence[StepRecord]) -> None:
        """The decision on ``records``, if there was one, is sent: do what could wait for that."""
        if engine.tally is not None and engine.tally.is_due:
            engine.tally.settle()
        if records and self.watchers.all:
            with engine.lock:
                self._show(engine, records)

    def _show(self, engine: Engine, records: Sequence[StepRecord]) -> None:
        for record in records:
            wanting = [watcher for watcher in self.watchers.all if watcher.wants(engine.info.engine_id)]
            if wanting:
                summary = engine.summary(record)
                for watcher in wanting:
                    watcher.put(summary)
