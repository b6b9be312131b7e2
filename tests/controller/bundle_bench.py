"""Bundles, and engines without a server that try them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specgov.controller.bundles import BundleWatcher
from specgov.controller.config import ServeConfig
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import check_info
from specgov.policies.bundle import Bundle, Card, save_bundle
from specgov.policies.network import following_the_model
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


def write_bundle(folder: Path, favourite: int, name: str = "mine") -> Path:
    """A bundle whose network wants the tier ``favourite`` whatever it sees."""
    network = following_the_model((2,))
    network.head_bias[favourite] = 1000.0
    save_bundle(Bundle(Card(name, (2,), 5.0), network), folder)
    return folder


class Bench:
    """Engines without a server; ``engine`` is connected."""

    def __init__(self, make_info: Make, make_report: Make, **config: Any) -> None:
        self.make_info, self.make_report = make_info, make_report
        self.config = ServeConfig.model_validate({"guard": {"enabled": False}, **config})
        self.engines = Engines(self.config, clock=lambda: 0.0)
        self.watcher = BundleWatcher(self.config, self.engines.bundles, self.engines.all)
        self.engine = self.connect()
        self.step_id = 0

    def connect(self, **changes: Any) -> Engine:
        session = Session(self.engines, Telemetry(Metrics(), timer=lambda: 0.0))
        info = self.make_info(**changes)
        return self.engines.connect(session, info, check_info(info))[0]

    def step(self) -> pb.Decision:
        self.step_id += 1
        self.engine.observe(self.make_report(self.step_id))
        decision = self.engine.decide()
        assert decision is not None
        return decision
