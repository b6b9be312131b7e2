"""The sidecar's own messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog

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


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_field_breaks_a_line_or_commands_a_terminal(
    capsys: pytest.CaptureFixture[str], form: Literal["json", "console"]
) -> None:
    """What peers say: a line break with a forged line, an escape sequence, a text without end, a list."""
    logs.configure(LogConfig(format=form))
    logs.get_logger().info(
        "engine connected",
        engine_id="a\n2026-01-01 [error] forged",
        gpu="\x1b[2J\u202e",
        model="x" * 100_000,
        tiers=["\r", *range(1000)],
    )
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert not {"\x1b[2J", "\u202e", "\r"} & set(shown)
    assert "\x1b[2J" not in shown
    assert len(shown) < 2000


def test_text_of_every_script_is_left_as_it_is() -> None:
    fields = {
        "event": "e",
        "model": "模型/модель é",
        "tiers": [0, 3],
        "n": 2.5,
        "exc_info": ValueError("a\nb"),
    }
    assert logs.tame(None, "info", dict(fields)) == fields


def test_lines_of_one_kind_are_limited_and_the_gap_is_told() -> None:
    now_s = 0.0
    limit = logs.LineLimit(lambda: now_s)

    def written(event: str) -> bool:
        try:
            limit(None, "info", {"event": event})
        except structlog.DropEvent:
            return False
        return True

    assert sum(written("engine event") for _ in range(1000)) == logs.LINES_AT_ONCE
    assert written("policy failed")  # another kind is not hidden by it
    now_s = 1.0 / logs.LINES_PER_S
    assert limit(None, "info", {"event": "engine event"}) == {
        "event": "engine event",
        "suppressed": 1000 - logs.LINES_AT_ONCE,
    }
    assert not written("engine event")
