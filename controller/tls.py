"""The sidecar's certificate: read from files, checked, and replaced while it serves when they change."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc

from specgov.controller.config import TlsConfig
from specgov.controller.logs import get_logger
from specgov.controller.watched_files import Stamp, stamp_of


class TlsError(ValueError):
    """The files for TLS cannot be used; the message says which, why, and what to do."""


class Certificates:
    """Certificate, key and the clients' authority of one sidecar.

    gRPC asks for them before each handshake; open connections keep theirs. ``refresh`` reads the files again
    where they have changed. Files that cannot be used, as while they are being replaced one by one, leave the
    old ones in force and are told of once.

    Raises:
        TlsError: the files cannot be used now.

    """

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self._paths: Sequence[str] = [
            path for path in (config.certificate, config.key, config.client_ca) if path is not None
        ]
        self._stamps = self._stat()
        self._current = self._load()

    def credentials(self) -> grpc.ServerCredentials:
        """For ``add_secure_port``; a client needs a certificate where there is an authority for clients'."""
        return grpc.dynamic_ssl_server_credentials(
            self._current,
            lambda: self._current,
            require_client_authentication=self._config.client_ca is not None,
        )

    def refresh(self) -> None:
        """Take the files' new contents, where they have changed and can be used."""
        stamps = self._stat()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            current = self._load()
        except TlsError as error:
            get_logger().error("new TLS files cannot be used; the old ones stay in force", problem=str(error))
            return
        if self._stat() == stamps:  # else they changed while they were read: the next round reads them again
            self._current = current
            get_logger().info("TLS files were read anew", certificate=self._config.certificate)

    def _stat(self) -> tuple[Stamp, ...]:
        return tuple(stamp_of(path) for path in self._paths)

    def _load(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        _check(config)
        client_ca = None if config.client_ca is None else _read(config.client_ca)
        pair = (_read(config.key), _read(config.certificate))
        return grpc.ssl_server_certificate_configuration([pair], client_ca)


def _check(config: TlsConfig) -> None:
    """Let OpenSSL say what is wrong: gRPC would only fail each handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Read first, for the system's words where one cannot be.
    _, key = (_read(path) for path in (config.certificate, config.key))
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except ssl.SSLError as error:
        why = "the key has a password" if b"ENCRYPTED" in key else (error.reason or "PEM lib")
        raise TlsError(
            f"TLS: {config.certificate} and {config.key} are not a certificate and its key in PEM, without a "
            f"password: {why.replace('_', ' ').lower()}"
        ) from error
    if config.client_ca is not None:
        _read(config.client_ca)
        try:
            context.load_verify_locations(config.client_ca)
        except ssl.SSLError as error:
            raise TlsError(f"TLS: {config.client_ca} holds no certificate in PEM") from error


def _no_password() -> str:
    """Without it OpenSSL would ask the terminal for an encrypted key's password."""
    return ""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"TLS: {path} cannot be read: {error.strerror}") from error
