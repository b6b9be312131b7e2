"""The plugin's settings, from environment variables and the file that ``SPECGOV_CONFIG`` names.

Each setting has the variable ``SPECGOV_<NAME>``; the file is TOML with the same names in lower case. A
variable that is set counts before the file. Every tensor-parallel rank must be started with the same
settings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specgov.client.client import check_target
from specgov.client.errors import ClientError
from specgov.client.tls import TlsFiles
from specgov.policies.registry import parse_policy
from specgov.policies.types import PolicyError
from specgov.sglang_plugin.errors import PluginError

CLIENTS = ("relay", "thread")
MODES = ("active", "shadow", "off")
FALLBACKS = ("static", "threshold", "ema")
PREFIX = "SPECGOV_"
CONFIG_VARIABLE = "SPECGOV_CONFIG"
TARGET_VARIABLE = "SPECGOV_TARGET"
DEFAULT_FALLBACK_BATCH_SIZE = 32
DEFAULT_FALLBACK_NUM_STEPS = 3
_MAX_NAME_CHARS = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the plugin can be told.

    ``target``: the sidecar, ``unix:///PATH`` or ``HOST:PORT``. ``tiers``: those that may be applied, None for
    all of the server's. ``fallback``: the local rule, "" for ``threshold`` at batch size 32 with num_steps 3,
    or the nearest tiers that there are. ``mode``: active, shadow (SGLang's own rule decides and is reported)
    or off. ``engine_id``: "" for one made of host and port. ``profile``: the step-time profile that the
    sidecar starts from, "" for its own choice. ``max_errors``: exceptions after which the plugin gives up.
    ``client``: where the stream to the sidecar lives, in a process of its own (relay) or in a thread.
    ``tls_ca``, ``tls_certificate``, ``tls_key``, ``tls_server_name``: as in ``TlsFiles``, for a ``HOST:PORT``
    that wants TLS.
    """

    target: str
    tiers: tuple[int, ...] | None = None
    fallback: str = ""
    mode: str = "active"
    min_steps_between_switches: int = 1
    engine_id: str = ""
    profile: str = ""
    max_errors: int = 3
    client: str = "relay"
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_server_name: str = ""

    @property
    def tls(self) -> TlsFiles | None:
        """The files for TLS, None where none is named.

        Raises:
            ClientError: some are named and others that they need are not.

        """
        named = (self.tls_ca, self.tls_certificate, self.tls_key, self.tls_server_name)
        return TlsFiles(*named) if any(named) else None


NAMES = tuple(field.name for field in fields(Settings))


def read_settings(environment: Mapping[str, str]) -> Settings | None:
    """The settings; None where neither ``SPECGOV_TARGET`` nor ``SPECGOV_CONFIG`` is set, or the mode is off.

    Raises:
        PluginError: a value or the file cannot be used; the message names the variable or the file's key.

    """
    given: dict[str, tuple[Any, str]] = {}
    if path := environment.get(CONFIG_VARIABLE, "").strip():
        given |= {name: (value, f"{path}: {name}") for name, value in _read_file(path).items()}
    for name in NAMES:
        if text := environment.get(PREFIX + name.upper(), "").strip():
            given[name] = (text, PREFIX + name.upper())
    if not (path or "target" in given):
        return None
    values = {name: _READERS[name](value, where) for name, (value, where) in given.items()}
    if values.get("mode") == "off":
        return None
    if "target" not in values:
        raise PluginError(
            f"{path}: target is missing: name the sidecar, as in target = 'unix:///run/specgov.sock'"
        )
    settings = Settings(**values)
    try:
        _ = settings.tls
    except ClientError as error:
        raise PluginError(str(error)) from error
    return settings


def is_switched_off(environment: Mapping[str, str]) -> bool:
    """Whether settings are given, and their mode is off.

    Raises:
        PluginError: as in ``read_settings``.

    """
    given = any(environment.get(name, "").strip() for name in (CONFIG_VARIABLE, TARGET_VARIABLE))
    return given and read_settings(environment) is None


def _read_file(path: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PluginError(f"{CONFIG_VARIABLE}: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PluginError(f"{CONFIG_VARIABLE}: {path} is not TOML: {error}") from error
    if unknown := sorted(set(document) - set(NAMES)):
        raise PluginError(f"{path}: unknown key {', '.join(unknown)}: the keys are {', '.join(NAMES)}")
    return document


def _target(value: Any, where: str) -> str:
    text = _text(value, where)
    try:
        check_target(text)
    except ClientError as error:
        raise PluginError(f"{where}: {error}") from error
    return text


def _tiers(value: Any, where: str) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise PluginError(f"{where}: must list whole numbers from 0 on, as in 0,1,3, not {value!r}")
    tiers = [_whole_number(part, where, least=0) for part in parts]
    if len(set(tiers)) != len(tiers):
        raise PluginError(f"{where}: names a tier twice: {value!r}")
    return tuple(sorted(tiers))


def _fallback(value: Any, where: str) -> str:
    text = _text(value, where)
    if text.split(":")[0].strip() not in FALLBACKS:
        raise PluginError(
            f"{where}: must be one of static:K, threshold:B:K and ema, not {text!r}: ranks evaluate it alike "
            "only if it rests on the batch and the results"
        )
    try:
        parse_policy(text)
    except PolicyError as error:
        raise PluginError(f"{where}: {error}") from error
    return text


def _mode(value: Any, where: str) -> str:
    return _one_of(MODES, value, where)


def _client(value: Any, where: str) -> str:
    return _one_of(CLIENTS, value, where)


def _one_of(choices: tuple[str, ...], value: Any, where: str) -> str:
    if value not in choices:
        raise PluginError(f"{where}: must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def _name(value: Any, where: str) -> str:
    text = _text(value, where)
    if len(text) > _MAX_NAME_CHARS or not text.isprintable():
        raise PluginError(f"{where}: must be at most {_MAX_NAME_CHARS} printable characters, not {text!r}")
    return text


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise PluginError(f"{where}: must be a text, not {value!r}")
    return value


def _count(value: Any, where: str) -> int:
    return _whole_number(value, where, least=1)


def _whole_number(value: Any, where: str, least: int) -> int:
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if type(value) is not int or value < least:
        raise PluginError(f"{where}: must be a whole number from {least} on, not {value!r}")
    return value


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "target": _target,
    "tiers": _tiers,
    "fallback": _fallback,
    "mode": _mode,
    "min_steps_between_switches": _count,
    "engine_id": _name,
    "profile": _name,
    "max_errors": _count,
    "client": _client,
    "tls_ca": _text,
    "tls_certificate": _text,
    "tls_key": _text,
    "tls_server_name": _name,
}
