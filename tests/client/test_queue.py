"""What reaches the sidecar of what the engine queued: order, drops, and counts that add up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from specgov.client import Report, StreamClient
from specgov.client.mailbox import Mailbox
from specgov.client.messages import report_to_proto
from specgov.client.sender import Counters, Sender
from specgov.proto.v1 import specgov_pb2 as pb

KIND = pb.EngineEvent.KIND_WEIGHTS_UPDATED
INFO = pb.EngineMessage(info=pb.EngineInfo(tiers=[0]))


def submit(mailbox: Mailbox, report: Report) -> None:
    mailbox.submitted += 1
    mailbox.reports.append((mailbox.submitted, report))


def drain(mailbox: Mailbox, counters: Counters) -> list[pb.EngineMessage]:
    """All that a new stream sends of what is queued now, without EngineInfo."""
    sender = Sender(INFO, mailbox, counters, lambda: 0.0)
    sender.finish()
    info, *rest = sender.messages()
    assert info == INFO
    return rest


@given(
    queue_size=st.integers(1, 8),
    rounds=st.lists(st.lists(st.sampled_from(["report", "event"]), max_size=20), min_size=1, max_size=4),
)
def test_the_newest_reports_are_sent_in_order_and_every_drop_is_counted(
    queue_size: int, rounds: list[list[str]]
) -> None:
    """Each round queues without a connection, then a new stream sends; the model is a list that is cut."""
    mailbox, counters = Mailbox(queue_size), Counters()
    step_id = 0
    for operations in rounds:
        expected: list[tuple[str, int]] = []
        for operation in operations:
            if operation == "report":
                step_id += 1
                submit(mailbox, Report(step_id, 1, 0))
            else:
                mailbox.events.append((mailbox.submitted, KIND, step_id))
            expected.append((operation, step_id))
        reports = [entry for entry in expected if entry[0] == "report"]
        dropped = set(reports[: max(0, len(reports) - queue_size)])
        messages = drain(mailbox, counters)
        sent = [
            ("report", m.report.step_id) if m.HasField("report") else ("event", m.event.step_id)
            for m in messages
        ]
        assert sent == [entry for entry in expected if entry not in dropped]
        counts = [m.report.reports_dropped for m in messages if m.HasField("report")]
        assert counts == [len(dropped), *[0] * (len(counts) - 1)][: len(counts)]
    assert counters.sent == counters.taken
    assert counters.sent_number == mailbox.submitted


@given(queue_size=st.integers(1, 8), operations=st.lists(st.sampled_from(["submit", "send"]), max_size=100))
def test_sent_dropped_and_queued_add_up_at_every_moment(queue_size: int, operations: list[str]) -> None:
    mailbox, counters = Mailbox(queue_size), Counters()
    messages = Sender(INFO, mailbox, counters, lambda: 0.0).messages()
    assert next(messages) == INFO
    dropped = 0
    for operation in operations:
        if operation == "submit":
            submit(mailbox, Report(mailbox.submitted + 1, 1, 0))
        elif mailbox.reports:
            dropped += next(messages).report.reports_dropped
        # Drops show up in the report that follows them, so those before the queue's head are still to come.
        to_come = mailbox.reports[0][0] - counters.sent_number - 1 if mailbox.reports else 0
        assert mailbox.submitted == counters.sent + dropped + to_come + len(mailbox.reports)


def test_a_report_that_cannot_be_sent_is_counted_and_told_to_the_sidecar() -> None:
    mailbox, counters = Mailbox(8), Counters()
    submit(mailbox, Report(1, -4, 0))
    submit(mailbox, Report(2, 4, 0, accepted=np.array([1, 300])))  # type: ignore[arg-type]
    submit(mailbox, Report(3, 4, 0))
    messages = drain(mailbox, counters)
    assert [(m.report.step_id, m.report.reports_dropped) for m in messages] == [(3, 2)]
    assert (counters.reports_rejected, counters.sent) == (2, 1)
    assert "step_id=2" in counters.last_error


def test_an_event_waits_for_the_report_that_was_queued_before_it() -> None:
    """The engine queues a report and an event just after the sender has found no report."""
    mailbox, counters = Mailbox(8), Counters()

    class Overtaken(deque[tuple[int, Report]]):
        def popleft(self) -> tuple[int, Report]:
            if not self and not mailbox.submitted:
                submit(mailbox, Report(1, 4, 0))
                mailbox.events.append((1, KIND, 1))
                raise IndexError
            return super().popleft()

    mailbox.reports = Overtaken()
    mailbox.events.append((0, KIND, 0))
    sent = [message.WhichOneof("message") for message in drain(mailbox, counters)]
    assert sent == ["event", "report", "event"]


def test_every_field_reaches_the_wire() -> None:
    """Distinct values, so that no two fields can be mixed up; bytes by hand: 258 = 0x0102, low byte first."""
    report = Report(
        step_id=1,
        batch_size=2,
        num_steps=3,
        accepted=np.array([0, 3], dtype=np.uint8),
        slots=np.array([258, 5], dtype=">u2"),
        generations=b"\x07\x08",
        sum_seq_len_tokens=9,
        max_seq_len_tokens=10,
        waiting_requests=11,
        step_time_us=12,
        step_time_valid=True,
        padded_batch_size=13,
        cuda_graph_ran=False,
        kv_use_ratio=0.25,
        after_prefill=True,
        after_idle=True,
        has_grammar=True,
        warm_up=True,
        decision_id=14,
        engine_rule_num_steps=0,
    )
    assert report_to_proto(report, 15) == pb.StepReport(
        step_id=1,
        batch_size=2,
        num_steps=3,
        accepted_drafts=b"\x00\x03",
        slots_u16le=b"\x02\x01\x05\x00",
        slot_generations_u8=b"\x07\x08",
        sum_seq_len_tokens=9,
        max_seq_len_tokens=10,
        waiting_requests=11,
        step_time_us=12,
        step_time_valid=True,
        padded_batch_size=13,
        cuda_graph_ran=False,
        kv_use_ratio=0.25,
        after_prefill=True,
        after_idle=True,
        has_grammar=True,
        warm_up=True,
        decision_id=14,
        reports_dropped=15,
        engine_rule_num_steps=0,
    )
    own = {"reports_dropped", "round_trip_us"}  # the stream's, not the engine's
    assert len(Report._fields) == len(pb.StepReport.DESCRIPTOR.fields) - len(own)


def test_what_is_not_known_stays_absent() -> None:
    message = report_to_proto(Report(1, 2, 3), 0)
    assert not any(
        message.HasField(field) for field in ("cuda_graph_ran", "kv_use_ratio", "engine_rule_num_steps")
    )


@pytest.mark.parametrize(("submitted", "queue_size"), [(3, 4), (10, 4)])
def test_reports_from_before_the_connection_are_sent_as_far_as_they_fit(
    sidecar: Any,
    make_client: Callable[..., StreamClient],
    eventually: Callable[..., None],
    submitted: int,
    queue_size: int,
) -> None:
    client = make_client(started=False, queue_size=queue_size)
    for step_id in range(1, submitted + 1):
        client.submit(Report(step_id, 1, 0))
    kept = min(submitted, queue_size)
    assert (client.stats().dropped, client.stats().queued) == (submitted - kept, kept)
    client.start()
    assert sidecar.next_message().HasField("info")
    reports = [sidecar.next_report() for _ in range(kept)]
    assert [r.step_id for r in reports] == list(range(submitted - kept + 1, submitted + 1))
    assert [r.reports_dropped for r in reports] == [submitted - kept] + [0] * (kept - 1)
    eventually(lambda: client.stats().queued == 0)
    stats = client.stats()
    assert (stats.submitted, stats.sent, stats.dropped) == (submitted, kept, submitted - kept)
