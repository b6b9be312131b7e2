"""``specgov serve``: run the sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from specgov.controller.cli import options
from specgov.controller.cli.errors import UsageError


def serve(
    config: Annotated[Path | None, options.option("FILE")] = None,
    listen: Annotated[str | None, options.option("unix:///PATH|HOST:PORT")] = None,
    policy: Annotated[str | None, options.option("POLICY")] = None,
    profile: Annotated[str | None, options.option("NAME|FILE.json")] = None,
    mode: Annotated[
        Literal["active", "shadow", "frozen", "off"] | None, options.option("active|shadow|frozen|off")
    ] = None,
    socket_group: Annotated[str | None, options.option("GROUP")] = None,
    admin_listen: Annotated[str | None, options.option("unix:///PATH|HOST:PORT")] = None,
    admin_socket_group: Annotated[str | None, options.option("GROUP")] = None,
    admin_token_file: Annotated[str | None, options.option("FILE")] = None,
    insecure: bool = False,
    tls_certificate: Annotated[str | None, options.option("FILE.pem")] = None,
    tls_key: Annotated[str | None, options.option("FILE.pem")] = None,
    tls_client_ca: Annotated[str | None, options.option("FILE.pem")] = None,
    metrics: Annotated[str | None, options.option("HOST:PORT")] = None,
    decision_log: Annotated[str | None, options.option("FILE")] = None,
    state_dir: Annotated[str | None, options.option("FOLDER")] = None,
    bundles_dir: Annotated[str | None, options.option("FOLDER")] = None,
    max_streams: Annotated[int | None, options.option("N")] = None,
    seed: Annotated[int | None, options.option("N")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, options.option("debug|info|warning|error")
    ] = None,
    log_format: Annotated[
        Literal["auto", "console", "json"] | None, options.option("auto|console|json")
    ] = None,
) -> int:
    """Run the sidecar until SIGTERM or Ctrl-C.

    For example: specgov serve --policy threshold:32:3 --metrics 127.0.0.1:9464

    What is not given here comes from the configuration file, and what is not there either has its default.

    Args:
        config: Configuration file (specgov.toml).
        listen: unix:///PATH or HOST:PORT. Default: specgov.sock in the user's runtime folder.
        policy: Policy of engines that get no other, as in threshold:32:3.
        profile: Step-time profile where an engine names none: a name or a .json file.
        mode: Mode of new engines.
        socket_group: Group that may use the socket too (mode 0660 instead of 0600).
        admin_listen: Address of the admin service alone. Default: where the engines connect.
        admin_socket_group: Group that may use the socket of --admin-listen too.
        admin_token_file: File of tokens, one a line; the admin service wants one of them.
        insecure: Let HOST:PORT be without TLS: whoever reaches it may change the engines' speed.
        tls_certificate: The sidecar's certificate, for HOST:PORT. Changed files are read anew.
        tls_key: Its key.
        tls_client_ca: Authorities of clients' certificates: only clients that have one may connect.
        metrics: HOST:PORT of the Prometheus endpoint.
        decision_log: File of the decision log. Default: no log.
        state_dir: Folder that keeps over restarts what engines taught their policies. Default: none.
        bundles_dir: Folder that specgov policy push puts bundles into. Default: none.
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
        "admin_listen": admin_listen,
        "admin_socket_group": admin_socket_group,
        "admin_token_file": admin_token_file,
        "insecure": insecure or None,
        "tls.certificate": tls_certificate,
        "tls.key": tls_key,
        "tls.client_ca": tls_client_ca,
        "metrics": metrics,
        "decision_log.path": decision_log,
        "state.dir": state_dir,
        "bundles.dir": bundles_dir,
        "max_streams": max_streams,
        "seed": seed,
        "log.level": log_level,
        "log.format": log_format,
    }
    try:
        return run(load_config(config, overrides))
    except ConfigError as error:
        raise UsageError(str(error)) from error
