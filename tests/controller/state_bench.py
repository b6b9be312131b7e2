"""Engines whose state is kept in a folder, without a server, and what to play on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specgov.controller import state_file
from specgov.controller.config import ServeConfig, StateConfig
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.state import StateKeeper
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import check_info
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]
SECONDS_UNTIL_NEVER = 86_400.0


class Sidecar:
    """Engines and their keeper, whose thread only runs at the end; streams are opened by hand."""

    def __init__(self, folder: Path, make_info: Make, write: Any = state_file.write, **config: Any) -> None:
        self._make_info = make_info
        fields = {"policy": "greedy", "guard": {"enabled": False}, **config}
        self.config = ServeConfig.model_validate(fields)
        self.engines = Engines(self.config, clock=lambda: 0.0)
        state = StateConfig(dir=str(folder), every_s=SECONDS_UNTIL_NEVER)
        self.keeper = StateKeeper(state, self.config.max_engines, self.engines.all, write)
        self.engines.keeper = self.keeper
        self.keeper.start()

    def connect(self, **changes: Any) -> Engine:
        session = Session(self.engines, Telemetry(Metrics(), timer=lambda: 0.0))
        info = self._make_info(**changes)
        return self.engines.connect(session, info, check_info(info))[0]

    def stop(self) -> None:
        self.keeper.close(60.0)


def play(engine: Engine, steps: list[pb.StepReport]) -> list[tuple[Any, ...]]:
    """All that was decided, but for the numbers of the decisions."""
    said = []
    for report in steps:
        engine.observe(report)
        decision = engine.decide()
        assert decision is not None
        decision.decision_id = 0
        said.append(decision)
    return said


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """What is logged meanwhile, as event and fields."""
    said: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert isinstance(record.msg, dict)
            said.append(record.msg)

    handler = Keep()
    logger = logging.getLogger("specgov")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.state")
    return path
