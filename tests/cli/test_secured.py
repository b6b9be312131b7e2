"""Commands against a sidecar that wants TLS and a token: what the environment names, and what is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specgov.controller.config import ServeConfig, TlsConfig
from specgov.controller.server import Sidecar
from specgov.controller.validation import check_info
from specgov.proto.v1 import specgov_pb2 as pb

TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _keep_root_logger() -> Iterator[None]:
    """``serve`` sends all messages to this test's stderr."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TLS_CA", "TLS_CERTIFICATE", "TLS_KEY", "TLS_SERVER_NAME", "TOKEN_FILE"):
        monkeypatch.delenv(f"SPECGOV_{name}", raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(f"{TOKEN}\n")
    return str(path)


@pytest.fixture
def target(pki: Any, token_file: str) -> Iterator[str]:
    certificate, key = pki.issue("server", "localhost")
    tls = TlsConfig(certificate=certificate, key=key, client_ca=pki.ca)
    sidecar = Sidecar(ServeConfig(listen="localhost:0", tls=tls, admin_token_file=token_file))
    try:
        sidecar.start()
        yield sidecar.target
    finally:
        sidecar.stop()


def test_each_thing_that_is_missing_is_named(
    run: Any, target: str, pki: Any, token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run("engines", "--target", target)
    assert ran.code == 3  # plain text to a port that speaks TLS
    monkeypatch.setenv("SPECGOV_TLS_CA", pki.ca)
    ran = run("engines", "--target", target)
    assert (ran.code, "SPECGOV_TLS_CERTIFICATE" in ran.err) == (3, True), ran.err
    certificate, key = pki.issue("me", "me.example")
    monkeypatch.setenv("SPECGOV_TLS_CERTIFICATE", certificate)
    ran = run("engines", "--target", target)
    assert (ran.code, "SPECGOV_TLS_KEY" in ran.err) == (2, True), ran.err
    monkeypatch.setenv("SPECGOV_TLS_KEY", key)
    ran = run("engines", "--target", target)
    assert (ran.code, "SPECGOV_TOKEN_FILE" in ran.err) == (1, True), ran.err
    wrong = Path(token_file).with_name("wrong")
    wrong.write_text("of another sidecar's\n".replace(" ", "-"))
    monkeypatch.setenv("SPECGOV_TOKEN_FILE", str(wrong))
    ran = run("engines", "--target", target)
    assert (ran.code, "is none of this sidecar's" in ran.err) == (1, True), ran.err
    monkeypatch.setenv("SPECGOV_TOKEN_FILE", token_file)
    assert run("engines", "--target", target).out == "no engines yet\n"


def test_an_emulated_engine_connects_over_tls_and_is_watched(
    run: Any, target: str, pki: Any, token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = pki.issue("me", "me.example")
    for name, value in {
        "TLS_CA": pki.ca, "TLS_CERTIFICATE": certificate, "TLS_KEY": key, "TOKEN_FILE": token_file
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SPECGOV_{name}", value)
    ran = run("emulate", "--fast", "--duration-s", "0.2", "--target", target, "--json")
    assert ran.code == 0, ran.err
    assert '"steps_by_own_rule": 0' in ran.out
    assert "emulated" in run("engines", "list", "--target", target).out
    assert run("engines", "mode", "emulated", "shadow", "--target", target).code == 0


def test_a_token_goes_nowhere_in_clear_text(
    run: Any, token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGOV_TOKEN_FILE", token_file)
    ran = run("engines", "--target", "192.0.2.1:50051")
    assert (ran.code, "in clear text" in ran.err, TOKEN in ran.err) == (2, True, False)


@pytest.mark.parametrize(("text", "says"), [("", "is empty"), ("\xff", "holds no token"), (None, "No such")])
def test_a_token_file_that_cannot_be_used(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, says: str
) -> None:
    path = tmp_path / "t"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    monkeypatch.setenv("SPECGOV_TOKEN_FILE", str(path))
    ran = run("engines", "--target", f"{tmp_path}/s.sock")
    assert (ran.code, says in ran.err) == (2, True), ran.err


def test_serve_refuses_plain_tcp_and_says_what_to_do(run: Any, tmp_path: Path) -> None:
    ran = run("serve", "--listen", "127.0.0.1:0")
    assert ran.code == 2
    for word in ("--tls-certificate", "--tls-key", "--insecure", "unix socket"):
        assert word in ran.err
    ran = run("serve", "--listen", "127.0.0.1:0", "--tls-certificate", "a.pem")
    assert (ran.code, ran.err) == (2, "specgov: tls.key: is missing: give it, or leave tls out\n")
    ran = run("serve", "--listen", f"unix://{tmp_path}/s.sock", "--tls-certificate", "a", "--tls-key", "b")
    assert (ran.code, "a cannot be read" in ran.err) == (1, True), ran.err
    file = tmp_path / "specgov.toml"
    file.write_text('listen = "127.0.0.1:1"\n')
    ran = run("config", "check", str(file))
    assert (ran.code, ran.err.startswith(f"specgov: {file}: listen 127.0.0.1:1: TCP needs TLS")) == (1, True)
    file.write_text('[tls]\ncertificate = "a"\nkey = "b"\nca = "c"\n')
    assert (
        "line 4: tls.ca: unknown key: there are certificate, key, client_ca"
        in run("config", "check", str(file)).err
    )


def test_health_needs_no_token_and_has_an_exit_code_of_its_own(
    run: Any, tmp_path: Path, token_file: str
) -> None:
    sidecar = Sidecar(ServeConfig(listen=f"unix://{tmp_path}/h.sock", admin_token_file=token_file))
    try:
        sidecar.start()
        ran = run("health", "--target", sidecar.target)
        assert (ran.code, ran.out) == (0, "SERVING\n")
        service = "specgov.v1.SpeculationController"
        assert run("health", "--target", sidecar.target, "--service", service).code == 0
        assert run("health", "--target", sidecar.target, "--service", "nothing").code == 1
        sidecar._set_health(2)  # NOT_SERVING
        ran = run("health", "--target", sidecar.target)
        assert (ran.code, ran.out) == (1, "NOT_SERVING\n")
    finally:
        sidecar.stop()
    assert run("health", "--target", sidecar.target).code == 3


def test_many_engines_that_say_all_they_may_of_themselves_can_still_be_listed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 12 KB, 400 times: more than gRPC's client takes unless told otherwise (4 MiB)."""
    sidecar = Sidecar(ServeConfig(listen=f"unix://{tmp_path}/s.sock", policy="static:3"))
    texts = dict.fromkeys(
        ("engine", "engine_version", "model", "draft", "gpu", "client_version"), "\U0001f600" * 512
    )
    info = pb.EngineInfo(engine_id="e", boot_id="b", tiers=[0, 3], **texts)
    session: Any = object()
    try:
        sidecar.start()
        engine, _ = sidecar.engines.connect(session, info, check_info(info))
        monkeypatch.setattr(sidecar.engines, "all", lambda: [engine] * 400)
        ran = run("engines", "list", "--json", "--target", sidecar.target)
        assert ran.code == 0, ran.err
        assert len(json.loads(ran.out)) == 400
    finally:
        sidecar.stop()


def test_config_check_reads_the_files_that_the_sidecar_would_read(
    run: Any, pki: Any, tmp_path: Path, token_file: str
) -> None:
    certificate, key = pki.issue("server", "localhost")
    file = tmp_path / "specgov.toml"
    file.write_text(
        f'listen = "localhost:0"\nadmin_token_file = "{token_file}"\n'
        f'[tls]\ncertificate = "{certificate}"\nkey = "{key}"\nclient_ca = "{pki.ca}"\n'
    )
    assert run("config", "check", str(file)).code == 0
    Path(token_file).write_text("short\n")
    ran = run("config", "check", str(file))
    assert (ran.code, "line 1: a token has 16" in ran.err) == (1, True), ran.err
    Path(token_file).write_text(f"{TOKEN}\n")
    Path(pki.ca).unlink()
    ran = run("config", "check", str(file))
    assert (ran.code, "ca.pem cannot be read" in ran.err) == (1, True), ran.err
