"""One stream at a time takes its mail in and decides; what comes meanwhile joins its stream's next turn.

Threads of one interpreter do not compute side by side, they only take the interpreter from each other, and
the few that read what engines send come off worst: with many streams each report then got a decision of its
own, one by one, while those behind it grew old in gRPC's windows, where nothing can leave them out. In turns
a stream waits while others are served, its mail gathers, and it decides once on all of it. So as load grows
there are fewer decisions for as many reports, and each knows the newest.

A stream whose turns take far longer than the others', as with a slow policy, takes them beside the others:
else each of them would wait for each of its decisions. Where load makes all turns long, all take turns.
"""

from __future__ import annotations

import threading

PATIENCE_S = 0.1
"""A turn takes a millisecond or a few. One that lasts so long is stuck, and nobody waits for it."""
LONG_S, LONG_FACTOR = 0.01, 8.0
"""A turn is long beyond both this time and this many times the usual one."""
TURNS_ASIDE = 16
"""For so many turns a stream goes beside the others after one that was long."""
_STEP = 1.02
_LEAST_USUAL_S = 1e-4


class Pace:
    """How long one stream's turns are; for ``Turns``."""

    __slots__ = ("aside",)

    def __init__(self) -> None:
        self.aside = 0
        """Turns that it still takes beside the others."""


class Turns:
    """The order of the streams of one sidecar. It is a courtesy: a stream that is stuck holds nobody up.

    Attributes: usual_s: about the median of the turns, in seconds.

    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._turn = threading.Lock()
        self._begun = 0
        self.usual_s = 0.001

    def begin(self, pace: Pace | None = None) -> threading.Lock:
        """Wait for a turn, unless by its ``pace`` the stream has one of its own.

        It lasts until what is returned is released.
        """
        if pace is not None and pace.aside:
            own = threading.Lock()
            own.acquire()
            return own
        while True:
            turn, begun = self._turn, self._begun
            if turn.acquire(timeout=self._patience_s):
                self._begun += 1  # two at once may count one: it is only to differ from what it was
                return turn
            if self._begun == begun and self._turn is turn:
                self._turn = threading.Lock()  # whoever is stuck keeps the old one

    def took(self, pace: Pace, seconds: float) -> None:
        """Note how long a turn of the stream's took."""
        # About the median, as it grows as often as it shrinks; streams may overwrite each other's. Turns
        # aside count too: where load makes all turns long, all streams are to come back.
        usual_s = self.usual_s * _STEP if seconds > self.usual_s else self.usual_s / _STEP
        self.usual_s = max(usual_s, _LEAST_USUAL_S)
        if pace.aside:
            pace.aside -= 1
        if seconds > LONG_S and seconds > LONG_FACTOR * self.usual_s:
            pace.aside = TURNS_ASIDE
