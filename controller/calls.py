"""What every call but the engines' streams goes through before the service that it is for.

gRPC for Python gives a call a thread before its request has come, and waits for it without end: calls that
are opened and never sent would take all threads. Here a call whose request does not come is cut. And bytes
that are no message, and methods that are not implemented, are refused with a status; gRPC would write a
traceback to the log for each.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specgov.controller.logs import get_logger

UNSENT_ROUNDS = 5
"""Rounds (of ``check``, one a second) for which a call may wait for a request. Fewer than those for which the
watchdog bears a pool without a free thread."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that are no message, in the place of one."""

    problem: str


class CallGuard(grpc.ServerInterceptor):
    """Cuts calls whose request does not come, and refuses those whose request cannot be read.

    Args:
        exempt: full methods that look after themselves, as in ``/package.Service/Method``.

    """

    def __init__(self, exempt: frozenset[str]) -> None:
        self._exempt = exempt
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[grpc.ServicerContext, int]] = {}
        self._round = 0
        self._numbers = itertools.count()

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, guarded."""
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method in self._exempt:
            return handler
        make, behavior = _kind_of(handler)
        guarded = self._each_in_time(behavior) if handler.request_streaming else self._one_in_time(behavior)
        return make(guarded, _lenient(handler.request_deserializer), handler.response_serializer)

    def check(self) -> None:
        """One round: cut the calls that have waited too long."""
        with self._lock:
            self._round += 1
            late = [n for n, (_, since) in self._waiting.items() if self._round - since >= UNSENT_ROUNDS]
            contexts = [self._waiting.pop(number)[0] for number in late]
        for context in contexts:
            context.cancel()
        if contexts:
            get_logger().warning("calls cut: their requests did not come", calls=len(contexts))

    def _one_in_time(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        """Call ``behavior`` with the only request, which must come in time."""

        def behave(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            try:
                request = next(self._in_time(requests, context))
            except StopIteration:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
            try:
                return behavior(request, context)
            except NotImplementedError:  # what the health service of gRPC's has of a method that it lacks
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "the method is not implemented")

        return behave

    def _each_in_time(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        """Call ``behavior`` with requests of which each must come in time."""

        def behave(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            return behavior(self._in_time(requests, context), context)

        return behave

    def _in_time(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """The requests; the call is cut where one does not come, and ended where one cannot be read."""
        while True:
            with self._lock:
                number = next(self._numbers)
                self._waiting[number] = context, self._round
            try:
                request = next(requests, None)
            finally:
                with self._lock:
                    self._waiting.pop(number, None)
            if request is None:
                return
            if isinstance(request, Unreadable):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.problem)
            yield request


def _kind_of(handler: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What makes a handler that takes a stream of requests and answers as this one, and its behaviour.

    On the wire a single request is a stream of one.
    """
    if handler.response_streaming:
        make: Callable[..., Any] = grpc.stream_stream_rpc_method_handler
        return make, handler.stream_stream if handler.request_streaming else handler.unary_stream
    return grpc.stream_unary_rpc_method_handler, (
        handler.stream_unary if handler.request_streaming else handler.unary_unary
    )


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """The deserializer, which gives ``Unreadable`` where it would raise."""
    if deserializer is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return Unreadable(f"{len(data)} bytes that are no request of this method: {error}")

    return read
