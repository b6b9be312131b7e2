"""A channel to a sidecar: plain on a unix socket, over TCP with TLS where there are files for it."""

from __future__ import annotations

import errno
import grp
import pwd
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from specgov.client.errors import ClientError

CA_VARIABLE = "SPECGOV_TLS_CA"
CERTIFICATE_VARIABLE = "SPECGOV_TLS_CERTIFICATE"
KEY_VARIABLE = "SPECGOV_TLS_KEY"
SERVER_NAME_VARIABLE = "SPECGOV_TLS_SERVER_NAME"

_LARGEST_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What TLS needs on the client's side: paths of PEM files, which are read anew for each connection.

    ``ca``: the authorities that may have signed the sidecar's certificate. ``certificate`` and ``key``: the
    client's own, both or neither, which a sidecar with mutual TLS asks for. ``server_name``: the name in the
    sidecar's certificate where it is not the target's host.

    Raises:
        ClientError: a certificate without a key or a key without a certificate.

    """

    ca: str
    certificate: str = ""
    key: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        if not self.ca:
            raise ClientError(f"TLS without the sidecar's authority: name its file in {CA_VARIABLE}")
        if bool(self.certificate) != bool(self.key):
            raise ClientError(
                f"TLS with only one of certificate and key: name both ({CERTIFICATE_VARIABLE}, "
                f"{KEY_VARIABLE}), or neither"
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """The files' contents, as they are now.

        Raises:
            ClientError: a file cannot be read, or certificate and key do not go together.

        """
        ca = _read(self.ca)
        if not self.certificate:
            return grpc.ssl_channel_credentials(ca)
        key, certificate = _read(self.key), _read(self.certificate)
        _check_pair(self.certificate, self.key)
        return grpc.ssl_channel_credentials(ca, key, certificate)


def tls_from_environment(environment: Mapping[str, str]) -> TlsFiles | None:
    """The files that the ``SPECGOV_TLS_`` variables name; None where none is set.

    Raises:
        ClientError: some are set and others that they need are not.

    """
    names = (CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, SERVER_NAME_VARIABLE)
    values = [environment.get(name, "").strip() for name in names]
    return TlsFiles(*values) if any(values) else None


def is_unix(target: str) -> bool:
    """Whether ``target`` is a unix socket, on which there is no TLS: its permissions say who may connect."""
    return target.startswith("unix:")


def open_channel(
    target: str, tls: TlsFiles | None, options: Sequence[tuple[str, int | str]] = ()
) -> grpc.Channel:
    """A channel to ``target``, ``unix:///PATH`` or ``HOST:PORT``; ``tls`` counts for the latter only.

    Raises:
        ClientError: a file of ``tls`` cannot be read.

    """
    if tls is None or is_unix(target):
        return grpc.insecure_channel(target, options)
    if tls.server_name:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(target, tls.credentials(), options)


def may_not_open(target: str) -> str:
    """Why this user may not open the unix socket ``target``, and what to do; empty where that is not so.

    gRPC says no more than that it cannot connect.
    """
    if not is_unix(target):
        return ""
    path = Path(target.removeprefix("unix:").removeprefix("//"))
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            if probe.connect_ex(str(path)) not in (errno.EACCES, errno.EPERM):
                return ""
        except OSError:  # too long a path, or too slow a peer
            return ""
    for barrier in (path, *path.parents):
        try:
            found = barrier.stat()
        except OSError:  # it lies behind a folder that this user may not enter
            continue
        return (
            f"no permission to open {target}: {barrier} belongs to user {_user(found.st_uid)} and group "
            f"{_group(found.st_gid)}; join the group (usermod -aG GROUP USER) and log in again"
        )
    return f"no permission to open {target}"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _check_pair(certificate: str, key: str) -> None:
    """Let OpenSSL say what is wrong: gRPC would print lines of its own and fail each handshake."""
    import ssl  # it takes some MB, which an engine without TLS need not have

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or "PEM lib"
        raise ClientError(
            f"TLS: {certificate} and {key} are not a certificate and its key in PEM, without a password: "
            f"{why.replace('_', ' ').lower()} ({CERTIFICATE_VARIABLE}, {KEY_VARIABLE})"
        ) from error


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise ClientError(f"TLS: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data or len(data) > _LARGEST_FILE_BYTES:
        raise ClientError(f"TLS: {path} holds no PEM, which begins with -----BEGIN")
    return data
