"""A sidecar as a process of its own that is watched from outside: memory, threads, files, what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

START_S = 60.0
STOP_S = 30.0


@dataclass(frozen=True)
class Sample:
    """What the system says of a process at a moment, ``at_s`` seconds after the watch began."""

    at_s: float
    rss_kb: int
    threads: int
    files: int


class WatchedSidecar:
    """``specgov serve`` with a unix socket in ``folder``; its messages go to ``folder/messages``.

    ``cores`` are where it may run; None: where this process may.
    """

    def __init__(self, folder: Path, options: Sequence[str], cores: set[int] | None = None) -> None:
        self.socket_path = folder / "specgov.sock"
        self.messages_path = folder / "messages"
        self._options, self._cores = options, cores
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        if self._child is None:
            raise SystemExit("the sidecar was not started")
        return self._child.pid

    @property
    def lives(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> float:
        """Start it, and return when its socket is there: seconds from the one to the other."""
        self.socket_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "specgov.controller.cli.main", "serve"]
        command += ["--listen", self.target, "--log-format", "json", *self._options]
        begun_s = time.monotonic()
        with self.messages_path.open("ab") as messages:
            self._child = subprocess.Popen(command, stderr=messages)
        if self._cores is not None:
            os.sched_setaffinity(self._child.pid, self._cores)
        while not self.socket_path.exists():
            if not self.lives or time.monotonic() > begun_s + START_S:
                raise SystemExit(f"the sidecar does not start:\n{self.messages()}")
            time.sleep(0.005)
        return time.monotonic() - begun_s

    def end(self, number: signal.Signals) -> int:
        """Send it a signal and wait for its end; its exit status."""
        if self._child is None:
            return 0
        self._child.send_signal(number)
        return self._child.wait(STOP_S)

    def messages(self) -> str:
        return self.messages_path.read_text(errors="replace")

    def said(self) -> dict[str, Any]:
        """What its messages tell: exceptions that nobody caught, and how many lines of each kind."""
        lines = [json.loads(line) for line in self.messages().splitlines() if line.startswith("{")]
        return {
            "tracebacks_in_the_log": [line for line in self.messages().splitlines() if "Traceback" in line][
                :20
            ],
            "lines_in_the_log": dict(Counter(f"{line['level']}: {line['event']}" for line in lines)),
        }

    def sample(self, at_s: float) -> Sample:
        status = Path(f"/proc/{self.pid}/status").read_text()
        words = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return Sample(
            round(at_s, 2),
            int(words["VmRSS"].split()[0]),
            int(words["Threads"]),
            sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir()),
        )


class MemoryWatch:
    """Samples a sidecar every ``every_s`` on a thread of its own, from ``with`` to its end."""

    def __init__(self, sidecar: WatchedSidecar, every_s: float) -> None:
        self.samples: list[Sample] = []
        self._sidecar, self._every_s = sidecar, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        begun_s = time.monotonic()
        while True:
            try:
                self.samples.append(self._sidecar.sample(time.monotonic() - begun_s))
            except (OSError, KeyError):
                return  # it has ended, which its caller finds too
            if self._stop.wait(self._every_s):
                return


def memory_facts(samples: Sequence[Sample], from_s: float) -> dict[str, Any]:
    """RSS, threads and files over time, and the slope of a line through what came after ``from_s``."""
    late = [sample for sample in samples if sample.at_s >= from_s]
    facts: dict[str, Any] = {
        "samples": len(samples),
        "rss_mb_first": round(samples[0].rss_kb / 1024, 1),
        "rss_mb_last": round(samples[-1].rss_kb / 1024, 1),
        "rss_mb_most": round(max(sample.rss_kb for sample in samples) / 1024, 1),
        "threads_most": max(sample.threads for sample in samples),
        "threads_last": samples[-1].threads,
        "files_most": max(sample.files for sample in samples),
        "files_last": samples[-1].files,
        "slope_from_s": from_s,
        "slope_samples": len(late),
        "slope_kb_per_min": None,
        "rss_mb_by_minute": {},
    }
    if len(late) >= 3:
        at_min = np.array([sample.at_s / 60.0 for sample in late])
        facts["slope_kb_per_min"] = round(float(np.polyfit(at_min, [s.rss_kb for s in late], 1)[0]), 1)
    for sample in samples:
        facts["rss_mb_by_minute"].setdefault(int(sample.at_s // 60), round(sample.rss_kb / 1024, 1))
    return facts
