"""The sidecar's own messages: structlog on stderr, for a console or as JSON lines."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from specgov.controller.config import LogConfig

Logger = structlog.stdlib.BoundLogger

_ADD_TO_EACH: tuple[Any, ...] = (
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)

_logger: Logger = structlog.wrap_logger(
    logging.getLogger("specgov"),
    processors=[
        structlog.stdlib.filter_by_level,
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
