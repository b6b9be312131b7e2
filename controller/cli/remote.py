"""Talking to a running sidecar: channel, errors as one line, messages as plain values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import grpc
import tyro
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specgov.client.errors import ClientError
from specgov.client.tls import TlsFiles, is_unix, may_not_open, open_channel, tls_from_environment
from specgov.controller.cli.errors import CliError, UnreachableError, UsageError
from specgov.controller.listen import ListenError, TcpAddress, default_folder, is_loopback, parse_address

TIMEOUT_S = 5.0
"""How long a question may take before the sidecar counts as unreachable."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""As much as a sidecar sends: its engines, with all that they say of themselves."""
TARGET_VARIABLE = "SPECGOV_TARGET"
"""Where a sidecar listens; the plugin reads it too."""
TOKEN_VARIABLE = "SPECGOV_TOKEN_FILE"  # noqa: S105 the name of a variable
"""Names a file whose first line is the token for the admin service; never the token itself."""

Target = Annotated[str | None, tyro.conf.arg(metavar="unix:///PATH|HOST:PORT", help_behavior_hint="")]
"""Where a sidecar listens; None is what the environment says, else its own default socket."""


def target_or_default(target: str | None) -> str:
    """``target``, else ``SPECGOV_TARGET``, else the socket on which ``specgov serve`` listens by default."""
    if target is not None:
        return target
    return os.environ.get(TARGET_VARIABLE, "").strip() or f"unix://{default_folder()}/specgov.sock"


def grpc_target(target: str) -> str:
    """``target`` as gRPC names it; a plain path is a unix socket too.

    Raises:
        UsageError: it is neither a socket's path nor HOST:PORT.

    """
    try:
        return str(parse_address(f"unix:{target}" if target.startswith(("/", ".")) else target))
    except ListenError as error:
        raise UsageError(f"--target (or {TARGET_VARIABLE}) {error}") from error


@contextlib.contextmanager
def sidecar(target: str) -> Iterator[grpc.Channel]:
    """A channel to the sidecar at ``target``, closed at the end.

    The environment says what the channel needs: ``SPECGOV_TLS_CA`` and its kind for a ``HOST:PORT`` with TLS,
    ``SPECGOV_TOKEN_FILE`` for a sidecar that wants a token.

    Raises:
        UnreachableError: nothing answers, or not in time.
        UsageError: the sidecar says that the question is wrong.
        CliError: any other answer that is no answer.

    """
    address = grpc_target(target)
    tls = tls_files()
    token = _token(os.environ, address, tls)
    try:
        channel = open_channel(address, tls, (("grpc.max_receive_message_length", MAX_ANSWER_BYTES),))
    except ClientError as error:
        raise UsageError(str(error)) from error
    with channel:
        try:
            yield channel if token is None else grpc.intercept_channel(channel, _BringToken(token))
        except grpc.RpcError as error:
            raise _translate(error, target, tls is not None) from error


def tls_files() -> TlsFiles | None:
    """The files for TLS that the environment names.

    Raises:
        UsageError: some are named and others that they need are not.

    """
    try:
        return tls_from_environment(os.environ)
    except ClientError as error:
        raise UsageError(str(error)) from error


def _token(environment: Mapping[str, str], address: str, tls: TlsFiles | None) -> str | None:
    """The first line of the file of the token; None where none is named."""
    path = environment.get(TOKEN_VARIABLE, "").strip()
    if not path:
        return None
    parsed = parse_address(address)
    if isinstance(parsed, TcpAddress) and tls is None and not is_loopback(parsed.host):
        raise UsageError(
            f"{TOKEN_VARIABLE}: a token would go to {address} in clear text: set SPECGOV_TLS_CA for TLS"
        )
    try:
        lines = Path(path).read_text(encoding="ascii").split()
    except OSError as error:
        raise UsageError(f"{TOKEN_VARIABLE}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"{TOKEN_VARIABLE}: {path} holds no token") from None
    if not lines:
        raise UsageError(f"{TOKEN_VARIABLE}: {path} is empty")
    return lines[0]


class _BringToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the token to each call."""

    def __init__(self, token: str) -> None:
        self._metadata = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def _with_token(self, details: Any) -> Any:
        return _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._metadata],
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )


class _Details(NamedTuple):
    """gRPC has no public class of what an interceptor must hand on."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


def require_serving(target: str) -> None:
    """Ask the sidecar's health service once.

    Raises:
        UnreachableError: nothing answers, or it is starting, stopping or stuck.

    """
    if health_status(target, "") != health_pb2.HealthCheckResponse.SERVING:
        raise UnreachableError(
            f"the sidecar at {target} is not serving: it is starting or stopping, or stuck, as its log says"
        )


def health_status(target: str, service: str) -> int:
    """What the sidecar's health service says of ``service``.

    Raises:
        UnreachableError: nothing answers.
        CliError: it knows no such service.

    """
    with sidecar(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        question = health_pb2.HealthCheckRequest(service=service)
        return int(health.Check(question, timeout=TIMEOUT_S).status)


def _translate(error: grpc.RpcError, target: str, has_tls: bool) -> CliError:
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.UNAVAILABLE and has_tls and not is_unix(grpc_target(target)):
        return UnreachableError(
            f"no sidecar answers over TLS at {target}: is one there, is its certificate signed by the "
            f"authority in SPECGOV_TLS_CA for that name (SPECGOV_TLS_SERVER_NAME), does it want a client's "
            f"(SPECGOV_TLS_CERTIFICATE, SPECGOV_TLS_KEY)? {details}"
        )
    if code is grpc.StatusCode.UNAVAILABLE and (why := may_not_open(grpc_target(target))):
        return UnreachableError(why)
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnreachableError(
            f"no sidecar answers at {target}; start one with 'specgov serve', or name another with --target"
            + ("" if is_unix(grpc_target(target)) else "; if it speaks TLS, set SPECGOV_TLS_CA")
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"the sidecar at {target} does not answer within {TIMEOUT_S:g} s")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return CliError(
            f"what answers at {target} is no Specgov sidecar, or an older one, or its admin service is "
            f"elsewhere (admin_listen): {details}"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return CliError(f"{target}: {details}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return UsageError(details)
    return CliError(f"{target}: {details} ({code.name})")


def plain(message: Message) -> dict[str, Any]:
    """A message as plain values: the protocol's names, enums as lower-case words, absent fields left out."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values[field.name] = dict(value)
        elif isinstance(value, Message | int | float | str | bytes):
            values[field.name] = _plain_value(field, value)
        else:
            values[field.name] = [_plain_value(field, item) for item in value]
    return values


def _plain_value(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return list(value)
    if field.enum_type is not None:
        return enum_word(field.enum_type.values_by_number[value].name)
    return value


def enum_word(name: str) -> str:
    """``MODE_ACTIVE`` -> ``active``."""
    return name.partition("_")[2].lower()
