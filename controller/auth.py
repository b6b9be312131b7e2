"""Tokens of operators: who may use the admin service."""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from specgov.controller.logs import get_logger
from specgov.controller.watched_files import stamp_of
from specgov.proto.v1 import specgov_pb2 as pb

ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["ControllerAdmin"].full_name
METADATA_KEY = "authorization"
SCHEME = "Bearer "
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 512
MAX_TOKENS = 64
REFUSAL = "the admin service wants a token: name its file in SPECGOV_TOKEN_FILE"
WRONG = (
    "the token in SPECGOV_TOKEN_FILE is none of this sidecar's: "
    "name the file that the sidecar was started with, or a copy"
)


class TokenError(ValueError):
    """The file of tokens cannot be used; the message says why, never what stands in it."""


def read_tokens(path: str) -> frozenset[bytes]:
    """SHA-256 of the tokens in a file, one a line; several, so that they can be replaced one after the other.

    Raises:
        TokenError: the file cannot be read, or holds no token that can be used.

    """
    hint = "make one with: openssl rand -hex 32"
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="ascii").splitlines()]
    except OSError as error:
        raise TokenError(f"tokens: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise TokenError(f"tokens: {path} is not ASCII text; {hint}") from None
    tokens = [line for line in lines if line]
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise TokenError(f"tokens: {path} must hold 1 to {MAX_TOKENS} tokens, one a line; {hint}")
    for number, token in enumerate(lines, start=1):
        if token and (
            not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS or not token.isprintable() or " " in token
        ):
            raise TokenError(
                f"tokens: {path}, line {number}: a token has {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} "
                f"characters without blanks; {hint}"
            )
    return frozenset(_digest(token) for token in tokens)


class TokenGate(grpc.ServerInterceptor):
    """Lets a call of the admin service through if it brings one of the tokens in a file; others pass.

    The file is read again by ``refresh`` where it has changed; one that cannot be used leaves the old tokens
    in force. ``on_refused`` is called with each call that was turned away.

    Raises:
        TokenError: the file cannot be used now.

    """

    def __init__(self, path: str, on_refused: Callable[[], object]) -> None:
        self._path = path
        self._on_refused = on_refused
        self._stamp = stamp_of(path)
        self._tokens = read_tokens(path)
        self._want_token: Any = _refusing(REFUSAL)
        self._want_other: Any = _refusing(WRONG)
        self._warn_if_open()

    def refresh(self) -> None:
        """Take the file's new tokens, where it has changed and can be used."""
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = read_tokens(self._path)
        except TokenError as error:
            get_logger().error("new tokens cannot be used; the old ones stay in force", problem=str(error))
            return
        self._warn_if_open()
        get_logger().info("tokens were read anew", path=self._path, tokens=len(self._tokens))

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The method's handler, or one that refuses."""
        if not handler_call_details.method.startswith(f"/{ADMIN_SERVICE}/"):
            return continuation(handler_call_details)
        given = [
            value for key, value in handler_call_details.invocation_metadata or () if key == METADATA_KEY
        ]
        if len(given) == 1 and self._is_known(given[0]):
            return continuation(handler_call_details)
        self._on_refused()
        get_logger().warning(
            "admin call refused", method=handler_call_details.method, token="wrong" if given else "none"
        )
        return self._want_other if given else self._want_token

    def _is_known(self, given: str | bytes) -> bool:
        """Compares digests with all tokens, however soon one fits, so that time tells nothing of any."""
        text = given.decode("ascii", "replace") if isinstance(given, bytes) else given
        digest = _digest(text.removeprefix(SCHEME)) if text.startswith(SCHEME) else b""
        return sum(hmac.compare_digest(digest, token) for token in self._tokens) > 0

    def _warn_if_open(self) -> None:
        try:
            mode = Path(self._path).stat().st_mode
        except OSError:
            return
        if mode & 0o007:
            get_logger().warning(
                "the file of tokens can be read by every user of this machine: chmod it to 0600 or 0640",
                path=self._path,
                mode=stat.filemode(mode),
            )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _refusing(details: str) -> grpc.RpcMethodHandler[bytes, bytes]:
    def refuse(_request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, details)
        return b""

    return grpc.unary_unary_rpc_method_handler(refuse)
