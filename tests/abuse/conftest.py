"""A sidecar for abuse: in this process, on a socket of its own, with all that it may write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specgov.controller.config import BundlesConfig, DecisionLogConfig, ServeConfig, StateConfig
from specgov.controller.server import Sidecar

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="module")
def abused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("abused")
    sidecar = Sidecar(
        ServeConfig(
            listen=f"unix://{folder}/specgov.sock",
            max_engines=8,
            decision_log=DecisionLogConfig(path=str(folder / "decisions.jsonl"), max_mb=0.1, flush_s=0.05),
            state=StateConfig(dir=str(folder / "states"), every_s=0.2),
            bundles=BundlesConfig(dir=str(folder / "bundles")),
        )
    )
    sidecar.start()
    yield sidecar
    sidecar.stop()
