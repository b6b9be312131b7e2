"""The sidecar as an object: a gRPC server with its services, health, reflection, metrics and decision log."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from wsgiref.simple_server import WSGIServer

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from specgov.controller import listen
from specgov.controller.config import ServeConfig
from specgov.controller.decision_log import DecisionLog
from specgov.controller.engines import Engines
from specgov.controller.logs import get_logger
from specgov.controller.metrics import Metrics
from specgov.controller.service import (
    HANDSHAKES,
    ControllerAdmin,
    SpeculationController,
    add_speculation_controller,
)
from specgov.controller.telemetry import Telemetry
from specgov.controller.tracing import Tracing
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
MAX_MESSAGE_BYTES = 1024 * 1024
"""Larger than any report that passes validation: 65,535 requests at 4 bytes each."""
UNARY_WORKERS = 16
"""Threads left for unary calls, health checks and reflection when every stream is taken."""
DRAIN_GRACE_S = 0.5
"""How long streams may take to end; with the log's last write the process is gone within 2 s."""


class Sidecar:
    """A sidecar in this process.

    ``start`` makes it serve and ``stop`` drains it; ``address`` and ``metrics_address`` are what it listens
    on. ``clock`` (seconds, monotonic) is what policies see.

    Raises:
        ListenError: an address cannot be listened on.
        TracingError: traces are wanted, and the extra for them is not installed.

    """

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.metrics = Metrics()
        self.decision_log = (
            None
            if config.decision_log.path is None
            else DecisionLog(config.decision_log.path, config.decision_log)
        )
        self.engines = Engines(config, clock)
        self.tracing = None if config.tracing.endpoint is None else Tracing(config.tracing)
        telemetry = Telemetry(self.metrics, self.decision_log, tracing=self.tracing)
        self.watchers = telemetry.watchers
        self._controller = SpeculationController(config, self.engines, telemetry)
        self._admin = ControllerAdmin(config, self.engines, telemetry)
        self.health = health.HealthServicer()
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._metrics_server: WSGIServer | None = None
        self.metrics.watch(
            connected_engines=lambda: self.engines.connected,
            engines_on_fallback=lambda: self.engines.on_fallback,
            log_rows_dropped=lambda: self.decision_log.rows_dropped if self.decision_log else 0,
        )
        self._server = self._make_server()
        address = listen.default_address() if config.listen is None else listen.parse_address(config.listen)
        self.address = listen.bind(
            self._server, address, socket_group=config.socket_group, allow_remote=config.allow_remote
        )
        self.metrics_address: listen.TcpAddress | None = None

    @property
    def target(self) -> str:
        """The address as a gRPC client wants it."""
        return str(self.address)

    @property
    def open_streams(self) -> int:
        """How many ``Control`` streams are open, those that have not yet said who they are included."""
        return self._controller.open_streams

    def start(self) -> None:
        """Serve.

        Raises:
            ListenError: the metrics endpoint's address cannot be listened on.

        """
        self._start_metrics()
        if self.decision_log is not None:
            self.decision_log.start()
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        get_logger().info("serving", address=str(self.address), policy=self.config.policy)

    def stop(self, grace_s: float = DRAIN_GRACE_S) -> None:
        """Drain: health says not serving, streams end with a status, the log is written.

        Takes at most half a second more than ``grace_s``.
        """
        self.health.enter_graceful_shutdown()
        self._controller.drain()
        self._admin.drain()
        stopped = self._server.stop(grace_s)
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()
        stopped.wait()
        if self.decision_log is not None:
            self.decision_log.close()
        if self.tracing is not None:
            self.tracing.close()
        get_logger().info("stopped", address=str(self.address))

    def _make_server(self) -> grpc.Server:
        config = self.config
        workers = config.max_streams + HANDSHAKES + config.max_watchers + UNARY_WORKERS
        server = grpc.server(
            futures.ThreadPoolExecutor(workers, thread_name_prefix="specgov-rpc"),
            options=[
                # Two servers on one port would each get some of the engines.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_metadata_size", 16 * 1024),
                # A peer whose machine is gone is found out; a client may ask the same of us.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ],
            maximum_concurrent_rpcs=workers,
            interceptors=() if self.tracing is None else (self.tracing.interceptor(),),
        )
        add_speculation_controller(self._controller, server)
        pb_grpc.add_ControllerAdminServicer_to_server(self._admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", *SERVICES):
            self.health.set(service, status)

    def _start_metrics(self) -> None:
        if self.config.metrics is None:
            return
        address = listen.parse_tcp_address(self.config.metrics)
        listen.check_port_is_free(address)
        self._metrics_server, _ = start_http_server(address.port, address.host, self.metrics.registry)
        self.metrics_address = listen.TcpAddress(address.host, self._metrics_server.server_port)
