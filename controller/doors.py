"""The gRPC servers of a sidecar: one door for engines and operators, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specgov.controller import listen
from specgov.controller.auth import ADMIN_SERVICE, TokenGate
from specgov.controller.calls import CallGuard
from specgov.controller.config import ServeConfig
from specgov.controller.logs import get_logger
from specgov.controller.service import (
    HANDSHAKES,
    ControllerAdmin,
    SpeculationController,
    add_speculation_controller,
)
from specgov.controller.tls import Certificates
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

ENGINE_SERVICE = pb.DESCRIPTOR.services_by_name["SpeculationController"].full_name
SERVICES = (ENGINE_SERVICE, ADMIN_SERVICE)
MAX_MESSAGE_BYTES = 1024 * 1024
"""Larger than any report that passes validation: 65,535 requests at 4 bytes each."""
LOOKAHEAD_BYTES = 8 * 1024
"""What gRPC reads ahead of a stream: some 25 reports of 64 requests. A larger message comes in parts."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Larger than all engines that are remembered by default, each with as much to say of itself as it may."""
MAX_METADATA_BYTES = 16 * 1024
UNARY_WORKERS = 16
"""Threads left for unary calls, health checks and reflection when every stream is taken."""
CONNECTIONS_PER_WORKER = 2
"""So that engines that reconnect find room beside connections whose end is not known yet."""
KEEPALIVE_MS = 30_000
PING_TIMEOUT_MS = 10_000
"""A peer that is pinged after ``KEEPALIVE_MS`` without data and does not answer in this time is gone."""


class Doors:
    """The servers, listening and not yet serving.

    ``address`` is where engines connect, ``admin_address`` where operators do: the same, unless the
    configuration has ``admin_listen``. ``pools`` are the threads that serve calls.

    Raises:
        ListenError: an address cannot be listened on.
        TlsError, TokenError: the files for TLS, or the file of tokens, cannot be used.

    """

    def __init__(
        self,
        config: ServeConfig,
        controller: SpeculationController,
        admin: ControllerAdmin,
        health_servicer: health.HealthServicer,
        *,
        on_refused: Callable[[], object],
        interceptors: Sequence[grpc.ServerInterceptor] = (),
    ) -> None:
        self._servers: list[grpc.Server] = []
        self.pools: list[futures.Executor] = []
        self._sockets: dict[Path, tuple[int, int] | None] = {}
        self._certificates = None if config.tls is None else Certificates(config.tls)
        self._gate = (
            None if config.admin_token_file is None else TokenGate(config.admin_token_file, on_refused)
        )
        self._calls = CallGuard(exempt=frozenset((f"/{ENGINE_SERVICE}/Control",)))
        # The outermost first: what the others make of a handler is guarded too.
        self._interceptors = [self._calls, *(() if self._gate is None else (self._gate,)), *interceptors]
        apart = config.admin_listen is not None
        stream_workers = config.max_streams + HANDSHAKES
        admin_workers = config.max_watchers + UNARY_WORKERS
        engines = self._make(stream_workers + (UNARY_WORKERS if apart else admin_workers), health_servicer)
        add_speculation_controller(controller, engines)
        operators = self._make(admin_workers, health_servicer) if apart else engines
        pb_grpc.add_ControllerAdminServicer_to_server(admin, operators)
        shown = (ADMIN_SERVICE,) if apart else SERVICES
        reflection.enable_server_reflection((*shown, health.SERVICE_NAME, reflection.SERVICE_NAME), operators)
        try:
            address = (
                listen.default_address() if config.listen is None else listen.parse_address(config.listen)
            )
            self.address = self._bind(engines, address, config.socket_group)
            self.admin_address = self.address
            if config.admin_listen is not None:
                address = listen.parse_address(config.admin_listen)
                self.admin_address = self._bind(operators, address, config.admin_socket_group)
        except BaseException:
            self.abandon()
            raise
        self._warn_of_strangers(config)

    def start(self) -> None:
        """Serve."""
        for server in self._servers:
            server.start()

    def stop(self, grace_s: float) -> Callable[[], None]:
        """Begin to stop; calls have ``grace_s`` to end. What is returned waits until they have."""
        with listen.spared(path for path, made in self._sockets.items() if _is_lost(path, made)):
            stopped = [server.stop(grace_s) for server in self._servers]

        def wait() -> None:
            for event in stopped:
                event.wait()

        return wait

    def abandon(self) -> None:
        """Leave nothing behind of servers that never started: gRPC keeps their sockets' files."""
        self.stop(0.0)()
        for path, made in self._sockets.items():
            if not _is_lost(path, made):
                path.unlink(missing_ok=True)

    def check(self) -> None:
        """Cut the calls whose request does not come; to be called once a second."""
        self._calls.check()

    def lost_sockets(self) -> list[str]:
        """The sockets whose file is gone or another's: nobody new can connect there, ever."""
        return [str(path) for path, made in self._sockets.items() if _is_lost(path, made)]

    def refresh(self) -> None:
        """Take certificates and tokens that have changed; the old ones hold where the new cannot be used."""
        if self._certificates is not None:
            self._certificates.refresh()
        if self._gate is not None:
            self._gate.refresh()

    def _make(self, workers: int, health_servicer: health.HealthServicer) -> grpc.Server:
        pool = futures.ThreadPoolExecutor(workers, thread_name_prefix="specgov-rpc")
        self.pools.append(pool)
        server = grpc.server(
            pool,
            interceptors=self._interceptors,
            options=_options(workers),
            maximum_concurrent_rpcs=workers,
        )
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        self._servers.append(server)
        return server

    def _bind(self, server: grpc.Server, address: listen.Address, group: str | None) -> listen.Address:
        credentials = None if self._certificates is None else self._certificates.credentials()
        bound = listen.bind(server, address, socket_group=group, credentials=credentials)
        if isinstance(bound, listen.UnixAddress):
            self._sockets[bound.path] = listen.file_id(bound.path)
        return bound

    def _warn_of_strangers(self, config: ServeConfig) -> None:
        """Name each TCP address at which a peer need not prove who it is, and what it can do there."""
        if config.tls is not None and config.tls.client_ca is not None:
            return
        for address in dict.fromkeys((self.address, self.admin_address)):
            open_to = []
            if address == self.address:
                open_to.append("change engines' speed")
            if address == self.admin_address and config.admin_token_file is None:
                open_to.append("use the admin service")
            if isinstance(address, listen.TcpAddress) and open_to:
                get_logger().warning(
                    "anyone who reaches this address may use it; see tls.client_ca and admin_token_file",
                    address=str(address),
                    may=" and ".join(open_to),
                )


def _is_lost(path: Path, made: tuple[int, int] | None) -> bool:
    try:
        return listen.file_id(path) != made
    except OSError:  # it may be there, or not
        return False


def _options(workers: int) -> Sequence[tuple[str, int]]:
    return [
        # Two servers on one port would each get some of the engines.
        ("grpc.so_reuseport", 0),
        # What cannot be taken in as fast is to wait with the engine's client, which drops the oldest.
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", workers),  # of one connection
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_PER_WORKER * workers),
        # A peer whose machine is gone is found out, also on a stream that is silent for hours; a client may
        # ask the same of us. gRPC goes by the second limit, and without it waits for a minute.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # Connections that never come to a call.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 600_000),
    ]
