"""Whatever is sent: the sidecar lives, refuses with a status, and decides what the engine can follow.

More of it: ``SPECGOV_FUZZ_EXAMPLES=20000 python -m pytest tests/abuse/test_fuzz.py``, where each run draws
other examples; ``benchmarks/fuzz.py`` sends a hundred thousand messages that it makes without hypothesis.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from decision_check import StreamCheck, not_finite, tier_problems
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specgov.controller.server import Sidecar
from specgov.policies.registry import policy_names
from specgov.proto.v1 import specgov_pb2 as pb

EXAMPLES = int(os.environ.get("SPECGOV_FUZZ_EXAMPLES", "0"))
settings.register_profile(
    "abuse",
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
ABUSE = settings.get_profile("abuse")

WAIT_S = 60.0
TIERS = (0, 1, 3, 5)
ENGINES = ("a", "b", "c")
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
METHODS = tuple(
    method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming and not method.server_streaming
)


def edges(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 8) | st.sampled_from([32, 64, 65_535, 65_536, 2 ** (bits - 1), 2**bits - 1])


TEXTS = (
    st.sampled_from(
        [*ENGINES, "default", "none", "auto", "ppo:/etc/passwd", "static:3", "static:", "\x1b[2J"]
    )
    | st.sampled_from(policy_names())
    | st.text(max_size=200)
)
BY_TYPE: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_UINT32: edges(32),
    FieldDescriptor.CPPTYPE_UINT64: edges(64),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 8) | st.integers(-(2**31), 2**31 - 1),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        value: st.SearchStrategy[Any] = st.deferred(lambda: messages(getattr(pb, field.message_type.name)))
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        value = st.binary(max_size=140) if field.type == FieldDescriptor.TYPE_BYTES else TEXTS
    else:
        value = BY_TYPE[field.cpp_type]
    return st.lists(value, max_size=40) if field.is_repeated else value


def messages(kind: type[Message], **given_fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Message]:
    """Any message of a kind, each field present or not; of ``given_fields`` those."""
    optional = {
        field.name: values(field) for field in kind.DESCRIPTOR.fields if field.name not in given_fields
    }
    chosen = st.fixed_dictionaries(dict(given_fields), optional=optional)
    return chosen.map(lambda fields: kind(**fields))


def nearly(sound: dict[str, Any]) -> st.SearchStrategy[pb.StepReport]:
    """A sound report of which at most three fields are any."""
    fields = {field.name: values(field) for field in pb.StepReport.DESCRIPTOR.fields}
    changed = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )
    return changed.map(lambda change: pb.StepReport(**{**sound, **change}))


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """What an engine with ``TIERS`` may say after its EngineInfo: sound, nearly sound, or anything."""
    said = []
    for step in range(1, draw(st.integers(1, 25))):
        live = draw(st.lists(st.integers(0, 3), max_size=8))
        sound = {
            "step_id": step,
            "batch_size": max(1, len(live)),
            "num_steps": 3,
            "accepted_drafts": bytes(live),
            "slots_u16le": b"".join(slot.to_bytes(2, "little") for slot in range(len(live))),
            "step_time_us": 6000,
            "step_time_valid": True,
        }
        report = nearly(sound).map(lambda made: pb.EngineMessage(report=made).SerializeToString())
        other = messages(pb.EngineMessage).map(lambda made: made.SerializeToString())
        said.append(draw(report | report | report | other | st.binary(max_size=60)))
    return said


def control(sidecar: Sidecar, said: list[bytes]) -> Iterator[pb.Decision]:
    with grpc.insecure_channel(sidecar.target) as channel:
        path = "/specgov.v1.SpeculationController/Control"
        yield from channel.stream_stream(path, response_deserializer=pb.Decision.FromString)(
            iter(said), timeout=WAIT_S
        )


def outcome(call: Callable[[], Any]) -> tuple[grpc.StatusCode, Any]:
    """The call's status, and its answer or what the status says."""
    try:
        return grpc.StatusCode.OK, call()
    except grpc.RpcError as error:
        return error.code(), error.details()  # type: ignore[attr-defined]  # a call's error has both


@pytest.fixture(autouse=True)
def _no_exception_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield
    assert not [record.exc_text for record in caplog.get_records("call") if record.exc_info]


@settings(ABUSE)
@given(engine=st.sampled_from(ENGINES), boot=st.integers(0, 3), said=conversations())
def test_a_stream_may_say_anything(abused: Sidecar, engine: str, boot: int, said: list[bytes]) -> None:
    info = pb.EngineInfo(engine_id=engine, boot_id=str(boot), tiers=TIERS, max_running_requests=64)
    check = StreamCheck(TIERS)
    for decision in control(abused, [pb.EngineMessage(info=info).SerializeToString(), *said]):
        assert check.problems(decision, 2**64) == []


@settings(ABUSE)
@given(
    first=messages(pb.EngineInfo).map(lambda info: pb.EngineMessage(info=info).SerializeToString())
    | st.binary()
)
def test_an_engine_may_introduce_itself_as_anything(abused: Sidecar, first: bytes) -> None:
    status, decisions = outcome(lambda: list(control(abused, [first])))
    if status != grpc.StatusCode.OK:
        assert status in REFUSALS, decisions
        return
    tiers = pb.EngineMessage.FromString(first).info.tiers
    assert [tier_problems(decision, tiers) for decision in decisions] == [[]] * len(decisions)


@settings(ABUSE)
@given(data=st.data())
def test_a_single_call_may_ask_anything(abused: Sidecar, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(METHODS))
    request_type, answer_type = getattr(pb, method.input_type.name), getattr(pb, method.output_type.name)
    made = messages(request_type).map(lambda request: request.SerializeToString())
    request = data.draw(made | made | st.binary(max_size=60))
    with grpc.insecure_channel(abused.target) as channel:
        call = channel.unary_unary(f"/{method.containing_service.full_name}/{method.name}")
        status, found = outcome(lambda: call(request, timeout=WAIT_S))
    if status != grpc.StatusCode.OK:
        assert status in REFUSALS, found
        return
    answer = answer_type.FromString(found)
    assert list(not_finite(answer)) == []
    if isinstance(answer, pb.Decision):
        asked = request_type.FromString(request)
        assert tier_problems(answer, asked.tiers or {e.num_steps for e in answer.estimates}) == []


def test_after_all_that_it_serves_on(abused: Sidecar) -> None:
    """Runs last, on the sidecar that the tests above abused."""
    info = pb.EngineInfo(engine_id="good", boot_id="b", tiers=TIERS, max_running_requests=64)
    first = next(control(abused, [pb.EngineMessage(info=info).SerializeToString()]))
    assert tier_problems(first, TIERS) == []
    assert abused.watchdog.stuck == 0
