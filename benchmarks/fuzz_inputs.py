"""Messages for a sidecar that are valid, nearly valid, or noise, from one generator: a run can be repeated.

A message is made of a valid one by changing its fields (each to a value at an edge of its type, or of what
the sidecar takes), then perhaps by changing its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from specgov.policies.registry import policy_names
from specgov.proto.v1 import specgov_pb2 as pb

TIERS = (0, 1, 3, 5)
ENGINES = tuple(f"fuzz-{number}" for number in range(12))
MODES = tuple(pb.Mode.values())

_INTS = (0, 1, 2, 3, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1)
_LONGS = (*_INTS, 10**9, 2**48, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 5e-324, 1e-30, 1e30, 1.7e308, math.inf, -math.inf, math.nan)
_TEXTS = (
    "", " ", "\x00", "\x1b[2J", "a" * 127, "a" * 129, "a" * 600, "a" * 5000, "é" * 300, "\u202e\ufeff",
    "{}{%s}", "../../etc/passwd", "/dev/zero", "ppo:/etc/passwd", "ppo:a@1", "ppo:default@999999999",
    "static:", ":", "::::", "static:3:3:3", "threshold:-1:3", "threshold:1e9:3", "schedule:1=5,2=3",
    "greedy:nan", "linucb:alpha=inf", "none", "auto", "fuzz-0", "h200-llama-3.1-8b",
    "😀" * 40,
)  # fmt: skip
_LARGEST_BYTES = 5000

Unary = tuple[MethodDescriptor, bytes]


class Inputs:
    """Draws messages, of which ``valid_share`` are left as they are."""

    def __init__(self, seed: int, valid_share: float = 0.35) -> None:
        self._rng = np.random.default_rng(seed)
        self._valid_share = valid_share
        self._boots = 0
        self.seed = seed

    def stream(self, length: int) -> tuple[list[bytes], bool]:
        """The messages of a ``Control`` stream, and whether the first is valid, with ``TIERS``."""
        rng = self._rng
        info, is_valid = pb.EngineMessage(info=self._info()), bool(rng.random() < 0.85)
        messages = [info.SerializeToString() if is_valid else self.mutated(info)]
        step = int(rng.choice([0, 0, 0, 1000, 2**40]))
        for _ in range(length - 1):
            step += int(rng.integers(1, 4))
            message = self._in_stream(step)
            is_left = rng.random() < self._valid_share
            messages.append(message.SerializeToString() if is_left else self.mutated(message))
        return messages, is_valid

    def unary(self, methods: Sequence[MethodDescriptor]) -> Unary:
        """A method and the bytes to call it with."""
        method = methods[int(self._rng.integers(len(methods)))]
        message = self._request(method.input_type)
        is_left = self._rng.random() < self._valid_share
        return method, message.SerializeToString() if is_left else self.mutated(message)

    def mutated(self, message: Message) -> bytes:
        """The message with fields or bytes changed; now and then only noise."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.05:
            return self._noise(200)
        if kind < 0.75:
            for _ in range(int(rng.integers(1, 4))):
                self._change_field(message)
        data = message.SerializeToString()
        if kind > 0.6:
            for _ in range(int(rng.integers(1, 5))):
                data = self._change_bytes(data)
        return data

    def _info(self) -> pb.EngineInfo:
        self._boots += 1
        return pb.EngineInfo(
            engine_id=self._one(ENGINES),
            boot_id=f"{self.seed}-{self._boots // 3}",
            engine="fuzz",
            tiers=TIERS,
            max_running_requests=64,
            decision_lag_steps=2,
        )

    def _in_stream(self, step: int) -> pb.EngineMessage:
        rng = self._rng
        if rng.random() < 0.08:
            kind = self._one(tuple(pb.EngineEvent.Kind.values()))
            return pb.EngineMessage(event=pb.EngineEvent(kind=kind, step_id=step))
        batch, num_steps = int(rng.integers(1, 65)), self._one(TIERS)
        live = int(rng.integers(0, batch + 1))
        report = pb.StepReport(
            step_id=step,
            batch_size=batch,
            num_steps=num_steps,
            accepted_drafts=rng.integers(0, num_steps + 1, live).astype(np.uint8).tobytes(),
            slots_u16le=rng.permutation(256)[:live].astype("<u2").tobytes(),
            slot_generations_u8=rng.integers(0, 3, live).astype(np.uint8).tobytes(),
            sum_seq_len_tokens=400 * batch,
            max_seq_len_tokens=400,
            waiting_requests=int(rng.integers(0, 20)),
            kv_use_ratio=float(rng.random()),
            step_time_us=int(rng.integers(4000, 9000)),
            step_time_valid=True,
            decision_id=int(rng.integers(0, 50)),
        )
        return pb.EngineMessage(report=report)

    def _request(self, kind: Descriptor) -> Message:
        """A valid request of a kind of message."""
        engine_id = self._one(ENGINES)
        makers: dict[str, Callable[[], Message]] = {
            "DecideRequest": self._question,
            "SetModeRequest": lambda: pb.SetModeRequest(engine_id=engine_id, mode=self._one(MODES)),
            "SetPolicyRequest": lambda: pb.SetPolicyRequest(engine_id=engine_id, policy=self._policy()),
            "SetCanaryRequest": lambda: pb.SetCanaryRequest(
                engine_id=engine_id, policy=self._policy(), share=0.5, block_steps=8
            ),
            "UseBundleRequest": lambda: pb.UseBundleRequest(name="default", engine_id=engine_id),
            "WatchRequest": lambda: pb.WatchRequest(engine_id=engine_id, every_steps=1),
        }
        if kind.name in makers:
            return makers[kind.name]()
        request: Message = GetMessageClass(kind)()
        if "engine_id" in request.DESCRIPTOR.fields_by_name:
            request.engine_id = engine_id  # type: ignore[attr-defined]  # which message it is is not known
        return request

    def _question(self) -> pb.DecideRequest:
        rng = self._rng
        request = pb.DecideRequest(
            batch_size=int(rng.integers(1, 100)),
            seq_len_tokens=[500],
            tiers=TIERS if rng.random() < 0.7 else (),
        )
        if rng.random() < 0.5:
            request.by_position.probability.extend(rng.random(5).tolist())
        else:
            request.accept_length_at.accept_length, request.accept_length_at.num_steps = 2.4, 3
        if rng.random() < 0.05:  # an answer takes up to a second
            request.policy = self._policy()
        return request

    def _policy(self) -> str:
        name: str = self._one(policy_names())
        options = {"static": ":3", "threshold": ":3:5", "schedule": ":1-4=5,5-=0"}
        return name + options.get(name, "")

    def _change_field(self, message: Message) -> None:
        """Set a field, of the message or of one in it, to a value at an edge; or clear it."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = fields[int(self._rng.integers(len(fields)))]
        inner = [value for value in _inner(message) if value.DESCRIPTOR.fields]
        if inner and self._rng.random() < 0.8:
            self._change_field(inner[int(self._rng.integers(len(inner)))])
        elif self._rng.random() < 0.1:
            message.ClearField(field.name)
        elif field.is_repeated:
            self._change_list(getattr(message, field.name), field)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, self._value(field))

    def _change_list(self, values: Any, field: FieldDescriptor) -> None:
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            return
        kept = list(values)
        choice = self._rng.random()
        if choice < 0.3:
            kept = kept[: int(self._rng.integers(0, len(kept) + 1))]
        elif choice < 0.5:
            kept = kept * int(self._rng.choice([2, 3, 500]))
        else:
            kept += [self._value(field) for _ in range(int(self._rng.choice([1, 1, 2, 40, 1000])))]
        del values[:]
        values.extend(kept)

    def _value(self, field: FieldDescriptor) -> Any:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return self._noise(int(self._rng.choice([4, 64, _LARGEST_BYTES])))
            return (
                self._policy() if field.name == "policy" and self._rng.random() < 0.5 else self._one(_TEXTS)
            )
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return bool(self._rng.random() < 0.5)
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self._one(_FLOATS)
        if kind == FieldDescriptor.CPPTYPE_UINT64:
            return self._one(_LONGS)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return int(self._rng.integers(0, 100))
        if kind == FieldDescriptor.CPPTYPE_INT32:
            return self._one(_INTS) % 2**31
        return self._one(_INTS)

    def _change_bytes(self, data: bytes) -> bytes:
        """Flip, drop, double, cut or put in a few bytes."""
        rng = self._rng
        at = int(rng.integers(0, len(data) + 1))
        size = int(rng.integers(1, 9))
        match int(rng.integers(5)):
            case 0 if data:
                at = min(at, len(data) - 1)
                return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
            case 1:
                return data[:at] + data[at + size :]
            case 2:
                return data[:at] + data[at : at + size] * int(rng.integers(2, 40)) + data[at + size :]
            case 3:
                return data[:at]
            case _:
                return data[:at] + rng.bytes(size) + data[at:]

    def _noise(self, largest: int) -> bytes:
        return self._rng.bytes(int(self._rng.integers(0, largest + 1)))

    def _one(self, values: Sequence[Any]) -> Any:
        return values[int(self._rng.integers(len(values)))]


def _inner(message: Message) -> list[Message]:
    """The messages that are set in a message."""
    found: list[Message] = []
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            found.extend([value] if isinstance(value, Message) else list(value))
    return found
