"""Run a sidecar in this process until a signal ends it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from specgov.controller import logs
from specgov.controller.auth import TokenError
from specgov.controller.config import ServeConfig
from specgov.controller.decision_log import DecisionLogError
from specgov.controller.listen import ListenError
from specgov.controller.server import Sidecar
from specgov.controller.state import StateError
from specgov.controller.tls import TlsError
from specgov.policies.bundle import BundleError

EXIT_FAILED = 1


def serve(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT, then end the process; returns an exit code only where it cannot serve.

    Wants the main thread, for the signals. A second signal ends the process at once.
    """
    logs.configure(config.log)
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        sidecar = Sidecar(config)
        sidecar.start()
        while not stop.wait(3600.0):
            pass
        sidecar.stop()
        _end_process()
    except (ListenError, BundleError, DecisionLogError, StateError, TlsError, TokenError) as error:
        print(f"specgov: {error}", file=sys.stderr)  # noqa: T201 what the user sees, whatever the log's format is
        return EXIT_FAILED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_process() -> NoReturn:
    """Exit with 0 at once: all is written and closed by now.

    The interpreter's own end takes up to a second on a busy machine, and may wait for threads of gRPC's.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)
