"""What an engine and its relay say to each other.

By a board (``specgov.client.board``): to the relay packets, of a type byte and a body each; from it the
newest decision, and its client's counts. A socket wakes the relay where it sleeps, and ends with either
process. Both ends run the same installation: the form is nobody else's and may change with any release.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from specgov.client.client import ClientStats
from specgov.client.messages import Decision, Report, TierRange, one_byte_each, two_bytes_each
from specgov.client.stream import StreamLimits
from specgov.client.tls import TlsFiles

INFO = b"I"  # EngineInfo, as the protocol has it; the first packet to the relay
REPORT = b"R"
EVENT = b"E"  # EngineEvent, as the protocol has it

WAKE_UP = b"W"
"""All that goes by the socket."""

# The engine's thread writes a report and reads a decision at each step. As structs they cost it a fraction of
# what protobuf's messages do; the relay makes messages of them.
# The fields are in their order, with what tells None before them; drops and the arrays' bytes come last.
_REPORT = struct.Struct("<c Q 2I 2Q 2I ? I b ?d 4? Q q 3I")
# Of a decision the time, its number and its step, which are its own; and the rest, mostly the last one's.
_DECISION = struct.Struct("<d 2Q")
_DECISION_REST = struct.Struct("<5I i ?d 2I")
_RANGE = struct.Struct("<3I")
_NOT_KNOWN = -1


def pack_report(report: Report, reports_dropped: int) -> bytes:
    """A packet.

    Raises:
        AttributeError, TypeError, ValueError: a value is of the wrong kind or outside its field's range.

    """
    (
        step_id,
        batch_size,
        num_steps,
        accepted,
        slots,
        generations,
        sum_seq_len_tokens,
        max_seq_len_tokens,
        waiting_requests,
        step_time_us,
        step_time_valid,
        padded_batch_size,
        graph_ran,
        kv_use,
        after_prefill,
        after_idle,
        has_grammar,
        warm_up,
        decision_id,
        rule,
    ) = report  # at once: twenty attributes would take longer than all the rest
    # Calls, too, cost more than what they do.
    if not isinstance(accepted, bytes):
        accepted = one_byte_each(accepted)
    if not isinstance(slots, bytes):
        slots = two_bytes_each(slots)
    if not isinstance(generations, bytes):
        generations = one_byte_each(generations)
    try:
        head = _REPORT.pack(
            REPORT,
            step_id,
            batch_size,
            num_steps,
            sum_seq_len_tokens,
            max_seq_len_tokens,
            waiting_requests,
            step_time_us,
            step_time_valid,
            padded_batch_size,
            _NOT_KNOWN if graph_ran is None else graph_ran,
            kv_use is not None,
            kv_use or 0.0,
            after_prefill,
            after_idle,
            has_grammar,
            warm_up,
            decision_id,
            _NOT_KNOWN if rule is None else rule,
            reports_dropped,
            len(accepted),
            len(slots),
        )
    except struct.error as error:
        raise ValueError(str(error)) from error
    return head + accepted + slots + generations


def reports_in(packets: Iterable[bytes]) -> int:
    """How many reports ``packets`` hold and tell to have been dropped."""
    return sum(1 + unpack_report(packet)[1] for packet in packets if packet.startswith(REPORT))


def unpack_report(packet: bytes) -> tuple[Report, int]:
    """The report in ``packet``, and how many were dropped before it."""
    (
        _,
        step_id,
        batch_size,
        num_steps,
        sum_seq_len_tokens,
        max_seq_len_tokens,
        waiting_requests,
        step_time_us,
        step_time_valid,
        padded_batch_size,
        graph_ran,
        kv_known,
        kv_use_ratio,
        after_prefill,
        after_idle,
        has_grammar,
        warm_up,
        decision_id,
        rule,
        reports_dropped,
        accepted_bytes,
        slots_bytes,
    ) = _REPORT.unpack_from(packet)
    slots_at = _REPORT.size + accepted_bytes
    generations_at = slots_at + slots_bytes
    report = Report(
        step_id=step_id,
        batch_size=batch_size,
        num_steps=num_steps,
        accepted=packet[_REPORT.size : slots_at],
        slots=packet[slots_at:generations_at],
        generations=packet[generations_at:],
        sum_seq_len_tokens=sum_seq_len_tokens,
        max_seq_len_tokens=max_seq_len_tokens,
        waiting_requests=waiting_requests,
        step_time_us=step_time_us,
        step_time_valid=step_time_valid,
        padded_batch_size=padded_batch_size,
        cuda_graph_ran=None if graph_ran == _NOT_KNOWN else bool(graph_ran),
        kv_use_ratio=kv_use_ratio if kv_known else None,
        after_prefill=after_prefill,
        after_idle=after_idle,
        has_grammar=has_grammar,
        warm_up=warm_up,
        decision_id=decision_id,
        engine_rule_num_steps=None if rule == _NOT_KNOWN else rule,
    )
    return report, reports_dropped


def pack_decision(decision: Decision) -> bytes:
    """A packet; ``decision.received_s`` is on the system's monotonic clock."""
    policy, policy_version = decision.policy.encode(), decision.policy_version.encode()
    head = _DECISION.pack(
        decision.received_s, decision.decision_id, decision.known_step_id
    ) + _DECISION_REST.pack(
        decision.num_steps,
        decision.batch_size_min,
        decision.batch_size_max,
        decision.ttl_steps,
        decision.ttl_ms,
        decision.reason,
        decision.propensity is not None,
        decision.propensity or 0.0,
        len(policy),
        len(policy_version),
    )
    return b"".join((head, policy, policy_version, *(_RANGE.pack(*other) for other in decision.neighbours)))


def unpack_decision(packet: bytes, clock_ahead_s: float = 0.0) -> Decision:
    """The decision in ``packet``, received by a clock that is ``clock_ahead_s`` ahead of the system's."""
    received_s, decision_id, known_step_id = _DECISION.unpack_from(packet)
    fields = (decision_id, known_step_id, *_rest(packet[_DECISION.size :]), received_s + clock_ahead_s)
    return tuple.__new__(Decision, fields)  # faster than Decision(*fields)


@functools.lru_cache(maxsize=16)
def _rest(
    packed: bytes,
) -> tuple[int, int, int, tuple[TierRange, ...], int, int, int, str, str, float | None]:
    """``Decision``'s fields from ``num_steps`` to ``propensity``; kept, since few of them change often."""
    (
        num_steps,
        batch_size_min,
        batch_size_max,
        ttl_steps,
        ttl_ms,
        reason,
        propensity_known,
        propensity,
        policy_bytes,
        version_bytes,
    ) = _DECISION_REST.unpack_from(packed)
    version_at = _DECISION_REST.size + policy_bytes
    ranges_at = version_at + version_bytes
    return (
        num_steps,
        batch_size_min,
        batch_size_max,
        tuple(map(TierRange._make, _RANGE.iter_unpack(packed[ranges_at:]))),
        ttl_steps,
        ttl_ms,
        reason,
        packed[_DECISION_REST.size : version_at].decode(),
        packed[version_at:ranges_at].decode(),
        propensity if propensity_known else None,
    )


def pack_stats(stats: ClientStats) -> bytes:
    """A packet."""
    return json.dumps(asdict(stats)).encode()


def unpack_stats(packet: bytes) -> ClientStats:
    """The counts in ``packet``."""
    values = json.loads(packet)
    return ClientStats(**{field.name: values[field.name] for field in fields(ClientStats)})


@dataclass(frozen=True, slots=True)
class RelayArguments:
    """What the engine's side tells its relay on the command line, as one JSON text."""

    socket_fd: int
    board_fd: int
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
