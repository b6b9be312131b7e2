"""Calls whose request does not come, or cannot be read."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from specgov.controller.calls import UNSENT_ROUNDS, CallGuard
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]

WORKERS = 2
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
WAIT_S = 60.0


@pytest.fixture
def guard() -> CallGuard:
    return CallGuard(frozenset())


@pytest.fixture
def channel(guard: CallGuard) -> Iterator[grpc.Channel]:
    """To a server of two threads behind the guard, with health and reflection."""
    server = grpc.server(futures.ThreadPoolExecutor(WORKERS), interceptors=[guard])
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((reflection.SERVICE_NAME,), server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    with grpc.insecure_channel(f"localhost:{port}") as channel:
        yield channel
    server.stop(0).wait()


def serves(channel: grpc.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("path", [CHECK, REFLECTION])
def test_calls_that_send_nothing_are_cut_and_leave_their_threads_to_others(
    guard: CallGuard, channel: grpc.Channel, eventually: Callable[..., None], path: str
) -> None:
    """Two silent calls hold both threads; those are free after as many rounds as a call may wait."""
    never: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    silent = [channel.stream_stream(path)(iter(never.get, None), timeout=WAIT_S) for _ in range(WORKERS)]
    eventually(lambda: len(guard._waiting) == WORKERS, "the silent calls' start")
    for _ in range(UNSENT_ROUNDS - 1):
        guard.check()
    assert all(call.is_active() for call in silent)
    guard.check()
    for call in silent:
        assert call.code() == grpc.StatusCode.CANCELLED
    assert serves(channel)


def test_a_stream_of_questions_may_wait_for_each_of_them(guard: CallGuard, channel: grpc.Channel) -> None:
    """What counts is the time since the last answer: this takes more rounds than a call may wait."""
    questions: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = channel.stream_stream(
        REFLECTION,
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter(questions.get, None), timeout=WAIT_S)
    for _ in range(3):
        questions.put(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert next(call).list_services_response.service[0].name == reflection.SERVICE_NAME
        for _ in range(UNSENT_ROUNDS - 1):
            guard.check()
    questions.put(None)
    assert list(call) == []
    assert guard._waiting == {}


def test_a_call_without_a_request(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        channel.stream_unary(CHECK)(iter(()), timeout=WAIT_S)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "the call has no request"


def test_a_method_that_is_not_implemented(channel: grpc.Channel, caplog: pytest.LogCaptureFixture) -> None:
    """The health service of gRPC's names one that it lacks; a traceback for each call would fill the log."""
    with caplog.at_level(logging.DEBUG), pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/grpc.health.v1.Health/List")(b"", timeout=WAIT_S)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert not [record for record in caplog.records if record.exc_info]


METHODS = [
    method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe\x0f"])
def test_bytes_that_are_no_request(
    start: Make, caplog: pytest.LogCaptureFixture, method: Any, data: bytes
) -> None:
    """A varint without an end, and a tag of a kind that there is not: a status, and nothing in the log."""
    channel = start().channel
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    with caplog.at_level(logging.DEBUG), pytest.raises(grpc.RpcError) as raised:
        list(kind(path)(data, timeout=WAIT_S))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"{len(data)} bytes that are no request of this method" in raised.value.details()
    assert not [record for record in caplog.records if record.exc_info]
