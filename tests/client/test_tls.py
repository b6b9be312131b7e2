"""TLS on the engine's side: both kinds of client, files that change or are missing, and what they say."""

from __future__ import annotations

import errno
import grp
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from specgov.client import ClientError, RelayClient, Report, StreamClient, TlsFiles
from specgov.client.tls import may_not_open, tls_from_environment
from specgov.proto.v1 import specgov_pb2 as pb

Eventually = Callable[[Callable[[], Any]], None]
CLIENTS = (StreamClient, RelayClient)


@pytest.fixture
def secured(pki: Any, sidecar: Any) -> Iterator[str]:
    """A target behind mutual TLS with the fake sidecar's behaviour."""
    certificate, key = (Path(path).read_bytes() for path in pki.issue("server", "localhost"))
    server = grpc.server(futures.ThreadPoolExecutor(4))
    method = grpc.stream_stream_rpc_method_handler(
        sidecar._control,
        request_deserializer=pb.EngineMessage.FromString,
        response_serializer=pb.Decision.SerializeToString,
    )
    service = pb.DESCRIPTOR.services_by_name["SpeculationController"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Control": method}),))
    credentials = grpc.ssl_server_credentials(
        [(key, certificate)], Path(pki.ca).read_bytes(), require_client_auth=True
    )
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    yield f"localhost:{port}"
    server.stop(0).wait()


def has_decision(client: StreamClient | RelayClient) -> bool:
    client.submit(Report(1, 1, 3))
    return client.current(2) is not None


@pytest.mark.parametrize("kind", CLIENTS)
def test_an_engine_gets_decisions_over_mutual_tls(
    kind: type[StreamClient] | type[RelayClient],
    secured: str,
    pki: Any,
    info: pb.EngineInfo,
    eventually: Eventually,
) -> None:
    client = kind(secured, info, tls=TlsFiles(pki.ca, *pki.issue("engine", "engine.example")))
    client.start()
    try:
        eventually(lambda: has_decision(client))
    finally:
        client.close()


@pytest.mark.parametrize("kind", CLIENTS)
def test_files_that_come_or_change_later_count_at_the_next_connection(
    kind: type[StreamClient] | type[RelayClient],
    secured: str,
    pki: Any,
    other_pki: Any,
    info: pb.EngineInfo,
    eventually: Eventually,
) -> None:
    """First none, then ones that the sidecar does not know: the engine goes on by its own rule meanwhile."""
    client = kind(secured, info, tls=TlsFiles(pki.ca, f"{pki.folder}/engine.pem", f"{pki.folder}/engine.key"))
    client.start()
    try:
        eventually(
            lambda: not has_decision(client) and "engine.key cannot be read" in client.stats().last_error
        )
        for path in other_pki.issue("engine", "engine.example"):
            Path(path).replace(pki.folder / Path(path).name)
        eventually(lambda: not has_decision(client) and "UNAVAILABLE" in client.stats().last_error)
        pki.issue("engine", "engine.example")
        eventually(lambda: has_decision(client))
    finally:
        client.close()


def test_tls_files_do_not_count_on_a_unix_socket(
    make_client: Callable[..., StreamClient], eventually: Eventually
) -> None:
    client = make_client(tls=TlsFiles("/there/is/no/such/file"))
    eventually(lambda: has_decision(client))


def test_the_environment_names_the_files() -> None:
    names = ("SPECGOV_TLS_CA", "SPECGOV_TLS_CERTIFICATE", "SPECGOV_TLS_KEY", "SPECGOV_TLS_SERVER_NAME")
    assert tls_from_environment({}) is None
    assert tls_from_environment(dict.fromkeys(names, "")) is None
    assert tls_from_environment({names[0]: "/ca"}) == TlsFiles("/ca")
    every = dict(zip(names, ("/ca", "/c", "/k", "name"), strict=True))
    assert tls_from_environment(every) == TlsFiles("/ca", "/c", "/k", "name")


@pytest.mark.parametrize(
    ("files", "says"),
    [(("", "/c", "/k"), "SPECGOV_TLS_CA"), (("/ca", "/c"), "name both"), (("/ca", "", "/k"), "name both")],
)
def test_files_that_do_not_go_together(files: tuple[str, ...], says: str) -> None:
    with pytest.raises(ClientError, match=says):
        TlsFiles(*files)


def test_a_certificate_and_the_key_of_another(pki: Any) -> None:
    certificate, _ = pki.issue("engine", "engine.example")
    _, key = pki.issue("other", "engine.example")
    with pytest.raises(ClientError, match=r"engine\.pem and .*other\.key are not .*: key values mismatch"):
        TlsFiles(pki.ca, certificate, key).credentials()


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_socket_that_may_not_be_opened(
    is_hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the tests may be root, who may open all: so the answer is the test's."""
    path = tmp_path / "folder" / "s.sock"
    path.parent.mkdir()
    if not is_hidden:
        path.touch()
    monkeypatch.setattr(socket.socket, "connect_ex", lambda _self, _path: errno.EACCES)
    said = may_not_open(f"unix://{path}")
    assert said.startswith(
        f"no permission to open unix://{path}: {path.parent if is_hidden else path} belongs"
    )
    assert f"group {grp.getgrgid(path.parent.stat().st_gid).gr_name};" in said


def test_a_socket_that_is_not_there_is_no_matter_of_permission(tmp_path: Path) -> None:
    assert may_not_open(f"unix://{tmp_path}/s.sock") == ""
    assert may_not_open(f"unix://{tmp_path}/{'x' * 120}") == ""
    assert may_not_open("localhost:1") == ""


def test_a_file_that_is_no_pem(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(b"\x30\x82")
    with pytest.raises(ClientError, match="holds no PEM"):
        TlsFiles(str(path)).credentials()
