"""The protocol does not change under those who speak it: numbers, names and types are pinned in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from specgov.proto.v1 import specgov_pb2 as pb

PINNED = Path(__file__).with_name("specgov_v1.json")


def describe() -> dict[str, Any]:
    """Every field, enum value and method of the package, as plain data."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    described: dict[str, Any] = {}

    def message(prefix: str, proto: descriptor_pb2.DescriptorProto) -> None:
        name = f"{prefix}{proto.name}"
        described[name] = {
            str(f.number): [f.name, f.Type.Name(f.type), f.Label.Name(f.label), f.type_name]
            for f in proto.field
        }
        for nested in proto.nested_type:
            message(f"{name}.", nested)
        for enum in proto.enum_type:
            described[f"{name}.{enum.name}"] = {str(v.number): [v.name] for v in enum.value}

    for proto in file.message_type:
        message("", proto)
    for enum in file.enum_type:
        described[enum.name] = {str(v.number): [v.name] for v in enum.value}
    for service in file.service:
        described[service.name] = {
            m.name: [m.input_type, m.output_type, m.client_streaming, m.server_streaming]
            for m in service.method
        }
    return described


def test_nothing_that_was_published_changes_or_disappears() -> None:
    # To publish an addition: python tests/proto/test_compatibility.py
    pinned, now = json.loads(PINNED.read_text()), describe()
    for name, entries in pinned.items():
        for key, value in entries.items():
            assert now.get(name, {}).get(key) == value, f"{name} {key}"


def test_what_exists_is_pinned() -> None:
    assert json.loads(PINNED.read_text()) == describe()


def test_enums_begin_with_unspecified() -> None:
    for name, entries in describe().items():
        values = entries.get("0")
        if values is not None and len(values) == 1:
            assert values[0].endswith("_UNSPECIFIED"), name


def test_a_receiver_ignores_a_field_that_it_does_not_know() -> None:
    report = pb.StepReport(step_id=5, batch_size=2, num_steps=3, accepted_drafts=b"\x01\x03")
    unknown = bytes([0xFA, 0x7D, 3]) + b"new"  # field 2015, length-delimited, by hand: (2015 << 3) | 2
    read = pb.StepReport.FromString(report.SerializeToString() + unknown)
    assert (read.step_id, read.batch_size, read.accepted_drafts) == (5, 2, b"\x01\x03")


def test_an_absent_optional_field_can_be_told_from_zero() -> None:
    assert not pb.StepReport().HasField("kv_use_ratio")
    assert pb.StepReport(kv_use_ratio=0.0).HasField("kv_use_ratio")
    assert not pb.Decision().HasField("propensity")


if __name__ == "__main__":
    PINNED.write_text(json.dumps(describe(), indent=1, sort_keys=True) + "\n")
