"""The sidecar's own work on a report, in checkouts that take turns; ``hot_path_since.py`` runs it.

Each checkout plays the same engine in a process of its own, and all of them on one core. They take turns of
``BLOCK_STEPS`` reports, a fraction of a second each, so that what else the machine does meets all alike.
Times are the thread's CPU time, without gRPC: *all* of a report, from its message in the mailbox to the next
one's, with everything that is counted, and of that what comes *before the decision* is handed over to be
sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import machine  # noqa: F401 before numpy
import numpy as np
from rules import PROFILE, Batch, report_of

from specgov.controller.config import ServeConfig
from specgov.controller.engines import Engines
from specgov.controller.metrics import Metrics
from specgov.controller.session import Session
from specgov.controller.telemetry import Telemetry
from specgov.proto.v1 import specgov_pb2 as pb

PARTS = ("client", "controller", "env", "policies", "proto", "sglang_plugin")
BATCH_SIZES = (8, 64)
WARM_UP_STEPS = 1000
BLOCK_STEPS = 50
BLOCKS = 80
CLOCK_TICK_S = 1e-3
"""The sidecar's clock moves by this whenever it is read: the limit of messages a second is not reached."""

Times = list[tuple[int, int]]
"""Of each report, in ns: all work, and what comes before the decision."""


class Played:
    """A stream whose engine follows each decision; ``policy`` decides for a batch of ``batch_size``."""

    def __init__(self, policy: str, batch_size: int) -> None:
        self._batch = Batch(batch_size, seed=0)
        self._taken_ns: list[int] = []
        self._now_s = 0.0
        engine = self._batch.engine
        info = pb.EngineInfo(
            engine_id="e",
            boot_id="b",
            tiers=engine.tiers,
            graph_batch_sizes=engine.graph_batch_sizes,
            max_running_requests=engine.max_running_requests,
            profile=PROFILE,
        )
        engines = Engines(ServeConfig(policy=policy), time.monotonic)
        self._session = Session(engines, Telemetry(Metrics(), timer=self._timer))
        self._session.deliver(pb.EngineMessage(info=info))
        self._decisions = self._session.run()
        self._decision = next(self._decisions)

    def play(self, steps: int) -> Times:
        """Report that many steps, one at a time."""
        times = []
        for _ in range(steps):
            report = report_of(self._batch.step(self._decision.num_steps), self._decision.decision_id)
            self._session.deliver(pb.EngineMessage(report=report))
            self._taken_ns.clear()
            begun_ns = time.thread_time_ns()
            self._decision = next(self._decisions)
            ended_ns = time.thread_time_ns()
            times.append((ended_ns - begun_ns, ended_ns - self._taken_ns[0]))
        return times

    def _timer(self) -> float:
        """The sidecar's clock, which it reads first when it takes a report from the mailbox."""
        if not self._taken_ns:
            self._taken_ns.append(time.thread_time_ns())
        self._now_s += CLOCK_TICK_S
        return self._now_s


def serve(policy: str, batch_size: int) -> None:
    """In a process of one checkout: play as many steps as each line of the input says, and say the times."""
    played = Played(policy, batch_size)
    for line in sys.stdin:
        print(json.dumps(played.play(int(line))), flush=True)


@contextlib.contextmanager
def imported_from(checkout: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that imports ``specgov`` from a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "specgov")
        package.mkdir()
        for part in PARTS:
            (package / part).symlink_to(checkout.resolve() / part)
        yield {**os.environ, "PYTHONPATH": folder}


@contextlib.contextmanager
def _player(checkout: Path, policy: str, batch_size: int, core: int) -> Iterator[subprocess.Popen[str]]:
    with imported_from(checkout) as environment:
        command = [sys.executable, __file__, policy, str(batch_size)]
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        os.sched_setaffinity(child.pid, {core})
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def _play(player: subprocess.Popen[str], steps: int) -> Times:
    assert player.stdin is not None
    assert player.stdout is not None
    print(steps, file=player.stdin, flush=True)
    times: Times = json.loads(player.stdout.readline())
    return times


def compare(checkouts: dict[str, Path], policy: str, batch_size: int) -> dict[str, dict[str, float]]:
    """By checkout the figures in µs: mean and median of all work, and of what comes before the decision."""
    times: dict[str, Times] = {name: [] for name in checkouts}
    core = max(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        players = {
            name: stack.enter_context(_player(checkout, policy, batch_size, core))
            for name, checkout in checkouts.items()
        }
        for player in players.values():
            _play(player, WARM_UP_STEPS)
        for number in range(BLOCKS):
            for name in sorted(players, reverse=number % 2 == 0):
                times[name] += _play(players[name], BLOCK_STEPS)
    return {name: _figures(np.array(seen) / 1e3, batch_size) for name, seen in times.items()}


def _figures(times_us: np.ndarray, batch_size: int) -> dict[str, float]:
    own_work, before_decision = times_us.T
    return {
        f"own_work_{batch_size}_us": float(own_work.mean()),
        f"own_work_p50_{batch_size}_us": float(np.median(own_work)),
        f"before_decision_{batch_size}_us": float(before_decision.mean()),
        f"before_decision_p50_{batch_size}_us": float(np.median(before_decision)),
    }


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
