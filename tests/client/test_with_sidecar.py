"""The client against the real sidecar, each in processes that end, are killed, stopped and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specgov.client import RelayClient, Report, StreamClient, stream
from specgov.proto.v1 import specgov_pb2 as pb

MakeClient = Callable[..., StreamClient]
Eventually = Callable[[Callable[[], Any]], None]
WAIT_S = 60.0
TTL_STEPS = 50
"""What the sidecar's decisions live for, as this file's sidecars are told to say."""


class SidecarProcess:
    """``specgov serve`` with a static rule; a stopped one is continued before it is ended."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "s"
        self.target = f"unix://{self._socket}"
        self._config = folder / "specgov.toml"
        self._config.write_text(f'policy = "static:3"\nttl_steps = {TTL_STEPS}\nttl_ms = 1000\n')
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        command = [sys.executable, "-m", "specgov.controller.cli.main", "serve", "--listen", self.target]
        self._process = subprocess.Popen([*command, "--config", str(self._config), "--log-level", "error"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> None:
        """Returns when the process has stopped, so that it takes and says nothing any more."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(tmp_path)
    sidecar.start()
    yield sidecar
    sidecar.kill()


class Engine:
    """An engine at its smallest: its step ids go on, whatever happens to the sidecar."""

    def __init__(self, client: StreamClient | RelayClient) -> None:
        self.client = client
        self.step_id = 0

    def step(self) -> bool:
        """Make a step; whether there is a decision for the next."""
        self.step_id += 1
        report = Report(self.step_id, 2, 3, b"\x01\x03", sum_seq_len_tokens=64, max_seq_len_tokens=40)
        self.client.submit(report)
        return self.client.current(self.step_id + 1) is not None

    def step_and_wait(self) -> bool:
        """Make a step and give its decision time to come; whether it came."""
        self.step()
        deadline_s = time.monotonic() + 0.1
        while (newest := self.client.newest()) is None or newest.known_step_id < self.step_id:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.001)
        return self.client.current(self.step_id + 1) == newest

    def steps_until_no_decision(self) -> int:
        for count in range(1, 10 * TTL_STEPS):
            if not self.step():
                return count
        pytest.fail("a decision of a sidecar that is gone outlived its TTL")


@pytest.fixture
def engine(make_client: MakeClient, eventually: Eventually) -> Engine:
    """An engine that has a decision."""
    engine = Engine(make_client())
    eventually(engine.step_and_wait)
    return engine


def test_a_killed_sidecar_is_missed_within_the_ttl_and_found_again(
    sidecar: SidecarProcess, engine: Engine, eventually: Eventually
) -> None:
    sidecar.kill()
    # The newest decision knows at most the last step, n; it may be used up to step n + TTL, not for the one
    # after.
    assert engine.steps_until_no_decision() <= TTL_STEPS
    sidecar.start()
    eventually(engine.step_and_wait)
    assert engine.client.stats().reconnects == 1


def test_a_relay_misses_a_killed_sidecar_within_the_ttl_and_finds_it_again(
    sidecar: SidecarProcess, info: pb.EngineInfo, eventually: Eventually
) -> None:
    client = RelayClient(sidecar.target, info)
    client.start()
    try:
        engine = Engine(client)
        eventually(engine.step_and_wait)
        sidecar.kill()
        # The last decision may still be on its way from the relay: it knows a step that much later at most.
        assert engine.steps_until_no_decision() <= 2 * TTL_STEPS
        sidecar.start()
        eventually(engine.step_and_wait)
        eventually(lambda: client.newest() is not None and client.stats().reconnects == 1)
    finally:
        client.close()


def test_a_stopped_sidecar_is_missed_within_the_ttl_and_found_again(
    sidecar: SidecarProcess, engine: Engine, eventually: Eventually
) -> None:
    sidecar.stop()
    assert engine.steps_until_no_decision() <= TTL_STEPS
    for _ in range(5_000):  # more than the socket's buffers and the queue hold: no step waits for room
        engine.client.submit(Report(engine.step_id, 256, 3, bytes(256), bytes(512), bytes(256)))
    assert engine.client.stats().dropped > 0
    assert engine.client.current(engine.step_id + 1) is None
    sidecar.resume()
    eventually(engine.step_and_wait)


def test_a_sidecar_that_stands_still_is_given_up_while_the_engine_is_idle(
    sidecar: SidecarProcess,
    make_client: MakeClient,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one whose machine is gone: the connection stays and nobody answers its pings."""
    pings = {"grpc.keepalive_time_ms", "grpc.http2.ping_timeout_ms", "grpc.keepalive_timeout_ms"}
    options = tuple((name, 300 if name in pings else value) for name, value in stream._CHANNEL_OPTIONS)
    assert pings <= {name for name, _ in stream._CHANNEL_OPTIONS}
    monkeypatch.setattr(stream, "_CHANNEL_OPTIONS", options)
    engine = Engine(make_client())
    eventually(engine.step_and_wait)
    sidecar.stop()
    eventually(lambda: not engine.client.stats().connected)
    sidecar.resume()
    eventually(engine.step_and_wait)
    assert engine.client.stats().reconnects >= 1


def test_fifty_engines_that_reconnect_at_once_are_all_served(
    sidecar: SidecarProcess, eventually: Eventually
) -> None:
    engines = []
    for number in range(50):
        info = pb.EngineInfo(engine_id=f"engine {number}", boot_id="boot", tiers=[0, 3])
        client = StreamClient(sidecar.target, info)
        client.start()
        engines.append(Engine(client))
    try:
        for engine in engines:
            eventually(engine.step_and_wait)
        sidecar.kill()
        for engine in engines:
            assert engine.steps_until_no_decision() <= TTL_STEPS
        sidecar.start()
        for engine in engines:
            eventually(engine.step_and_wait)
        assert [engine.client.stats().reconnects for engine in engines] == [1] * 50
    finally:
        for engine in engines:
            engine.client.close(timeout_s=0.0)


EXITS = {
    "end": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "exception": ("raise RuntimeError('the engine fails')", 1),
    "close": ("client.close()", 0),
    "busy": (
        "threading.Thread(target=lambda: [step() for _ in itertools.count()], daemon=True).start()",
        0,
    ),
}
"""How a process ends with its stream open, and its exit code."""

ENGINE_PROCESS = """
import itertools, sys, threading
from specgov.client import Report, StreamClient
from specgov.proto.v1 import specgov_pb2 as pb

client = StreamClient({target!r}, pb.EngineInfo(engine_id={engine_id!r}, boot_id="b", tiers=[0, 3]))
client.start()
step_ids = itertools.count(1)

def step():
    client.submit(Report(next(step_ids), 1, 3, b"\\x01", sum_seq_len_tokens=9, max_seq_len_tokens=9))

step()
while client.wait_for_step(1, {wait_s}) is None:
    raise SystemExit("no decision came")
print("open", flush=True)
{then}
"""


def run_engine_process(target: str, engine_id: str, then: str) -> subprocess.CompletedProcess[str]:
    script = ENGINE_PROCESS.format(target=target, engine_id=engine_id, wait_s=WAIT_S, then=then)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )


def test_a_hundred_processes_exit_with_an_open_stream_and_none_hangs(sidecar: SidecarProcess) -> None:
    ways = list(EXITS.values()) * 20
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(
                lambda item: run_engine_process(sidecar.target, f"e{item[0]}", item[1][0]), enumerate(ways)
            )
        )
    assert [(r.stdout, r.returncode) for r in results] == [("open\n", code) for _, code in ways], [
        r.stderr for r in results
    ]


def test_a_process_exits_while_the_sidecar_is_stopped(sidecar: SidecarProcess) -> None:
    script = ENGINE_PROCESS.format(
        target=sidecar.target, engine_id="e", wait_s=WAIT_S, then="sys.stdin.read(1); client.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        sidecar.stop()
        process.communicate("x", timeout=WAIT_S)
        sidecar.resume()
    assert process.returncode == 0


FORK = """
import os
child = os.fork()
if child == 0:
    from specgov.client import ClientError
    step()
    assert client.newest() is not None
    assert not client.stats().connected
    client.close()
    try:
        client.start()
    except ClientError as error:
        assert "forked" in str(error)
        os._exit(7)
    os._exit(8)
_, status = os.waitpid(child, 0)
step()
assert client.wait_for_step(2, 60.0) is not None, "the parent's stream ended"
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_leaves_its_parents_stream_alone(sidecar: SidecarProcess) -> None:
    result = run_engine_process(sidecar.target, "e", FORK)
    assert result.returncode == 7, result.stderr
