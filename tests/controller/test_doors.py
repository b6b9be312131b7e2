"""What the gRPC servers themselves refuse: metadata, connections, peers that stand still or never begin."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from specgov.controller import doors
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

Make = Callable[..., Any]

SILENT_ENGINE = """
import threading, grpc
from specgov.proto.v1 import specgov_pb2 as pb, specgov_pb2_grpc as pb_grpc

def messages():
    yield pb.EngineMessage(info=pb.EngineInfo(engine_id="silent", boot_id="b", tiers=[0, 1, 3, 5]))
    threading.Event().wait()

with grpc.insecure_channel({target!r}) as channel:
    call = pb_grpc.SpeculationControllerStub(channel).Control(messages())
    next(call)
    print("open", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("listen", [None, "127.0.0.1:0"])
def test_a_peer_that_stands_still_is_found_though_its_stream_is_idle(
    start: Make, eventually: Make, monkeypatch: pytest.MonkeyPatch, listen: str | None
) -> None:
    """A stopped process stands for a machine that is gone: the connection stays, and nobody answers."""
    monkeypatch.setattr(doors, "KEEPALIVE_MS", 300)
    monkeypatch.setattr(doors, "PING_TIMEOUT_MS", 300)
    sidecar = start(**({} if listen is None else {"listen": listen, "insecure": True}))
    script = SILENT_ENGINE.format(target=sidecar.sidecar.target)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "open\n"
            assert sidecar.metric("specgov_connected_engines") == 1
            engine.send_signal(signal.SIGSTOP)
            eventually(lambda: sidecar.metric("specgov_connected_engines") == 0, "the silent engine's end")
        finally:
            engine.kill()


def test_metadata_beyond_the_limit(start: Make) -> None:
    sidecar = start()
    with pytest.raises(grpc.RpcError) as raised:
        sidecar.admin.ListEngines(pb.ListEnginesRequest(), timeout=60, metadata=(("k", "v" * 17_000),))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "metadata size exceeds" in raised.value.details()
    sidecar.admin.ListEngines(pb.ListEnginesRequest(), timeout=60, metadata=(("k", "v" * 8_000),))


def test_connections_beyond_the_limit_are_turned_away_and_the_rest_served(
    start: Make, eventually: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers: 1 stream, 16 above that, 1 watcher, 16 for unary calls is 34."""
    monkeypatch.setattr(doors, "CONNECTIONS_PER_WORKER", 1)
    sidecar = start(max_streams=1, max_watchers=1)
    engine = sidecar.stream()
    path = str(sidecar.sidecar.address.path)
    idle = [socket.socket(socket.AF_UNIX) for _ in range(60)]
    try:
        for connection in idle:
            connection.settimeout(60)
            connection.connect(path)
        turned_away = [connection for connection in idle if not connection.recv(1)]
        assert len(turned_away) == 60 - 33
        sidecar.admin.ListEngines(pb.ListEnginesRequest(), timeout=60)  # over the connection that was there
        assert engine.call.is_active()
    finally:
        for connection in idle:
            connection.close()

    def is_served_anew() -> bool:
        with grpc.insecure_channel(
            sidecar.sidecar.target, (("grpc.use_local_subchannel_pool", 1),)
        ) as channel:
            try:
                pb_grpc.ControllerAdminStub(channel).ListEngines(pb.ListEnginesRequest(), timeout=60)
            except grpc.RpcError:
                return False
        return True

    eventually(is_served_anew, "room for a new connection")
