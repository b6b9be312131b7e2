"""A sidecar that answers what a test wants, and the command run in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from specgov.controller.cli.main import main
from specgov.proto.v1 import specgov_pb2_grpc


@dataclass
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]
Serve = Callable[[object], str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> Ran:
        try:
            code = main(argv)
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serves an object that has the methods of either service; gives its target."""
    servers: list[grpc.Server] = []

    def start(servicer: object) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(4))
        if isinstance(servicer, specgov_pb2_grpc.SpeculationControllerServicer):
            specgov_pb2_grpc.add_SpeculationControllerServicer_to_server(servicer, server)
        if isinstance(servicer, specgov_pb2_grpc.ControllerAdminServicer):
            specgov_pb2_grpc.add_ControllerAdminServicer_to_server(servicer, server)
        target = f"unix://{tmp_path}/{len(servers)}.sock"
        server.add_insecure_port(target)
        server.start()
        servers.append(server)
        return target

    yield start
    for server in servers:
        server.stop(None).wait()
