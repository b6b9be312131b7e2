"""The relay as a process beside its engine's: how either ends, and what the engine's process may be like."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specgov.proto.v1 import specgov_pb2 as pb

IsAlive = Callable[[int], bool]
Eventually = Callable[[Callable[[], Any]], None]
WAIT_S = 60.0

ENGINE_PROCESS = """
import os, signal, sys, time
from specgov.client import RelayClient, Report
from specgov.proto.v1 import specgov_pb2 as pb

{first}
client = RelayClient({target!r}, pb.EngineInfo(engine_id={engine_id!r}, boot_id="b", tiers=[0, 3]))
client.start()
client.submit(Report(1, 1, 3, b"\\x01", sum_seq_len_tokens=9, max_seq_len_tokens=9))
while client.newest() is None:
    time.sleep(0.01)
print(client._line.relay_pid, flush=True)
{then}
"""

EXITS = {
    "end": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "exception": ("raise RuntimeError('the engine fails')", 1),
    "close": ("client.close()", 0),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


def run_engine(target: str, engine_id: str, then: str, first: str = "") -> subprocess.CompletedProcess[str]:
    script = ENGINE_PROCESS.format(target=target, engine_id=engine_id, then=then, first=first)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )


def test_an_engine_may_have_a_thousand_files_open(sidecar: Any) -> None:
    """Its relay's socket then has a number that select does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("no process may have so many here")
    first = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({max(soft, 2000)}, {hard}))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)]
"""
    result = run_engine(sidecar.target, "e", "client.close()", first)
    assert result.returncode == 0, result.stderr
    assert sidecar.next_report_of_any().step_id == 1


def test_why_there_is_no_stream_stands_in_the_engines_log_once(tmp_path: Path) -> None:
    """What the relay writes is its engine's; a sidecar that stays away is told of once."""
    script = f"""
import time
from specgov.client import RelayClient, StreamLimits
from specgov.proto.v1 import specgov_pb2 as pb

info = pb.EngineInfo(engine_id="e", boot_id="b", tiers=[0, 3])
client = RelayClient("unix://{tmp_path}/nobody", info, limits=StreamLimits(backoff_max_s=0.05))
client.start()
while not client.stats().last_error:
    time.sleep(0.01)
client.close()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    lines = [line for line in result.stderr.splitlines() if line.startswith("specgov relay: ")]
    assert len(lines) == 1
    assert lines[0].startswith(
        f"specgov relay: no stream to the sidecar at unix://{tmp_path}/nobody (UNAVAILABLE"
    )


@pytest.mark.parametrize(
    ("engines", "relays"),
    [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_RR, os.SCHED_RR)],
    ids=["usual", "real"],
)
def test_a_relay_is_in_real_time_where_its_engine_is(sidecar: Any, engines: int, relays: int) -> None:
    """It may not wait for processes that the engine was put before."""
    start = f"os.sched_setscheduler(0, {engines}, os.sched_param({int(engines == os.SCHED_RR)}))"
    check = "print(os.sched_getscheduler(client._line.relay_pid), flush=True); client.close()"
    result = run_engine(sidecar.target, "e", check, start)
    if "PermissionError" in result.stderr:
        pytest.skip("real-time scheduling is not allowed here")
    assert result.stdout.split()[1:] == [str(relays)], result.stderr


def test_twenty_engines_end_in_every_way_and_no_relay_stays(
    sidecar: Any, is_alive: IsAlive, eventually: Eventually
) -> None:
    endings: list[str] = []

    def behaviour(messages: Any, context: Any) -> Iterator[pb.Decision]:
        try:
            for message in messages:
                if message.HasField("report"):
                    yield pb.Decision(known_step_id=1, num_steps=3, ttl_steps=9, ttl_ms=500, reason=1)
        except Exception:
            endings.append("reset")
            raise
        endings.append("closed")

    sidecar.behaviour = behaviour
    ways = list(EXITS.values()) * 4
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda item: run_engine(sidecar.target, f"e{item[0]}", item[1][0]), enumerate(ways))
        )
    assert [r.returncode for r in results] == [code for _, code in ways], [r.stderr for r in results]
    for result in results:
        eventually(lambda pid=int(result.stdout): not is_alive(pid))
    eventually(lambda: len(endings) == 20)
    assert endings == ["closed"] * 20


def test_a_relay_ends_though_a_forked_child_holds_the_socket(
    sidecar: Any, is_alive: IsAlive, eventually: Eventually
) -> None:
    """The child is made past Python's hooks, as a C library might."""
    then = """
import ctypes
child = ctypes.CDLL(None).fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os._exit(0)
"""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            ENGINE_PROCESS.format(target=sidecar.target, engine_id="e", then=then, first=""),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    relay, child = (int(process.stdout.readline()) for _ in range(2))
    process.wait(WAIT_S)
    try:
        assert is_alive(child)
        eventually(lambda: not is_alive(relay))
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


FORK = """
child = os.fork()
if child == 0:
    from specgov.client import ClientError
    client.submit(Report(2, 1, 3))
    assert not client.stats().connected
    client.close()
    try:
        client.start()
    except ClientError as error:
        assert "forked" in str(error)
        os._exit(7)
    os._exit(8)
_, status = os.waitpid(child, 0)
client.submit(Report(3, 1, 3))
deadline = time.monotonic() + 60
while client.newest().known_step_id < 3:
    assert time.monotonic() < deadline, "the parent's stream ended"
    time.sleep(0.01)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_leaves_its_parents_relay_alone(sidecar: Any) -> None:
    result = run_engine(sidecar.target, "e", FORK)
    assert result.returncode == 7, result.stderr
    steps = [sidecar.next_report_of_any().step_id for _ in range(2)]
    assert steps == [1, 3]
