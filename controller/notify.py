"""What the sidecar tells systemd, as sd_notify(3) has it: that it serves, that it lives, that it stops.

Outside of a service of ``Type=notify`` there is no ``NOTIFY_SOCKET``, and nothing is said.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

READY = "READY=1"
ALIVE = "WATCHDOG=1"
STOPPING = "STOPPING=1"


class Notifier:
    """Sends to the datagram socket that ``NOTIFY_SOCKET`` names; never waits and never raises."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name  # @ = Linux' abstract namespace

    def say(self, state: str) -> None:
        """Send one of the states above."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), self._address)
