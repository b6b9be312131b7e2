"""An engine made of HTTP/2 frames, which does what no gRPC client would."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from specgov.proto.v1 import specgov_pb2 as pb

DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK, END_HEADERS = 1, 4


class HandMadePeer:
    """An engine of HTTP/2 frames (RFC 9113) that grants no window beyond the one that all begin with.

    ``reads``: it reads and answers pings and settings; else it never reads a byte.
    """

    def __init__(self, path: Path, *, reads: bool = True) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._reader = threading.Thread(target=self._read, daemon=True) if reads else None
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/specgov.v1.SpeculationController/Control",
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        # Each a literal field without indexing and with a new name (RFC 7541, 6.2.2), no Huffman code.
        block = b"".join(
            bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()
            for name, value in fields.items()
        )
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send_frame(SETTINGS, 0, 0, b"")
        self._send_frame(HEADERS, END_HEADERS, 1, block)

    def __enter__(self) -> HandMadePeer:
        if self._reader is not None:
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join()
        self._socket.close()

    def send(self, message: pb.EngineMessage) -> None:
        data = message.SerializeToString()
        self._send_frame(DATA, 0, 1, b"\0" + len(data).to_bytes(4, "big") + data)

    def _send_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._socket.sendall(head + payload)

    def _read(self) -> None:
        with self._socket.makefile("rb") as file, contextlib.suppress(OSError):
            while len(head := file.read(9)) == 9:
                payload = file.read(int.from_bytes(head[:3], "big"))
                if head[3] in (SETTINGS, PING) and not head[4] & ACK:
                    self._send_frame(head[3], ACK, 0, payload if head[3] == PING else b"")
