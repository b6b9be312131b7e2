"""The sidecar's configuration: ``specgov.toml`` and the command line over it.

Unknown keys and wrong types are errors that name the file, the line and the key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from specgov.controller.guard.config import GuardConfig
from specgov.controller.limits import MAX_MESSAGES_PER_S
from specgov.controller.listen import ListenError, TcpAddress, is_loopback, parse_address, parse_tcp_address
from specgov.controller.profiles import AUTO, NO_PROFILE, cached_profile
from specgov.policies.registry import parse_policy

DEFAULT_POLICY = "greedy"
"""The policy of engines for which none is named."""

MODES = ("active", "shadow", "frozen", "off")


class ConfigError(ValueError):
    """The configuration cannot be used; the message says where, what, and what would be right."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DecisionLogConfig(_Section):
    """``[decision_log]``: a row for each step; off without a path."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="file, or for Parquet a folder, or a URL that fsspec knows; none = no log",
    )
    format: Literal["auto", "jsonl", "parquet"] = Field(
        default="auto", description="auto = parquet where the path ends in .parquet, else JSON lines"
    )
    max_mb: float = Field(
        default=64.0, gt=0, le=100_000, description="size at which a file is rotated, in MB"
    )
    rotate_s: float = Field(
        default=86_400.0, gt=0, le=1e9, description="age at which a file is rotated, in seconds"
    )
    part_s: float = Field(
        default=60.0, gt=0, le=86_400, description="seconds that a part holds (Parquet, or a URL)"
    )
    part_rows: int = Field(default=50_000, ge=1, le=10_000_000, description="rows that a part holds at most")
    keep_files: int = Field(default=4, ge=0, le=1000, description="rotated files that are kept")
    flush_s: float = Field(default=1.0, ge=0.01, le=60, description="seconds between writes")
    queue_rows: int = Field(
        default=65_536, ge=1, le=10_000_000, description="rows that may wait for the disk"
    )


class StateConfig(_Section):
    """``[state]``: what engines have taught their policies, kept over restarts; off without a folder."""

    dir: str | None = Field(
        default=None, min_length=1, description="folder of the saved states; none = a restart starts cold"
    )
    every_s: float = Field(default=30.0, ge=0.1, le=86_400, description="seconds between saves")


class BundlesConfig(_Section):
    """``[bundles]``: the store that ``specgov policy push`` fills, and how new bundles are tried."""

    dir: str | None = Field(
        default=None, min_length=1, description="folder of pushed bundles; none = there is no store"
    )
    watch_s: float = Field(
        default=5.0, ge=0.1, le=86_400, description="seconds between looks at the folder of policy ppo:FOLDER"
    )
    trial_steps: int = Field(
        default=2000,
        ge=0,
        le=10_000_000,
        description="steps in which a new bundle that fails, or trips the guard, is rolled back; 0 = none",
    )


class LogConfig(_Section):
    """``[log]``: the sidecar's own messages, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severity shown"
    )
    format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto = console on a terminal"
    )


class TracingConfig(_Section):
    """``[tracing]``: OpenTelemetry traces of admin calls and of some decisions; off without an endpoint."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+",
        description="OTLP collector for gRPC, as in http://127.0.0.1:4317; none = no traces",
    )
    decisions_share: float = Field(default=0.001, ge=0, le=1, description="share of the decisions traced")
    queue_spans: int = Field(
        default=2048, ge=1, le=1_000_000, description="spans that may wait for the collector"
    )


class TlsConfig(_Section):
    """``[tls]``: files in PEM for every TCP address, read anew where they change; none = no TLS."""

    certificate: str = Field(
        min_length=1, description="file of the sidecar's certificate, and those above it"
    )
    key: str = Field(min_length=1, description="file of its key, without a password")
    client_ca: str | None = Field(
        default=None,
        min_length=1,
        description="file of the authorities that sign clients' certificates: mutual TLS",
    )


class ServeConfig(_Section):
    """All that ``specgov serve`` can be told."""

    listen: str | None = Field(
        default=None,
        min_length=1,
        description="unix:///PATH or HOST:PORT; none = specgov.sock in the runtime folder",
    )
    socket_group: str | None = Field(
        default=None, min_length=1, description="group that may use the socket too (0660 instead of 0600)"
    )
    admin_listen: str | None = Field(
        default=None,
        min_length=1,
        description="unix:///PATH or HOST:PORT of the admin service; none = where the engines connect",
    )
    admin_socket_group: str | None = Field(
        default=None, min_length=1, description="group that may use the socket of admin_listen too"
    )
    admin_token_file: str | None = Field(
        default=None,
        min_length=1,
        description="file of tokens, one a line, of which the admin service wants one; none = it wants none",
    )
    insecure: bool = Field(
        default=False, description="let HOST:PORT be without TLS: whoever reaches it may use it"
    )
    tls: TlsConfig | None = None
    policy: str = Field(
        default=DEFAULT_POLICY, description="policy of engines that get no other, as in threshold:32:3"
    )
    profile: str = Field(
        default=AUTO,
        description="step-time profile where an engine names none: a name, a file, none, or auto = the "
        "bundled one of its GPU and model, if any",
    )
    mode: Literal["active", "shadow", "frozen", "off"] = Field(
        default="active", description="mode of new engines"
    )
    max_streams: int = Field(default=128, ge=1, le=4096, description="engines connected at the same time")
    max_watchers: int = Field(default=8, ge=1, le=256, description="watch streams at the same time")
    max_engines: int = Field(default=1024, ge=1, le=100_000, description="engines whose state is remembered")
    max_reports_per_s: int = Field(
        default=MAX_MESSAGES_PER_S,
        ge=1,
        le=1_000_000,
        description="messages that one engine may send in a second; twice as many at once",
    )
    ttl_steps: int = Field(default=50, ge=1, le=1_000_000, description="steps for which a decision holds")
    ttl_ms: int = Field(
        default=1000, ge=1, le=3_600_000, description="milliseconds for which a decision holds"
    )
    seed: int = Field(default=0, ge=0, description="seed of the policies' randomness")
    metrics: str | None = Field(
        default=None, min_length=1, description="HOST:PORT of the Prometheus endpoint"
    )
    guard: GuardConfig = GuardConfig()
    decision_log: DecisionLogConfig = DecisionLogConfig()
    state: StateConfig = StateConfig()
    bundles: BundlesConfig = BundlesConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()

    @field_validator("policy")
    @classmethod
    def _policy_exists(cls, text: str) -> str:
        parse_policy(text)
        return text

    @field_validator("profile")
    @classmethod
    def _profile_can_be_read(cls, name: str) -> str:
        if name not in (AUTO, NO_PROFILE):
            cached_profile(name)
        return name

    @field_validator("listen", "admin_listen", "metrics")
    @classmethod
    def _address_is_one(cls, text: str | None, info: ValidationInfo) -> str | None:
        parse = parse_tcp_address if info.field_name == "metrics" else parse_address
        try:
            if text is not None:
                parse(text)
        except ListenError as error:
            raise ValueError(str(error)) from error
        return text

    @model_validator(mode="after")
    def _addresses_go_together(self) -> ServeConfig:
        if self.admin_listen is not None and self.admin_listen == self.listen:
            raise ValueError(
                f"admin_listen {self.admin_listen}: the same as listen; without it both services are there"
            )
        for key in ("listen", "admin_listen"):
            text = getattr(self, key)
            address = None if text is None else parse_address(text)
            if not isinstance(address, TcpAddress) or self.tls is not None:
                continue
            if not self.insecure:
                raise ValueError(
                    f"{key} {text}: TCP needs TLS (--tls-certificate and --tls-key), or --insecure if "
                    "whoever reaches it may change the engines' speed; on one machine use a unix socket"
                )
            has_admin = key == "admin_listen" or self.admin_listen is None
            if has_admin and self.admin_token_file is not None and not is_loopback(address.host):
                raise ValueError(
                    f"{key} {text}: tokens would travel in clear text: use TLS, or a unix socket or loopback "
                    "address as admin_listen"
                )
        return self


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> ServeConfig:
    """The configuration in the file ``path`` (None = defaults), with ``overrides`` over it.

    ``overrides`` has dotted keys, as in ``{"policy": "static:3", "log.level": "debug"}``; None is none.

    Raises:
        ConfigError: the file cannot be read or parsed, or a key or value is wrong.

    """
    text = "" if path is None else _read(Path(path))
    tables = _parse(text, path)
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    for key, value in given.items():
        _set(tables, key, value)
    try:
        return ServeConfig.model_validate(tables)
    except ValidationError as error:
        problems = (_problem(dict(detail), text, path, given) for detail in error.errors())
        raise ConfigError("\n".join(problems)) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _parse(text: str, path: str | Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _set(tables: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, key = dotted.split(".")
    for parent in parents:
        child = tables.setdefault(parent, {})
        if not isinstance(child, dict):
            return  # the file holds something else in the table's place, which the validation will name
        tables = child
    tables[key] = value


def _problem(detail: dict[str, Any], text: str, path: str | Path | None, overrides: Mapping[str, Any]) -> str:
    keys = [str(part) for part in detail["loc"]]
    dotted = ".".join(keys)
    message = detail["msg"].removeprefix("Value error, ")
    if not keys:  # it is about several, and says which
        return message if path is None else f"{path}: {message}"
    if detail["type"] == "extra_forbidden":
        message = _unknown_key(keys)
    elif detail["type"] == "missing":
        message = f"is missing: give it, or leave {keys[0]} out"
    elif detail["type"] != "value_error":
        message = f"{message}, not {detail['input']!r}"
    if dotted in overrides:
        option = dotted.removesuffix(".path").replace("_", "-").replace(".", "-")
        return f"option --{option}: {message}"
    if path is None:  # an option left out that another one needs
        return f"{dotted}: {message}"
    line = line_of_key(text, keys)
    return f"{path}{'' if line is None else f', line {line}'}: {dotted}: {message}"


def _unknown_key(keys: list[str]) -> str:
    """What there is instead, and what was probably meant."""
    known = _known_keys(keys[:-1])
    message = f"unknown key: there are {', '.join(known)}"
    if len(keys) > 1 and keys[-1] in ServeConfig.model_fields:
        return f"{message}; {keys[-1]} belongs above the first [table] of the file"
    close = difflib.get_close_matches(keys[-1], known, n=1)
    return f"{message}; did you mean {close[0]}?" if close else message


def _known_keys(tables: list[str]) -> list[str]:
    """The keys that a table takes, by the names of the tables on the way to it."""
    section: type[BaseModel] = ServeConfig
    path = iter(tables)
    for table in path:
        annotation = section.model_fields[table].annotation
        if get_origin(annotation) is dict:  # tables by names of the user's
            next(path, None)
        kinds = (annotation, *get_args(annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is None:
            return []
        section = inner
    return list(section.model_fields)


def line_of_key(text: str, keys: list[str]) -> int | None:
    """The line (from 1) on which a key stands in a TOML text, failing that its table's; None without both."""
    table: list[str] = []
    table_line = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = _split_key(header[1])
            if table == keys[: len(table)]:
                table_line = number
            if table == keys:
                return number
        elif (key := re.match(r"\s*((?:[\w.\- ]|\"[^\"]*\"|'[^']*')+?)\s*=", line)) and (
            (full := table + _split_key(key[1])) == keys
            or (len(full) < len(keys) and full == keys[: len(full)])
        ):
            return number
    return table_line


def _split_key(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]
