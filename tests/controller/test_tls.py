"""TLS: who gets in, certificates that change while the sidecar serves, and files that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from specgov.client.tls import TlsFiles, open_channel
from specgov.controller.config import ServeConfig, TlsConfig
from specgov.controller.listen import TcpAddress
from specgov.controller.server import Sidecar
from specgov.controller.tls import Certificates, TlsError
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

QUESTION = pb.DecideRequest(
    batch_size=1, accept_length_at=pb.AcceptLengthAt(accept_length=2.0, num_steps=3), policy="static:3"
)
StartTls = Callable[..., Sidecar]


@pytest.fixture
def start_tls(pki: Any) -> Iterator[StartTls]:
    """Start a sidecar on a free port of localhost; ``mutual``: clients need a certificate too."""
    with ExitStack() as stack:

        def start_one(*, mutual: bool = False) -> Sidecar:
            certificate, key = pki.issue("server", "localhost")
            tls = TlsConfig(certificate=certificate, key=key, client_ca=pki.ca if mutual else None)
            sidecar = Sidecar(ServeConfig(listen="localhost:0", tls=tls))
            stack.callback(sidecar.stop)
            sidecar.start()
            return sidecar

        yield start_one


def ask(sidecar: Sidecar, tls: TlsFiles | None) -> grpc.StatusCode:
    """OK where a question over a new connection is answered, else the status."""
    with open_channel(sidecar.target, tls, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            answer = pb_grpc.SpeculationControllerStub(channel).Decide(QUESTION, timeout=60)
        except grpc.RpcError as error:
            return error.code()
    assert answer.num_steps == 3
    return grpc.StatusCode.OK


def test_a_client_that_knows_the_authority_gets_in(start_tls: StartTls, pki: Any, other_pki: Any) -> None:
    sidecar = start_tls()
    assert ask(sidecar, TlsFiles(pki.ca)) == grpc.StatusCode.OK
    assert ask(sidecar, TlsFiles(other_pki.ca)) == grpc.StatusCode.UNAVAILABLE
    assert ask(sidecar, None) == grpc.StatusCode.UNAVAILABLE  # not without TLS either


def test_the_certificates_name_must_fit(start_tls: StartTls, pki: Any) -> None:
    sidecar = start_tls()
    pki.issue("server", "elsewhere.example")
    sidecar._doors.refresh()
    assert ask(sidecar, TlsFiles(pki.ca)) == grpc.StatusCode.UNAVAILABLE
    assert ask(sidecar, TlsFiles(pki.ca, server_name="elsewhere.example")) == grpc.StatusCode.OK


def test_mutual_tls_lets_in_who_has_a_certificate(start_tls: StartTls, pki: Any, other_pki: Any) -> None:
    sidecar = start_tls(mutual=True)
    assert ask(sidecar, TlsFiles(pki.ca, *pki.issue("client", "engine.example"))) == grpc.StatusCode.OK
    assert ask(sidecar, TlsFiles(pki.ca)) == grpc.StatusCode.UNAVAILABLE
    stranger = other_pki.issue("client", "engine.example")
    assert ask(sidecar, TlsFiles(pki.ca, *stranger)) == grpc.StatusCode.UNAVAILABLE


def test_a_new_certificate_counts_without_a_restart(start_tls: StartTls, pki: Any, other_pki: Any) -> None:
    """Of another authority, so that only the new one can satisfy a client that knows that authority."""
    sidecar = start_tls()
    with open_channel(sidecar.target, TlsFiles(pki.ca)) as channel:
        stub = pb_grpc.SpeculationControllerStub(channel)
        stub.Decide(QUESTION, timeout=60)
        for source in other_pki.issue("server", "localhost"):
            target = Path(pki.folder) / Path(source).name
            Path(source).replace(target)
        sidecar._doors.refresh()
        assert ask(sidecar, TlsFiles(other_pki.ca)) == grpc.StatusCode.OK
        assert ask(sidecar, TlsFiles(pki.ca)) == grpc.StatusCode.UNAVAILABLE
        stub.Decide(QUESTION, timeout=60)  # an open connection goes on


def test_a_bad_new_certificate_leaves_the_old_one_and_is_told_of_once(
    start_tls: StartTls, pki: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = start_tls()
    (pki.folder / "server.pem").write_text("not a certificate")
    for _ in range(3):
        sidecar._doors.refresh()
    assert ask(sidecar, TlsFiles(pki.ca)) == grpc.StatusCode.OK
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "the old ones stay in force" in str(errors[0].msg)
    pki.issue("server", "localhost")
    sidecar._doors.refresh()
    assert ask(sidecar, TlsFiles(pki.ca)) == grpc.StatusCode.OK


def test_certificate_and_key_may_be_replaced_one_by_one(pki: Any) -> None:
    certificate, key = pki.issue("server", "localhost")
    certificates = Certificates(TlsConfig(certificate=certificate, key=key))
    before = certificates._current
    new_certificate, new_key = pki.issue("new", "localhost")
    Path(new_certificate).replace(certificate)
    certificates.refresh()
    assert certificates._current is before  # a certificate and another one's key
    Path(new_key).replace(key)
    certificates.refresh()
    assert certificates._current is not before


def test_a_link_that_points_elsewhere_is_a_change(pki: Any) -> None:
    """As Kubernetes replaces the files of a secret."""
    folders = []
    for name in ("old", "new"):
        folder = pki.folder / name
        folder.mkdir()
        for source in pki.issue("server", "localhost"):
            Path(source).replace(folder / Path(source).name)
        folders.append(folder)
    data = pki.folder / "data"
    data.symlink_to(folders[0])
    certificates = Certificates(TlsConfig(certificate=str(data / "server.pem"), key=str(data / "server.key")))
    before = certificates._current
    (pki.folder / "swap").symlink_to(folders[1])
    (pki.folder / "swap").replace(data)
    certificates.refresh()
    assert certificates._current is not before


def test_files_that_cannot_be_used(pki: Any, other_pki: Any, tmp_path: Path) -> None:
    certificate, key = pki.issue("server", "localhost")
    _, other_key = other_pki.issue("server", "localhost")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for changes, says in (
        ({"key": other_key}, "key values mismatch"),
        ({"certificate": str(tmp_path / "none.pem")}, "none.pem cannot be read: No such file or directory"),
        ({"key": str(empty)}, "not a certificate and its key in PEM, without a password: "),
        ({"client_ca": str(empty)}, "empty.pem holds no certificate in PEM"),
        ({"client_ca": str(tmp_path)}, "cannot be read: Is a directory"),
    ):
        with pytest.raises(TlsError) as raised:
            Certificates(TlsConfig(**{"certificate": certificate, "key": key, **changes}))
        assert says in str(raised.value)
        assert "\n" not in str(raised.value)


def test_an_encrypted_key_is_refused_and_asks_nobody(pki: Any) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    certificate, key = pki.issue("server", "localhost")
    loaded = load_pem_private_key(Path(key).read_bytes(), None)
    locked = loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    Path(key).write_bytes(locked)
    with pytest.raises(TlsError, match="the key has a password"):
        Certificates(TlsConfig(certificate=certificate, key=key))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::1]", "localhost"])
def test_plain_tcp_must_be_meant(host: str) -> None:
    with pytest.raises(ValueError, match=r"TCP needs TLS .*--tls-certificate.*or --insecure"):
        ServeConfig(listen=f"{host}:0")
    with pytest.raises(ValueError, match=r"admin_listen .*TCP needs TLS"):
        ServeConfig(admin_listen=f"{host}:0")
    ServeConfig(listen=f"{host}:0", insecure=True)


def test_insecure_does_not_switch_tls_off(pki: Any) -> None:
    certificate, key = pki.issue("server", "localhost")
    tls = TlsConfig(certificate=certificate, key=key)
    sidecar = Sidecar(ServeConfig(listen="localhost:0", tls=tls, insecure=True))
    try:
        sidecar.start()
        assert isinstance(sidecar.address, TcpAddress)
        assert ask(sidecar, None) == grpc.StatusCode.UNAVAILABLE
    finally:
        sidecar.stop()


def test_the_log_names_an_address_at_which_strangers_get_in(
    start_tls: StartTls, caplog: pytest.LogCaptureFixture
) -> None:
    start_tls()
    assert "change engines' speed and use the admin service" in caplog.text
    caplog.clear()
    start_tls(mutual=True)
    assert "anyone who reaches" not in caplog.text
