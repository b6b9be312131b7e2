"""What an engine and its relay say to each other: one packet is a type byte and a body.

The socket keeps the bounds of packets, so there is no length. Both ends run the same installation: the form
is nobody else's and may change with any release.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields

from specgov.client.client import ClientStats
from specgov.client.messages import Decision, decision_from_proto, decision_to_proto
from specgov.client.stream import StreamLimits
from specgov.client.tls import TlsFiles
from specgov.proto.v1 import specgov_pb2 as pb

INFO = b"I"  # EngineInfo; the first packet to the relay
REPORT = b"R"  # StepReport
EVENT = b"E"  # EngineEvent
DECISION = b"D"  # seconds of CLOCK_MONOTONIC at which the relay got it (a double), then Decision
STATS = b"S"  # ClientStats of the relay's own client, as JSON

MAX_BYTES = 256 * 1024
"""Room for any packet: a socket's buffer, which has to hold it, is smaller by default."""

_STAMP = struct.Struct("<d")


def pack_decision(decision: Decision) -> bytes:
    """A packet; ``decision.received_s`` is on the system's monotonic clock."""
    return DECISION + _STAMP.pack(decision.received_s) + decision_to_proto(decision).SerializeToString()


def received_s(packet: bytes) -> float:
    """When the relay got the decision in ``packet``, on the system's monotonic clock."""
    return float(_STAMP.unpack_from(packet, 1)[0])


def unpack_decision(packet: bytes, tiers: frozenset[int], received_s: float) -> Decision | None:
    """The decision in ``packet``, which came at ``received_s`` of the caller's clock; None where refused."""
    return decision_from_proto(pb.Decision.FromString(packet[1 + _STAMP.size :]), tiers, received_s)


def pack_stats(stats: ClientStats) -> bytes:
    """A packet."""
    return STATS + json.dumps(asdict(stats)).encode()


def unpack_stats(packet: bytes) -> ClientStats:
    """The counts in ``packet``."""
    values = json.loads(packet[1:])
    return ClientStats(**{field.name: values[field.name] for field in fields(ClientStats)})


@dataclass(frozen=True, slots=True)
class RelayArguments:
    """What the engine's side tells its relay on the command line, as one JSON text."""

    socket_fd: int
    engine_pid: int
    target: str
    queue_size: int
    limits: StreamLimits
    tls: TlsFiles | None = None  # paths; what they hold is in no argument


def arguments_from_json(text: str) -> RelayArguments:
    """The arguments of which ``text`` is ``json.dumps(asdict(arguments))``."""
    values = json.loads(text)
    tls = values["tls"]
    read = {"limits": StreamLimits(**values["limits"]), "tls": None if tls is None else TlsFiles(**tls)}
    return RelayArguments(**(values | read))
