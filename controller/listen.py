"""Where the sidecar listens: a unix socket that only its user may open, or a TCP port."""

from __future__ import annotations

import contextlib
import errno
import grp
import ipaddress
import os
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket on Linux (unix(7): sun_path has 108 bytes with the final zero)."""


class ListenError(OSError):
    """The address cannot be listened on; the message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket file."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host (name or address) and a port, 0 = any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """``unix:///PATH``, ``unix:PATH`` or ``HOST:PORT``.

    Raises:
        ListenError: it is none of them.

    """
    if text.startswith("unix:"):
        path = Path(text.removeprefix("unix:").removeprefix("//"))
        if not path.name:
            raise ListenError(f"{text}: no path of a socket file")
        if not path.is_absolute():
            path = Path.cwd() / path
        return UnixAddress(_checked_length(path))
    return parse_tcp_address(text)


def parse_tcp_address(text: str) -> TcpAddress:
    """``HOST:PORT``.

    Raises:
        ListenError: it is not.

    """
    host, colon, port = text.rpartition(":")
    if not colon or "/" in host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ListenError(f"{text}: expected HOST:PORT, or unix:///PATH where a socket will do")
    return TcpAddress(host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port))


def default_address() -> UnixAddress:
    """``specgov.sock`` in ``default_folder()``, which is made with mode 0700.

    Raises:
        ListenError: the folder cannot be made, or it belongs to or can be entered by somebody else.

    """
    folder = default_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ListenError(f"{folder}: cannot be made: {error.strerror}; use --listen") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ListenError(
            f"{folder}: must be a folder of user {os.getuid()} with mode 0700, "
            f"but has owner {found.st_uid} and mode {stat.filemode(found.st_mode)}; remove it or use --listen"
        )
    return UnixAddress(_checked_length(folder / "specgov.sock"))


def _checked_length(path: Path) -> Path:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ListenError(
            f"{path}: longer than the {MAX_SOCKET_PATH_BYTES} bytes that a socket's path may have"
        )
    return path


def default_folder() -> Path:
    """``specgov`` in ``$XDG_RUNTIME_DIR``, else a folder of the user's own in the temporary one; not made.

    A relative ``$XDG_RUNTIME_DIR`` counts as none, as the XDG Base Directory Specification has it.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute():
        return runtime / "specgov"
    return Path(tempfile.gettempdir()) / f"specgov-{os.getuid()}"


def bind(
    server: grpc.Server,
    address: Address,
    *,
    socket_group: str | None = None,
    credentials: grpc.ServerCredentials | None = None,
) -> Address:
    """Let ``server`` listen on ``address``; the address with the port that was bound.

    ``credentials`` are for TCP; a unix socket's permissions are its own.

    Raises:
        ListenError: in use, no permission, no such folder or group.

    """
    if isinstance(address, UnixAddress):
        _bind_unix(server, address, socket_group)
        return address
    return _bind_tcp(server, address, credentials)


def _bind_unix(server: grpc.Server, address: UnixAddress, socket_group: str | None) -> None:
    group_id = None if socket_group is None else _group_id(socket_group)
    _make_room(address.path)
    try:
        # grpc makes the file in add_insecure_port: with this mask it is open to no other user at any moment.
        with _umask(0o177):
            server.add_insecure_port(f"unix:{address.path}")
    except RuntimeError as error:
        raise ListenError(f"{address}: cannot listen: {error}") from error
    if group_id is None:
        address.path.chmod(0o600)
        return
    try:
        os.chown(address.path, -1, group_id)
    except PermissionError as error:
        address.path.unlink(missing_ok=True)
        raise ListenError(f"{address}: may not be given to group {socket_group}: join it first") from error
    address.path.chmod(0o660)


def file_id(path: Path) -> tuple[int, int] | None:
    """Which file is at ``path``, by device and inode; None where there is none.

    Raises:
        OSError: it cannot be looked at.

    """
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def spared(paths: Iterable[Path]) -> Iterator[None]:
    """Keep what stands at ``paths``, another sidecar's, from a gRPC server that stops.

    That removes its socket by name, whosever it is by then. So a file is missing for the moment of the stop.
    """
    kept = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in paths}
    for path, aside in kept.items():
        with contextlib.suppress(OSError):  # there is none, or the folder takes no second name
            os.link(path, aside, follow_symlinks=False)
    try:
        yield
    finally:
        for path, aside in kept.items():
            with contextlib.suppress(OSError):
                os.link(aside, path, follow_symlinks=False)
            aside.unlink(missing_ok=True)


def _make_room(path: Path) -> None:
    """Remove a socket file that nobody serves any more; refuse anything else that is in the way."""
    folder = path.parent
    if not folder.is_dir():
        raise ListenError(f"{path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ListenError(f"{path}: no permission to write in {folder}")
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ListenError(f"{path}: exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        result = probe.connect_ex(str(path))
    if result == errno.ECONNREFUSED:
        path.unlink()
    elif result in (errno.EACCES, errno.EPERM):
        raise ListenError(f"{path}: a socket of another user, with no permission to open it")
    elif result != errno.ENOENT:
        raise ListenError(f"{path}: another process is serving this socket; stop it or choose another path")


def _bind_tcp(
    server: grpc.Server, address: TcpAddress, credentials: grpc.ServerCredentials | None
) -> TcpAddress:
    check_port_is_free(address)
    try:
        port = (
            server.add_insecure_port(str(address))
            if credentials is None
            else server.add_secure_port(str(address), credentials)
        )
    except RuntimeError as error:
        raise ListenError(f"{address}: cannot listen: {error}") from error
    return TcpAddress(address.host, port)


def check_port_is_free(address: TcpAddress) -> None:
    """Try to bind the port, for the system's own words on why it cannot be.

    Raises:
        ListenError: the port is in use, not permitted, or the host is not one of this machine's.

    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        hint = "; choose another port or stop its user" if error.errno == errno.EADDRINUSE else ""
        raise ListenError(f"{address}: cannot listen: {error.strerror}{hint}") from error


def is_loopback(host: str) -> bool:
    """Whether the host is ``localhost`` or a loopback address; other names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _group_id(group: str) -> int:
    try:
        return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ListenError(f"there is no group {group!r}") from None


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
