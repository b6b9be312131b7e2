"""The sidecar as an object: its services behind their doors, health, metrics and decision log."""

from __future__ import annotations

import time
from collections.abc import Callable
from wsgiref.simple_server import WSGIServer

from grpc_health.v1 import health, health_pb2
from prometheus_client import start_http_server

from specgov.controller import listen
from specgov.controller.bundles import BundleWatcher
from specgov.controller.config import ServeConfig
from specgov.controller.decision_log import DecisionLog
from specgov.controller.doors import SERVICES, Doors
from specgov.controller.engines import Engines
from specgov.controller.liveness import Watchdog
from specgov.controller.logs import get_logger
from specgov.controller.metrics import Metrics
from specgov.controller.notify import ALIVE, READY, STOPPING, Notifier
from specgov.controller.service import ControllerAdmin, SpeculationController
from specgov.controller.state import StateKeeper
from specgov.controller.telemetry import Telemetry
from specgov.controller.ticker import Ticker
from specgov.controller.tracing import Tracing

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DRAIN_GRACE_S = 0.5
"""How long streams may take to end; with the log's last write the process is gone within 2 s."""
STATE_SAVE_S = 0.5
"""How long the last save may take; what is not saved by then is as it was at the save before."""


class Sidecar:
    """A sidecar in this process.

    ``start`` makes it serve and ``stop`` drains it; ``address`` and ``metrics_address`` are what it listens
    on. ``clock`` (seconds, monotonic) is what policies see.

    Raises:
        ListenError: an address cannot be listened on.
        TracingError: traces are wanted, and the extra for them is not installed.
        TlsError, TokenError: the files for TLS, or the file of tokens, cannot be used.

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
        self.keeper = (
            None
            if config.state.dir is None
            else StateKeeper(config.state, config.max_engines, self.engines.all)
        )
        self.engines.keeper = self.keeper
        self._bundle_watcher = BundleWatcher(config, self.engines.bundles, self.engines.all)
        self.tracing = None if config.tracing.endpoint is None else Tracing(config.tracing)
        telemetry = Telemetry(self.metrics, self.decision_log, tracing=self.tracing)
        self.watchers = telemetry.watchers
        self._controller = SpeculationController(config, self.engines, telemetry)
        self._admin = ControllerAdmin(config, self.engines, telemetry)
        self.health = health.HealthServicer()
        self._set_health(_NOT_SERVING)
        self._metrics_server: WSGIServer | None = None
        self.metrics.watch(
            connected_engines=lambda: self.engines.connected,
            engines_on_fallback=lambda: self.engines.on_fallback,
            engines_rolled_back=lambda: self.engines.rolled_back,
            log_rows_dropped=lambda: self.decision_log.rows_dropped if self.decision_log else 0,
            state_saves_failed=lambda: self.keeper.saves_failed if self.keeper else 0,
        )
        self._doors = Doors(
            config,
            self._controller,
            self._admin,
            self.health,
            on_refused=self.metrics.admin_refused.inc,
            interceptors=() if self.tracing is None else (self.tracing.interceptor(),),
        )
        self.address, self.admin_address = self._doors.address, self._doors.admin_address
        self.metrics_address: listen.TcpAddress | None = None
        self.watchdog = Watchdog(
            lambda: self._controller.sessions,
            self._doors.pools,
            on_change=lambda moves: self._set_health(_SERVING if moves else _NOT_SERVING),
            on_cut=self.metrics.streams_cut.inc,
            lost_sockets=self._doors.lost_sockets,
        )
        self.metrics.stuck.set_function(lambda: self.watchdog.stuck)
        self._notifier = Notifier()
        self._ticker = Ticker((self._doors.check, self.watchdog.check, self._say_alive, self._doors.refresh))

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
            ListenError: the metrics endpoint's address cannot be listened on; nothing is left behind.
            StateError: the folder of saved states is another sidecar's; nothing is left behind.
            BundleError: the configured policy is a bundle that cannot be used; nothing is left behind.

        """
        try:
            self._bundle_watcher.start()
            if self.keeper is not None:
                self.keeper.start()
            self._start_metrics()
        except BaseException:
            self._leave_nothing()
            raise
        if self.decision_log is not None:
            self.decision_log.start()
        self._doors.start()
        self._ticker.start()
        self._set_health(_SERVING)
        self._notifier.say(READY)
        get_logger().info("serving", address=str(self.address), policy=self.config.policy)

    def stop(self, grace_s: float = DRAIN_GRACE_S) -> None:
        """Drain: health says not serving, streams end with a status, the log is written.

        Takes at most a second more than ``grace_s``.
        """
        self._notifier.say(STOPPING)
        self._ticker.stop()
        self._bundle_watcher.close()
        self.health.enter_graceful_shutdown()
        self._controller.drain()
        self._admin.drain()
        wait_until_stopped = self._doors.stop(grace_s)
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()
        wait_until_stopped()
        if self.keeper is not None:
            self.keeper.close(STATE_SAVE_S)
        if self.decision_log is not None:
            self.decision_log.close()
        if self.tracing is not None:
            self.tracing.close()
        get_logger().info("stopped", address=str(self.address))

    def _leave_nothing(self) -> None:
        """After a start that failed: no socket, no hold on the state's folder, no thread."""
        self._doors.abandon()
        self._bundle_watcher.close()
        if self.keeper is not None:
            self.keeper.close(STATE_SAVE_S)
        if self.tracing is not None:
            self.tracing.close()

    def _say_alive(self) -> None:
        if not self.watchdog.stuck:
            self._notifier.say(ALIVE)

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
