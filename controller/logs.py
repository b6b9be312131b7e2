"""The sidecar's own messages: structlog on stderr, for a console or as JSON lines."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from specgov.controller.config import LogConfig

Logger = structlog.stdlib.BoundLogger


def configure(config: LogConfig) -> None:
    """Send all messages, those of libraries through ``logging`` too, to stderr as the configuration says."""
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    as_json = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(config.level.upper())


def get_logger() -> Logger:
    """The sidecar's logger; silent below warnings until ``configure`` was called."""
    logger: Logger = structlog.stdlib.get_logger("specgov")
    return logger
