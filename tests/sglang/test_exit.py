"""A server ends as it would without us, and the sidecar takes each end of a stream for one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from servers import ACCEPTED, processes_of, running, started, wait_until, wait_until_it_answers
from sidecars import at_tier, fake_sidecar, sidecar_process

from specgov.proto.v1 import specgov_pb2 as pb

pytestmark = pytest.mark.sglang

EXITS = int(os.environ.get("SPECGOV_TEST_EXITS", "4"))
"""How often each way of ending is tried; `SPECGOV_TEST_EXITS=20` for a release."""
AT_ONCE = 2
"""Servers at once: starting one takes most of the time, and two cores."""
GONE_S = 60
"""SGLang looks once in 5 s whether it was asked to end. Its launcher then takes itself down, two seconds of
CPU time or so, which several at once on two busy cores need a while for, with the plugin or without it
(benchmarks/server_exit.py)."""

LAUNCHER, GROUP = "launcher", "group"


def raised_in(log: str) -> list[str]:
    """The files that raised what a log's tracebacks tell of: each traceback's last."""
    blocks = re.findall(r"Traceback \(most recent call last\):\n((?:[ ].*\n)+)", log)
    return [re.findall(r'File "([^"]+)"', block)[-1] for block in blocks]


@pytest.mark.parametrize("first", range(0, EXITS, AT_ONCE))
@pytest.mark.parametrize(
    ("whom", "how"), [(LAUNCHER, signal.SIGTERM), (GROUP, signal.SIGINT)], ids=["terminated", "interrupted"]
)
def test_nothing_is_left(
    models: Path, tmp_path: Path, socket: Path, whom: str, how: signal.Signals, first: int
) -> None:
    target = f"unix://{socket}"
    numbers = range(first, min(first + AT_ONCE, EXITS))
    with fake_sidecar(target, at_tier(1)) as recorder, contextlib.ExitStack() as stack:
        servers = []
        for number in numbers:
            (folder := tmp_path / str(number)).mkdir()
            servers.append(stack.enter_context(started(models, folder, SPECGOV_TARGET=target)))
        for server in servers:
            wait_until_it_answers(server)
            server.check(ACCEPTED, 20)
        wait_until(lambda: recorder.reports and recorder.streams == len(servers))
        for server in servers:
            session = server.process.pid
            assert len(processes_of(session)) >= 3
            (os.kill if whom == LAUNCHER else os.killpg)(session, how)
        for server in servers:
            session = server.process.pid
            wait_until(
                lambda session=session: processes_of(session) == [],
                GONE_S,
                lambda session=session: f"left: {processes_of(session)}",
            )
            assert [place for place in raised_in(server.log) if "specgov" in place] == []
        wait_until(lambda: len(recorder.endings) == len(servers))
        assert set(recorder.events) <= {pb.EngineEvent.KIND_SHUTTING_DOWN}
        if whom == LAUNCHER:
            assert recorder.endings == ["closed"] * len(servers)
            assert len(recorder.events) == len(servers)
        # An interrupted launcher kills all its descendants, the relay too, a few tenths of a second after
        # the signal, and these say goodbye meanwhile if they get to it. The streams ended; whether gRPC
        # calls that of a killed relay closed or reset is by chance.


def test_a_reset_is_taken_for_an_end(models: Path, tmp_path: Path, socket: Path) -> None:
    """SIGINT to the launcher alone makes SGLang kill its schedulers: nothing of ours runs there."""
    with sidecar_process(socket, "--policy", "static:1") as sidecar:
        with running(models, tmp_path, SPECGOV_TARGET=sidecar.target) as server:
            wait_until(lambda: server.check(ACCEPTED, 20) and sidecar.is_connected())
            os.kill(server.process.pid, signal.SIGINT)
            wait_until(lambda: processes_of(server.process.pid) == [], GONE_S)
        wait_until(lambda: not sidecar.is_connected())
        started = time.monotonic()
        sidecar.end()
        assert time.monotonic() - started < 4  # it was not stuck in that stream
        assert "Traceback" not in sidecar.log
        assert '"engine disconnected"' in sidecar.log
