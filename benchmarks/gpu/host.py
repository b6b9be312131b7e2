"""What the host does meanwhile: is it slow, do neighbours take its time, is the scheduler left waiting?"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

SPIN_EVERY_S = 0.2
SPINS = 60_000
"""Turns of an empty loop: one to three ms."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
"""Columns of ``/proc/stat``."""


class HostWatch:
    """Watches the host between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._spins_ms: list[float] = []
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin a stretch of time."""
        self._over.clear()
        self._spins_ms = []
        self._scheduler = _scheduler()
        self._began_s, self._ticks, self._times = time.monotonic(), _ticks(), _times(self._scheduler)
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, Any]:
        """What was seen since ``begin``; None where the host does not tell.

        ``spin_ms``: median time of a fixed loop in Python; ``busy_cores`` and ``steal_cores``: what all
        processes used, and what a virtual machine was not given; ``scheduler_cores`` and ``scheduler_waits``:
        the share of the time in which the scheduler's main thread ran, and in which it waited for a core.
        """
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        took_s = time.monotonic() - self._began_s
        ticks, times = _ticks(), _times(self._scheduler)
        seen: dict[str, Any] = {
            "spin_ms": round(statistics.median(self._spins_ms), 3) if self._spins_ms else None
        }
        used = [after - before for before, after in zip(self._ticks, ticks, strict=False)]
        if len(used) > _STEAL:
            busy = used[_USER] + used[_NICE] + used[_SYSTEM]
            seen["busy_cores"] = round(busy * _TICK_S / took_s, 2)
            seen["steal_cores"] = round(used[_STEAL] * _TICK_S / took_s, 3)
        if times and self._times:
            names = ("scheduler_cores", "scheduler_waits")
            for name, before, after in zip(names, self._times, times, strict=True):
                seen[name] = round((after - before) / took_s, 3)
        return seen

    def _spin(self) -> None:
        while not self._over.wait(SPIN_EVERY_S):
            began_s = time.perf_counter()
            for _ in range(SPINS):
                pass
            self._spins_ms.append(1e3 * (time.perf_counter() - began_s))


def _ticks() -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        first, *_ = Path("/proc/stat").read_text().splitlines()
        return [int(word) for word in first.split()[1:]]
    return []


def _scheduler() -> Path | None:
    """The first scheduler among the descendants of this process; None where there is none to be seen."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"sglang::scheduler" in (folder / "cmdline").read_bytes()[:64] and _is_ours(int(folder.name)):
                found.append(int(folder.name))
    return Path(f"/proc/{min(found)}") if found else None


def _is_ours(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = _parent(pid)
    return pid == os.getpid()


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name before it, in parentheses, may hold spaces.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _times(scheduler: Path | None) -> tuple[float, float] | None:
    """Seconds that the scheduler's main thread ran, and waited for a core; None where not known."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        ran_ns, waited_ns, _ = Path(f"{scheduler}/schedstat").read_text().split()
        return int(ran_ns) * 1e-9, int(waited_ns) * 1e-9
    return None
