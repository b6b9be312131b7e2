"""A channel to a sidecar: plain on a unix socket, over TCP with TLS where there are files for it."""

from __future__ import annotations

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
            ClientError: a file cannot be read.

        """
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca),
            private_key=_read(self.key) if self.key else None,
            certificate_chain=_read(self.certificate) if self.certificate else None,
        )


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


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise ClientError(f"TLS: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in data or len(data) > _LARGEST_FILE_BYTES:
        raise ClientError(f"TLS: {path} holds no PEM, which begins with -----BEGIN")
    return data
