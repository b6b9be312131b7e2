"""One stream at a time takes its mail in and decides; what comes meanwhile joins its stream's next turn.

Threads of one interpreter do not compute side by side, they only take the interpreter from each other, and
the few that read what engines send come off worst: with many streams each report then got a decision of its
own, one by one, while those behind it grew old in gRPC's windows, where nothing can leave them out. In turns
a stream waits while others are served, its mail gathers, and it decides once on all of it. So as load grows
there are fewer decisions for as many reports, and each knows the newest.
"""

from __future__ import annotations

import threading

PATIENCE_S = 0.1
"""A turn takes a millisecond or a few. One that lasts so long is stuck, and nobody waits for it."""


class Turns:
    """The order of the streams of one sidecar. It is a courtesy: a stream that is stuck holds nobody up."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._turn = threading.Lock()
        self._begun = 0

    def begin(self) -> threading.Lock:
        """Wait for a turn; it lasts until what is returned is released."""
        while True:
            turn, begun = self._turn, self._begun
            if turn.acquire(timeout=self._patience_s):
                self._begun += 1  # two at once may count one: it is only to differ from what it was
                return turn
            if self._begun == begun and self._turn is turn:
                self._turn = threading.Lock()  # whoever is stuck keeps the old one
