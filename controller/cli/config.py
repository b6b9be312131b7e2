"""``specgov config``: the sidecar's configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from specgov.controller.cli import output


def check(file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")], /) -> None:
    """Check a configuration file of the sidecar: unknown keys, wrong types and values, with line and key.

    For example: specgov config check specgov.toml

    The keys are the options of specgov serve with _ for -, as in policy = "greedy" and max_streams = 8; but
    log.level, log.format, decision_log.path, tls.certificate, tls.key and tls.client_ca. A key that is
    unknown is answered with those that there are.

    Reads the files for TLS and tokens too. Exit codes: 0 the sidecar would start with it, 1 it would not.

    Args:
        file: A TOML file as for specgov serve --config.

    """
    from specgov.controller.auth import read_tokens
    from specgov.controller.config import load_config
    from specgov.controller.tls import Certificates

    config = load_config(file)
    if config.tls is not None:
        Certificates(config.tls)
    if config.admin_token_file is not None:
        read_tokens(config.admin_token_file)
    output.console().print(f"{file}: fine", soft_wrap=True)
