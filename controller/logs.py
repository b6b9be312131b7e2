"""The sidecar's own messages: structlog on stderr, for a console or as JSON lines."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from specgov.controller.config import LogConfig
from specgov.controller.limits import LinePace

Logger = structlog.stdlib.BoundLogger

MAX_FIELD_CHARS = 600
MAX_FIELD_ITEMS = 64
LINES_AT_ONCE, LINES_PER_S = 100, 1.0
"""Of each kind of line. What peers do causes lines, and no peer may fill a disk with them."""

EventDict = MutableMapping[str, Any]


class LineLimit:
    """Leaves out lines of a kind that comes too often, and says in the next how many were left out.

    The kind is the line's ``event``, which is a text of ours. ``clock``: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._paces: dict[str, LinePace] = {}

    def __call__(self, _logger: Any, _method: str, event_dict: EventDict) -> EventDict:
        """The line, if it may be written.

        Raises:
            structlog.DropEvent: it may not.

        """
        with self._lock:
            now_s, kind = self._clock(), str(event_dict.get("event"))
            if kind not in self._paces:
                self._paces[kind] = LinePace(LINES_AT_ONCE, LINES_PER_S, now_s)
            suppressed = self._paces[kind].take(now_s)
        if suppressed is None:
            raise structlog.DropEvent
        return {**event_dict, "suppressed": suppressed} if suppressed else event_dict


def tame(_logger: Any, _method: str, event_dict: EventDict) -> EventDict:
    """Clip texts, and write out control characters: fields hold what peers say, and a terminal obeys some."""
    return {key: value if key == "exc_info" else _tame(value) for key, value in event_dict.items()}


def _tame(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) > MAX_FIELD_CHARS:
            value = value[:MAX_FIELD_CHARS] + "..."
        return value if value.isprintable() else value.encode("unicode_escape").decode("ascii")
    if isinstance(value, list | tuple):
        return [_tame(item) for item in value[:MAX_FIELD_ITEMS]]
    return value


_ADD_TO_EACH: tuple[Any, ...] = (
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)

_logger: Logger = structlog.wrap_logger(
    logging.getLogger("specgov"),
    processors=[
        structlog.stdlib.filter_by_level,
        LineLimit(),
        tame,
        *_ADD_TO_EACH,
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
    ],
    wrapper_class=structlog.stdlib.BoundLogger,
    cache_logger_on_first_use=True,
)


def get_logger() -> Logger:
    """The sidecar's logger. Until ``configure`` is called only warnings and errors are shown."""
    return _logger


def configure(config: LogConfig) -> None:
    """Send all messages, those of libraries too, to stderr as the configuration says."""
    as_json = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    processors = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    if as_json:
        processors.insert(1, structlog.processors.format_exc_info)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_ADD_TO_EACH, processors=processors)
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(config.level.upper())
