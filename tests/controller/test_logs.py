"""The sidecar's own messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from specgov.controller import logs
from specgov.controller.config import LogConfig


@pytest.fixture(autouse=True)
def _keep_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogConfig(format="json"))
    logs.get_logger().info("engine connected", engine_id="e", tiers=[0, 3])
    logging.getLogger("grpc").error("of a library")
    logs.get_logger().debug("below the level")
    own, foreign = map(json.loads, capsys.readouterr().err.splitlines())
    assert (own["event"], own["engine_id"], own["tiers"], own["level"]) == (
        "engine connected",
        "e",
        [0, 3],
        "info",
    )
    assert own["timestamp"].endswith("Z")
    assert (foreign["event"], foreign["level"]) == ("of a library", "error")


def test_json_holds_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogConfig(format="json"))
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("grpc").exception("failed")
    assert "ValueError: why" in json.loads(capsys.readouterr().err)["exception"]


def test_console_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogConfig(format="console", level="debug"))
    logs.get_logger().debug("message rejected", cause="bad_name")
    shown = capsys.readouterr().err
    assert "debug" in shown
    assert "cause=bad_name" in shown
