"""The two gRPC services: each method turns a call into one of ours, and our errors into a status."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc

from specgov.controller.admin_policies import PolicyAdmin
from specgov.controller.config import ServeConfig
from specgov.controller.decide import decide
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.logs import get_logger
from specgov.controller.session import Session, SessionEnded
from specgov.controller.telemetry import Telemetry
from specgov.controller.validation import RejectedMessage, read_message
from specgov.controller.watch import Watcher
from specgov.policies.profile import ProfileError
from specgov.policies.types import PolicyError
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

DRAINING = "draining: this sidecar is being stopped"
MAX_DETAILS_CHARS = 600
"""Longest message of a status: a client takes 8 KiB, and a character may become 12 bytes on the wire."""

MAX_TRIALS = 2
"""Questions that name a policy answered at the same time: they take turns with the decisions of engines."""
HANDSHAKES = 16
"""Streams above the limit of engines that may be open at the same time, for some that take engines over."""


def add_speculation_controller(controller: SpeculationController, server: grpc.Server) -> None:
    """Serve ``controller``; bytes that are no message are rejected by their stream and do not end it."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Control": grpc.stream_stream_rpc_method_handler(
            controller.Control,
            request_deserializer=read_message,
            response_serializer=pb.Decision.SerializeToString,
        ),
        "Decide": grpc.unary_unary_rpc_method_handler(
            controller.Decide,
            request_deserializer=pb.DecideRequest.FromString,
            response_serializer=pb.Decision.SerializeToString,
        ),
    }
    name = pb.DESCRIPTOR.services_by_name["SpeculationController"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))


class SpeculationController(pb_grpc.SpeculationControllerServicer):
    """Streams of engines, and single questions."""

    def __init__(self, config: ServeConfig, engines: Engines, telemetry: Telemetry) -> None:
        self._config = config
        self._engines = engines
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._trials = threading.BoundedSemaphore(MAX_TRIALS)
        self._sessions: set[Session] = set()
        self._draining = False

    def Control(  # noqa: N802 the protocol's name
        self, request_iterator: Iterator[pb.EngineMessage | RejectedMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.Decision]:
        """One engine's stream."""
        session = Session(
            self._engines,
            self._telemetry,
            self._config.max_reports_per_s,
            cut_off=lambda: self._cut(session, context),
        )
        try:
            self._open(session, context)
            threading.Thread(
                target=session.read, args=(request_iterator,), name="specgov-reader", daemon=True
            ).start()
            yield from session.run()
        except SessionEnded as ended:
            _abort(context, ended.code, ended.details)
        finally:
            self._close(session)

    def Decide(self, request: pb.DecideRequest, context: grpc.ServicerContext) -> pb.Decision:  # noqa: N802
        """One question; one that names a policy takes a core for up to a second or two, so few go at once."""
        asks_policy = bool(request.policy)
        if asks_policy and not self._trials.acquire(blocking=False):
            _abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_TRIALS} questions to a policy are being answered, which is the limit: ask again",
            )
        try:
            return decide(request, self._config, self._engines.bundles)
        except (RejectedMessage, PolicyError) as error:
            if isinstance(error, RejectedMessage):
                self._telemetry.rejected(error.cause)
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ProfileError as error:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            if asks_policy:
                self._trials.release()

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The streams that are open."""
        with self._lock:
            return tuple(self._sessions)

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return len(self._sessions)

    def drain(self) -> None:
        """End all streams, and refuse new ones."""
        with self._lock:
            self._draining = True
            sessions = tuple(self._sessions)
        for session in sessions:
            session.end(grpc.StatusCode.UNAVAILABLE, DRAINING)

    def _open(self, session: Session, context: grpc.ServicerContext) -> None:
        with self._lock:
            if self._draining:
                raise SessionEnded(grpc.StatusCode.UNAVAILABLE, DRAINING)
            if len(self._sessions) >= self._config.max_streams + HANDSHAKES:
                raise SessionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are open")
            self._sessions.add(session)
        # The stream's thread may be asleep when the connection goes: this wakes it, and frees the engine.
        if not context.add_callback(lambda: self._close(session)):
            raise SessionEnded(grpc.StatusCode.CANCELLED, "the stream ended before it began")

    def _cut(self, session: Session, context: grpc.ServicerContext) -> None:
        """End a stream whose peer takes nothing.

        Its place is free at once: where not even the end can be written, gRPC keeps the call and its thread
        until the connection is gone.
        """
        context.cancel()
        self._close(session)

    def _close(self, session: Session) -> None:
        with self._lock:
            self._sessions.discard(session)
        session.leave()
        session.end(grpc.StatusCode.CANCELLED, "the stream ended")


class ControllerAdmin(pb_grpc.ControllerAdminServicer):
    """For operators."""

    def __init__(self, config: ServeConfig, engines: Engines, telemetry: Telemetry) -> None:
        self._config = config
        self._engines = engines
        self._telemetry = telemetry
        self._policies = PolicyAdmin(engines, _abort)

    def ListEngines(  # noqa: N802
        self,
        request: pb.ListEnginesRequest,  # noqa: ARG002 it is empty
        context: grpc.ServicerContext,  # noqa: ARG002 nothing can go wrong
    ) -> pb.ListEnginesResponse:
        """All engines that are known."""
        response = pb.ListEnginesResponse()
        for engine in self._engines.all():
            with engine.lock:
                response.engines.append(engine.state())
        return response

    def GetEngine(  # noqa: N802
        self, request: pb.GetEngineRequest, context: grpc.ServicerContext
    ) -> pb.GetEngineResponse:
        """One engine, its last decisions and what its rule believes."""
        engine = self._engine(request.engine_id, context)
        with engine.lock:
            return pb.GetEngineResponse(
                engine=engine.state(),
                last_decisions=engine.last_decisions,
                estimates=engine.estimates(),
            )

    def SetMode(self, request: pb.SetModeRequest, context: grpc.ServicerContext) -> pb.SetModeResponse:  # noqa: N802
        """Change an engine's mode; a new decision follows at once."""
        engine = self._engine(request.engine_id, context)
        if request.mode not in pb.Mode.values() or request.mode == pb.MODE_UNSPECIFIED:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"there is no mode {request.mode}")
        with engine.lock:
            before, engine.mode = engine.mode, request.mode
            state = engine.refreshed()
        get_logger().info(
            "mode set",
            engine_id=request.engine_id,
            mode=_mode_word(request.mode),
            mode_before=_mode_word(before),
        )
        return pb.SetModeResponse(engine=state)

    def SetPolicy(self, request: pb.SetPolicyRequest, context: grpc.ServicerContext) -> pb.SetPolicyResponse:  # noqa: N802
        """Give an engine another rule; a new decision follows at once."""
        return self._policies.set_policy(request, context)

    def RollBackPolicy(  # noqa: N802
        self, request: pb.RollBackPolicyRequest, context: grpc.ServicerContext
    ) -> pb.RollBackPolicyResponse:
        """Return to the policy before."""
        return self._policies.roll_back(request, context)

    def SetCanary(self, request: pb.SetCanaryRequest, context: grpc.ServicerContext) -> pb.SetCanaryResponse:  # noqa: N802
        """Begin or end a canary."""
        return self._policies.set_canary(request, context)

    def ListBundles(  # noqa: N802
        self,
        request: pb.ListBundlesRequest,  # noqa: ARG002 it is empty
        context: grpc.ServicerContext,  # noqa: ARG002 nothing can go wrong
    ) -> pb.ListBundlesResponse:
        """The bundles in the store."""
        return self._policies.list_bundles()

    def UseBundle(self, request: pb.UseBundleRequest, context: grpc.ServicerContext) -> pb.UseBundleResponse:  # noqa: N802
        """Let engines try a bundle of the store."""
        return self._policies.use_bundle(request, context)

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.StepSummary]:  # noqa: N802
        """Steps as they are reported."""
        watcher = Watcher(request.engine_id, request.every_steps, context.cancel)
        if not self._telemetry.watchers.add(watcher, self._config.max_watchers):
            _abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._config.max_watchers} watch streams are open, which is the limit (max_watchers)",
            )
        context.add_callback(watcher.end)
        try:
            yield from watcher.run()
        finally:
            self._telemetry.watchers.remove(watcher)
            if watcher.too_slow:
                self._telemetry.metrics.watchers_dropped.inc()
        if watcher.too_slow:
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "this watcher reads too slowly")
        _abort(context, grpc.StatusCode.UNAVAILABLE, DRAINING)

    def drain(self) -> None:
        """End all watch streams."""
        for watcher in self._telemetry.watchers.all:
            watcher.end()

    def _engine(self, engine_id: str, context: grpc.ServicerContext) -> Engine:
        engine = self._engines.get(engine_id)
        if engine is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, self._engines.no_such(engine_id))
        return engine


def _mode_word(mode: pb.Mode.ValueType) -> str:
    return pb.Mode.Name(mode).removeprefix("MODE_").lower()


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    """End the call with a status; of long details the middle is left out."""
    if len(details) > MAX_DETAILS_CHARS:
        half = MAX_DETAILS_CHARS // 2
        details = f"{details[:half]} ... {details[-half:]}"
    context.abort(code, details)
