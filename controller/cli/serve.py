"""``specgov serve``: run the sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from specgov.controller.cli.errors import UsageError


def serve(
    config: Path | None = None,
    listen: str | None = None,
    policy: str | None = None,
    profile: str | None = None,
    mode: Literal["active", "shadow", "frozen", "off"] | None = None,
    socket_group: str | None = None,
    allow_remote: Annotated[bool | None, tyro.conf.FlagCreatePairsOff] = None,
    metrics: str | None = None,
    decision_log: str | None = None,
    max_streams: int | None = None,
    seed: int | None = None,
    log_level: Literal["debug", "info", "warning", "error"] | None = None,
    log_format: Literal["auto", "console", "json"] | None = None,
) -> int:
    """Run the sidecar until SIGTERM or Ctrl-C.

    What is not given here comes from the configuration file, and what is not there either has its default.

    Args:
        config: Configuration file (specgov.toml).
        listen: unix:///PATH or HOST:PORT. Default: specgov.sock in the user's runtime folder.
        policy: Policy of engines that get no other, as in threshold:32:3.
        profile: Step-time profile where an engine names none: a name or a .json file.
        mode: Mode of new engines.
        socket_group: Group that may use the socket too (mode 0660 instead of 0600).
        allow_remote: Let HOST:PORT be other than loopback.
        metrics: HOST:PORT of the Prometheus endpoint.
        decision_log: File of the decision log. Default: no log.
        max_streams: Engines connected at the same time.
        seed: Seed of the policies' randomness.
        log_level: Least severity shown.
        log_format: Format of messages; auto is console on a terminal, else JSON lines.

    """
    from specgov.controller.config import ConfigError, load_config
    from specgov.controller.serve import serve as run

    overrides = {
        "listen": listen,
        "policy": policy,
        "profile": profile,
        "mode": mode,
        "socket_group": socket_group,
        "allow_remote": allow_remote or None,
        "metrics": metrics,
        "decision_log.path": decision_log,
        "max_streams": max_streams,
        "seed": seed,
        "log.level": log_level,
        "log.format": log_format,
    }
    try:
        return run(load_config(config, overrides))
    except ConfigError as error:
        raise UsageError(str(error)) from error
