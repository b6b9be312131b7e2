"""Talking to a running sidecar: channel, errors as one line, messages as plain values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import grpc
import tyro
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specgov.controller.cli.errors import CliError, UnreachableError, UsageError
from specgov.controller.listen import ListenError, default_folder, parse_address

TIMEOUT_S = 5.0
"""How long a question may take before the sidecar counts as unreachable."""

Target = Annotated[str | None, tyro.conf.arg(metavar="unix:///PATH|HOST:PORT", help_behavior_hint="")]
"""Where a sidecar listens; None is its own default socket."""


def target_or_default(target: str | None) -> str:
    """``target``, or the socket on which ``specgov serve`` listens unless told otherwise."""
    return target if target is not None else f"unix://{default_folder()}/specgov.sock"


def grpc_target(target: str) -> str:
    """``target`` as gRPC names it; a plain path is a unix socket too.

    Raises:
        UsageError: it is neither a socket's path nor HOST:PORT.

    """
    try:
        return str(parse_address(f"unix:{target}" if target.startswith(("/", ".")) else target))
    except ListenError as error:
        raise UsageError(f"--target {error}") from error


@contextlib.contextmanager
def sidecar(target: str) -> Iterator[grpc.Channel]:
    """A channel to the sidecar at ``target``, closed at the end.

    Raises:
        UnreachableError: nothing answers, or not in time.
        UsageError: the sidecar says that the question is wrong.
        CliError: any other answer that is no answer.

    """
    with grpc.insecure_channel(grpc_target(target)) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise _translate(error, target) from error


def require_serving(target: str) -> None:
    """Ask the sidecar's health service once.

    Raises:
        UnreachableError: nothing answers, or it is starting or stopping.

    """
    with sidecar(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnreachableError(f"the sidecar at {target} is not serving: it is starting or stopping")


def _translate(error: grpc.RpcError, target: str) -> CliError:
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnreachableError(
            f"no sidecar answers at {target}; start one with 'specgov serve', or name another with --target"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnreachableError(f"the sidecar at {target} does not answer within {TIMEOUT_S:g} s")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return CliError(f"what answers at {target} is no Specgov sidecar, or an older one: {details}")
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
