"""What the sidecar looks after once a second, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from specgov.controller.logs import get_logger

TICK_S = 1.0


class Ticker:
    """Calls each of ``duties`` every ``tick_s`` seconds; one that raises is logged and called again."""

    def __init__(self, duties: Sequence[Callable[[], object]], tick_s: float = TICK_S) -> None:
        self._duties = duties
        self._tick_s = tick_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specgov-ticker", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after a call that is under way; may be called more than once."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def tick(self) -> None:
        """Call each once."""
        for duty in self._duties:
            try:
                duty()
            except Exception as error:  # noqa: BLE001 - the others, and the next time, count more
                get_logger().error("a regular duty failed", exc_info=error)

    def _run(self) -> None:
        while not self._stop.wait(self._tick_s):
            self.tick()
