"""Many engines on one thread: the least HTTP/2 that a sidecar takes for a gRPC client.

A real client costs about as much CPU as the sidecar, so on a machine of two cores real clients would be
measured together with it, or in its place. One engine here is one socket: it sends prepared reports at its
pace, reads decisions, and keeps the protocol's flow control.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from dataclasses import dataclass, field

import numpy as np

from specgov.proto.v1 import specgov_pb2 as pb

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
STREAM = 1
SETTINGS_INITIAL_WINDOW_SIZE = 4
DEFAULT_WINDOW = 65_535
LARGEST_WINDOW = 2**31 - 1
TIERS = (0, 1, 3)


class LoadError(RuntimeError):
    """The sidecar ended the stream or does not speak HTTP/2."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(path: str) -> bytes:
    """A request's headers, each a literal that is not indexed, so that no table has to be kept."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    coded = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, STREAM, coded)


def example_report(batch_size: int) -> pb.StepReport:
    """A report of a step at num_steps 3 in which every request has accepted one draft."""
    return pb.StepReport(
        batch_size=batch_size,
        padded_batch_size=batch_size,
        cuda_graph_ran=True,
        num_steps=3,
        accepted_drafts=b"\x01" * batch_size,
        slots_u16le=np.arange(batch_size, dtype="<u2").tobytes(),
        slot_generations_u8=bytes(batch_size),
        sum_seq_len_tokens=1_000 * batch_size,
        max_seq_len_tokens=2_000,
        kv_use_ratio=0.5,
        step_time_us=5_000,
        step_time_valid=True,
    )


class RawEngine:
    """One engine on one connection; a boot id that is not given is one of its own."""

    def __init__(self, socket_path: str, engine_id: str, batch_size: int, boot_id: str | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(socket_path)
        self.sent_s: dict[int, float] = {}
        self.next_s = 0.0
        self.steps = 0
        self.not_sent = 0
        self.round_trips_s: dict[int, float] = {}
        self._report = example_report(batch_size)
        self._window = {0: DEFAULT_WINDOW, STREAM: DEFAULT_WINDOW}
        self._buffer = b""
        self._body = b""
        settings = struct.pack(">HI", SETTINGS_INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        # The sidecar may send as much as it likes on the connection as well as on the stream.
        more = struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)
        path = "/specgov.v1.SpeculationController/Control"
        info = pb.EngineInfo(
            engine_id=engine_id,
            boot_id=str(time.time_ns()) if boot_id is None else boot_id,
            engine="load",
            tiers=TIERS,
            max_running_requests=max(256, batch_size),
        )
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(SETTINGS, 0, 0, settings)
            + frame(WINDOW_UPDATE, 0, 0, more)
            + headers(path)
        )
        self._send_message(pb.EngineMessage(info=info))

    def step(self) -> None:
        """Send the next report; leave it out, as a client would, where the sidecar left no room for it."""
        self.steps += 1
        self._report.step_id = self.steps
        self.sent_s[self.steps] = time.monotonic()
        self._send_message(pb.EngineMessage(report=self._report))

    def receive(self) -> None:
        """Read what has come."""
        chunk = self.socket.recv(65_536)
        if not chunk:
            raise LoadError("the sidecar closed the connection")
        now_s = time.monotonic()
        self._buffer += chunk
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < 9 + size:
                return
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big")
            payload, self._buffer = self._buffer[9 : 9 + size], self._buffer[9 + size :]
            self._take_frame(kind, flags, stream, payload, now_s)

    def close(self) -> None:
        self.socket.close()

    def _send_message(self, message: pb.EngineMessage) -> bool:
        """Send, where there is room; whether there was."""
        body = message.SerializeToString()
        payload = b"\0" + struct.pack(">I", len(body)) + body
        if min(self._window.values()) < len(payload):
            self.not_sent += 1
            return False
        for stream in self._window:
            self._window[stream] -= len(payload)
        self.socket.sendall(frame(DATA, 0, STREAM, payload))
        return True

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytes, now_s: float) -> None:
        if kind == DATA:
            self._take_body(payload, now_s)
        elif kind == WINDOW_UPDATE:
            self._window[stream] += struct.unpack(">I", payload)[0]
        elif kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == SETTINGS_INITIAL_WINDOW_SIZE:
                    self._window[STREAM] += value - DEFAULT_WINDOW
            self.socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
            raise LoadError(f"the sidecar ended the stream: {payload!r}")

    def _take_body(self, payload: bytes, now_s: float) -> None:
        self._body += payload
        while len(self._body) >= 5:
            size = int.from_bytes(self._body[1:5], "big")
            if len(self._body) < 5 + size:
                return
            decision = pb.Decision.FromString(self._body[5 : 5 + size])
            self._body = self._body[5 + size :]
            self._take_decision(decision, now_s)

    def _take_decision(self, decision: pb.Decision, now_s: float) -> None:
        if decision.known_step_id in self.sent_s:
            self.round_trips_s[decision.known_step_id] = now_s - self.sent_s[decision.known_step_id]


@dataclass
class LoadResult:
    """What came back for ``steps`` steps; ``round_trips_s`` has one entry for each that was decided on."""

    steps: int = 0
    not_sent: int = 0
    in_time: int = 0
    round_trips_s: list[float] = field(default_factory=list)


def run_load(
    socket_path: str, engines: int, step_s: float, warm_up_s: float, seconds: float, batch_size: int
) -> LoadResult:
    """Let ``engines`` engines make a step every ``step_s``; only steps after ``warm_up_s`` are counted.

    A decision is in time if it came before the engine's next step.
    """
    fleet = [RawEngine(socket_path, f"load-{number}", batch_size) for number in range(engines)]
    by_socket = {engine.socket: engine for engine in fleet}
    start_s = time.monotonic()
    for number, engine in enumerate(fleet):
        engine.next_s = start_s + step_s * number / engines
    end_s = start_s + warm_up_s + seconds
    while (now_s := time.monotonic()) < end_s:
        for engine in fleet:
            if engine.next_s <= now_s:
                engine.step()
                engine.next_s += step_s
        wait_s = max(0.0, min(engine.next_s for engine in fleet) - time.monotonic())
        for ready in select.select(list(by_socket), [], [], wait_s)[0]:
            by_socket[ready].receive()
    return _count(fleet, start_s + warm_up_s, end_s - step_s, step_s)


def _count(fleet: list[RawEngine], from_s: float, to_s: float, step_s: float) -> LoadResult:
    result = LoadResult()
    for engine in fleet:
        counted = [step_id for step_id, sent_s in engine.sent_s.items() if from_s <= sent_s <= to_s]
        result.steps += len(counted)
        result.not_sent += engine.not_sent
        round_trips_s = [engine.round_trips_s[i] for i in counted if i in engine.round_trips_s]
        result.round_trips_s += round_trips_s
        result.in_time += sum(seconds <= step_s for seconds in round_trips_s)
        engine.close()
    return result
