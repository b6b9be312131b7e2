"""The client whose stream lives in another process: what ends, what is lost and told of, and more."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specgov.client import ClientError, RelayClient, Report
from specgov.client.relay import RESTART_BASE_S, RESTART_MAX_S
from specgov.proto.v1 import specgov_pb2 as pb

IsAlive = Callable[[int], bool]
Eventually = Callable[[Callable[[], Any]], None]
MakeClient = Callable[..., RelayClient]
WAIT_S = 60.0


@pytest.fixture
def make_relay_client(sidecar: Any, info: pb.EngineInfo) -> Iterator[MakeClient]:
    clients: list[RelayClient] = []

    def make(*, started: bool = True, target: str = sidecar.target, **arguments: Any) -> RelayClient:
        client = RelayClient(target, info, **arguments)
        clients.append(client)
        if started:
            client.start()
        return client

    yield make
    for client in clients:
        pid = client._line.relay_pid
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(pid, signal.SIGCONT)
        client.close(timeout_s=0.0)


def knows(client: RelayClient, step_id: int) -> bool:
    newest = client.newest()
    return newest is not None and newest.known_step_id >= step_id


def relay_pid(client: RelayClient) -> int:
    pid = client._line.relay_pid
    assert pid is not None
    return pid


def test_everything_in_a_report_arrives_and_its_decision_comes_back(
    sidecar: Any, make_relay_client: MakeClient, eventually: Eventually
) -> None:
    client = make_relay_client()
    fields: dict[str, Any] = {
        "step_id": 7, "batch_size": 2, "num_steps": 3, "sum_seq_len_tokens": 90, "max_seq_len_tokens": 50,
        "waiting_requests": 4, "step_time_us": 6000, "step_time_valid": True, "padded_batch_size": 4,
        "cuda_graph_ran": False, "kv_use_ratio": 0.5, "after_prefill": True, "has_grammar": True,
        "warm_up": True, "decision_id": 6, "engine_rule_num_steps": 0,
    }  # fmt: skip
    client.submit(Report(**fields, accepted=b"\x01\x03", slots=b"\x05\x00\x00\x01", generations=b"\x00\x02"))
    assert sidecar.next_message().info.engine_id == "engine"
    assert sidecar.next_report() == pb.StepReport(
        **fields,
        accepted_drafts=b"\x01\x03",
        slots_u16le=b"\x05\x00\x00\x01",
        slot_generations_u8=b"\x00\x02",
    )
    eventually(lambda: knows(client, 7))
    decision = client.current(8)
    assert decision is not None
    assert (decision.decision_id, decision.num_steps, decision.ttl_steps) == (7, 3, 8)
    assert decision.propensity is None


def test_an_event_keeps_its_place_and_close_ends_the_stream(
    sidecar: Any, is_alive: IsAlive, make_relay_client: MakeClient, eventually: Eventually
) -> None:
    client = make_relay_client()
    client.submit(Report(1, 1, 3))
    eventually(lambda: knows(client, 1))
    client.submit(Report(2, 1, 3))
    client.event(pb.EngineEvent.KIND_SHUTTING_DOWN, 2)
    pid = relay_pid(client)
    client.close(WAIT_S)
    assert not is_alive(pid)
    assert [sidecar.next_report_of_any().step_id for _ in range(2)] == [1, 2]
    assert sidecar.next_message().event == pb.EngineEvent(kind=pb.EngineEvent.KIND_SHUTTING_DOWN, step_id=2)
    assert (client.stats().sent, client.stats().dropped, client.stats().connected) == (2, 0, False)


THREADS_AND_FILES = """
import json, os, threading, time
from specgov.client import RelayClient, Report
from specgov.proto.v1 import specgov_pb2 as pb

def counts():
    return threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

def client():
    made = RelayClient({target!r}, pb.EngineInfo(engine_id="e", boot_id="b", tiers=[0, 3]))
    made.start()
    return made

client().close()  # what is opened once stays open
before = counts()
one = client()
deadline = time.monotonic() + 60
while "UNAVAILABLE" not in one.stats().last_error:
    assert time.monotonic() < deadline, "it never tried to connect"
    one.submit(Report(1, 1, 3))
    assert one.current(1) is None
during = counts()
one.close()
print(json.dumps([before, during, counts()]))
"""


def test_no_thread_is_started_and_no_file_left_open(tmp_path: Path) -> None:
    """In a process without anything else of gRPC's, whose threads come and go."""
    script = THREADS_AND_FILES.format(target=f"unix://{tmp_path}/nobody")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * WAIT_S, check=True
    )
    (threads, tasks, files), during, after = json.loads(done.stdout)
    assert during == [threads, tasks, files + 2]  # the socket and the board
    assert after == [threads, tasks, files]
    assert threads == 1


def test_a_relay_that_stands_still_delays_nothing_and_its_drops_are_told(
    sidecar: Any, make_relay_client: MakeClient, eventually: Eventually
) -> None:
    client = make_relay_client(queue_size=10_000)
    client.submit(Report(1, 1, 3))
    eventually(lambda: knows(client, 1))
    os.kill(relay_pid(client), signal.SIGSTOP)
    for step_id in range(2, 2002):
        client.submit(Report(step_id, 256, 3, bytes(256)))
    dropped = client.stats().dropped
    assert 0 < dropped < 2000
    assert client.current(2002) is None
    os.kill(relay_pid(client), signal.SIGCONT)
    eventually(lambda: knows(client, 2001 - dropped))  # all that had found room; the last ones had not
    client.submit(Report(3000, 1, 3))
    reports = []
    while not reports or reports[-1].step_id != 3000:
        reports.append(sidecar.next_report_of_any())
    assert sum(report.reports_dropped for report in reports) == dropped == 2002 - len(reports)


def test_a_report_after_a_pause_wakes_the_relay(
    sidecar: Any, make_relay_client: MakeClient, eventually: Eventually
) -> None:
    client = make_relay_client()
    for step_id in range(1, 4):
        client.submit(Report(step_id, 1, 3))
        eventually(lambda step_id=step_id: knows(client, step_id))
        board = client._line.board
        assert board is not None
        eventually(lambda board=board: board.packets.must_be_woken(time.monotonic()))
    assert [sidecar.next_report_of_any().step_id for _ in range(3)] == [1, 2, 3]


def test_what_lay_before_a_killed_relay_is_told_to_the_next(
    sidecar: Any, is_alive: IsAlive, make_relay_client: MakeClient, clock: Any, eventually: Eventually
) -> None:
    """It hung before: there was no more room. Events come again, reports are counted."""
    client = make_relay_client(clock=clock)
    client.submit(Report(1, 1, 3))
    eventually(lambda: knows(client, 1))
    pid = relay_pid(client)
    os.kill(pid, signal.SIGSTOP)
    client.event(pb.EngineEvent.KIND_WEIGHTS_UPDATED, 1)
    while not client.stats().dropped:
        client.submit(Report(2, 256, 3, bytes(256)))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_alive(pid))
    client.submit(Report(2, 1, 3))
    dropped = client.stats().submitted - 1
    assert client.stats().dropped == dropped
    clock.advance(RESTART_BASE_S)
    client.submit(Report(3, 1, 3))
    while not (message := sidecar.next_message()).HasField("event"):
        pass
    assert message.event == pb.EngineEvent(kind=pb.EngineEvent.KIND_WEIGHTS_UPDATED, step_id=1)
    report = sidecar.next_report()
    assert (report.step_id, report.reports_dropped) == (3, dropped)


def test_a_killed_relay_is_started_again_after_waits_that_grow(
    sidecar: Any, is_alive: IsAlive, make_relay_client: MakeClient, clock: Any, eventually: Eventually
) -> None:
    client = make_relay_client(clock=clock)
    client.submit(Report(1, 1, 3))
    eventually(lambda: knows(client, 1))
    step_id = 1
    wait_s = RESTART_BASE_S
    for _ in range(2):
        pid = relay_pid(client)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: not is_alive(pid))
        client.submit(Report(step_id + 1, 1, 3))  # goes nowhere, and is told of
        client.submit(Report(step_id + 2, 1, 3))  # so does this, and shows that nobody takes the first
        clock.advance(wait_s / 2)
        client.current(1)
        assert relay_pid(client) == pid
        clock.advance(wait_s / 2)
        client.current(1)
        assert relay_pid(client) != pid
        step_id += 3
        client.submit(Report(step_id, 1, 3))
        eventually(lambda step_id=step_id: knows(client, step_id))
        wait_s *= 2
    reports = [sidecar.next_report_of_any() for _ in range(3)]
    assert [(r.step_id, r.reports_dropped) for r in reports] == [(1, 0), (4, 2), (7, 2)]
    assert wait_s < RESTART_MAX_S
    clock.advance(RESTART_MAX_S)  # one that lived so long is a new beginning
    os.kill(pid := relay_pid(client), signal.SIGKILL)
    eventually(lambda: not is_alive(pid))
    client.submit(Report(step_id + 1, 1, 3))
    client.submit(Report(step_id + 2, 1, 3))
    clock.advance(RESTART_BASE_S)
    client.current(1)
    assert relay_pid(client) != pid


def test_a_report_that_cannot_be_sent_is_counted_and_told(
    sidecar: Any, make_relay_client: MakeClient
) -> None:
    client = make_relay_client()
    client.submit(Report(1, -4, 0))
    client.submit(Report(2, 4, 0))
    report = sidecar.next_report_of_any()
    assert (report.step_id, report.reports_dropped) == (2, 1)
    assert client.stats().reports_rejected == 1


def test_a_client_is_started_once(make_relay_client: MakeClient) -> None:
    client = make_relay_client()
    with pytest.raises(ClientError, match="already"):
        client.start()
