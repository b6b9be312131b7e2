"""Addresses, permissions, stale and live sockets, and the words for what is in the way."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specgov.controller.listen import (
    ListenError,
    TcpAddress,
    UnixAddress,
    bind,
    default_address,
    is_loopback,
    parse_address,
)

Make = Callable[..., Any]


class FakeServer:
    """Binds nothing; notes what it is asked for."""

    def __init__(self) -> None:
        self.bound: list[object] = []

    def add_insecure_port(self, address: str) -> int:
        self.bound.append(address)
        return 4242

    def add_secure_port(self, address: str, credentials: object) -> int:
        self.bound.append((address, credentials))
        return 4242


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:///run/a.sock", UnixAddress(Path("/run/a.sock"))),
        ("unix:/run/a.sock", UnixAddress(Path("/run/a.sock"))),
        ("127.0.0.1:50051", TcpAddress("127.0.0.1", 50051)),
        ("localhost:0", TcpAddress("localhost", 0)),
        ("[::1]:50051", TcpAddress("::1", 50051)),
        (":50051", TcpAddress("127.0.0.1", 50051)),
    ],
)
def test_addresses(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "host:port", "host:65536", "host:-1", "host:²", "http://host:80", "tcp://0.0.0.0:1"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ListenError, match="expected HOST:PORT"):
        parse_address(text)


def test_socket_path_must_fit() -> None:
    with pytest.raises(ListenError, match="107 bytes"):
        parse_address(f"unix:///tmp/{'x' * 120}")
    with pytest.raises(ListenError, match="no path"):
        parse_address("unix:///")


def test_default_is_in_the_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_address() == UnixAddress(tmp_path / "specgov" / "specgov.sock")
    assert _mode(tmp_path / "specgov") == 0o700


def test_default_without_a_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"specgov-{os.getuid()}"
    assert default_address() == UnixAddress(folder / "specgov.sock")
    assert _mode(folder) == 0o700
    folder.chmod(0o755)
    with pytest.raises(ListenError, match="mode 0700"):
        default_address()


@pytest.mark.parametrize("runtime", ["", "run/user", "."])
def test_relative_runtime_folder_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_address().path.parent == tmp_path / f"specgov-{os.getuid()}"


def test_default_socket_path_must_fit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(ListenError, match="107 bytes"):
        default_address()


def test_default_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    owner = os.getuid()
    (tmp_path / "specgov").mkdir(mode=0o700)
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(ListenError, match=f"has owner {owner}"):
        default_address()


def test_default_folder_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "specgov").symlink_to("elsewhere")
    with pytest.raises(ListenError, match="must be a folder"):
        default_address()


def test_socket_is_for_its_user_only(start: Make) -> None:
    sidecar = start()
    assert _mode(sidecar.sidecar.address.path) == 0o600


def test_socket_for_a_group(start: Make) -> None:
    sidecar = start(socket_group=str(os.getgid()))
    path = sidecar.sidecar.address.path
    assert _mode(path) == 0o660
    assert path.stat().st_gid == os.getgid()


def test_umask_is_left_as_it_was(start: Make) -> None:
    before = os.umask(0o022)
    try:
        start()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_unknown_group(start: Make) -> None:
    with pytest.raises(ListenError, match="no group 'nobody-has-this-name'"):
        start(socket_group="nobody-has-this-name")


def test_stale_socket_is_replaced(start: Make, tmp_path: Path) -> None:
    path = tmp_path / "specgov.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()  # nobody listens on it any more
    start().stream()


def test_live_socket_is_refused(start: Make) -> None:
    first = start()
    with pytest.raises(ListenError, match="another process is serving this socket"):
        start()
    first.stream()  # and was not disturbed


def test_socket_goes_with_the_sidecar(start: Make, tmp_path: Path) -> None:
    start().sidecar.stop()
    start().stream()


def test_a_sidecar_that_ends_late_leaves_a_newer_ones_socket(start: Make, tmp_path: Path) -> None:
    """Its file was removed while it ran, and another sidecar took the place."""
    path = tmp_path / "specgov.sock"
    older = start()
    path.rename(tmp_path / "moved")  # while it is there the new file cannot have its inode
    newer = start()
    before = path.stat().st_ino
    older.sidecar.stop()
    assert path.stat().st_ino == before
    assert sorted(tmp_path.glob(".*")) == []
    newer.stream()
    newer.sidecar.stop()
    assert not path.exists()


def test_file_in_the_way_is_kept(start: Make, tmp_path: Path) -> None:
    (tmp_path / "specgov.sock").write_text("mine")
    with pytest.raises(ListenError, match="is not a socket"):
        start()
    assert (tmp_path / "specgov.sock").read_text() == "mine"


def test_missing_folder(start: Make, tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="there is no folder"):
        start(listen=f"unix://{tmp_path}/nowhere/specgov.sock")


def test_folder_without_permission(start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ListenError, match="no permission to write"):
        start()


def test_socket_that_may_not_be_probed_is_left_alone(
    start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "specgov.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    monkeypatch.setattr("socket.socket.connect_ex", lambda self, address: errno.EACCES)
    with pytest.raises(ListenError, match="no permission to open it"):
        start()
    assert path.exists()


def test_tcp_is_bound_without_credentials_or_with() -> None:
    server = FakeServer()
    credentials: Any = object()
    assert bind(server, TcpAddress("127.0.0.1", 0)) == TcpAddress("127.0.0.1", 4242)  # type: ignore[arg-type]
    bind(server, TcpAddress("127.0.0.1", 0), credentials=credentials)  # type: ignore[arg-type]
    assert server.bound == ["127.0.0.1:0", ("127.0.0.1:0", credentials)]


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "::", "localhost.example")))


def test_tcp_serves(start: Make) -> None:
    sidecar = start(listen="127.0.0.1:0", insecure=True)
    assert sidecar.sidecar.address.port != 0
    sidecar.stream()


def test_busy_port(start: Make) -> None:
    first = start(listen="127.0.0.1:0", insecure=True)
    with pytest.raises(ListenError, match="Address already in use; choose another port"):
        start(listen=first.sidecar.target, insecure=True)


def test_host_that_is_not_ours(start: Make) -> None:
    with pytest.raises(ListenError, match=r"192\.0\.2\.1:50051: cannot listen"):  # RFC 5737's example net
        start(listen="192.0.2.1:50051", insecure=True)
