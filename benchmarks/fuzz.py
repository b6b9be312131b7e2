"""Send a sidecar 100,000 messages, mutated and random ones among valid ones, by every call that it serves.

    python benchmarks/fuzz.py -o out/fuzz.json [--inputs 100000] [--seed 0]

The sidecar is a process of its own, with decision log, saved states and the guard. Three in four inputs come
on ``Control`` streams of 2 to 200 messages, the others by all other calls, health and reflection included;
``fuzz_inputs.py`` makes them. Each answer is checked: a decision has valid tiers and ranges, ids in order and
no NaN; no other message holds one; a refusal has a status of the protocol's, and none tells of an exception
that was not caught. A well-behaved engine is served all the while. In the end the sidecar must live, and its
log must hold no traceback. The memory's slope is told per 10,000 inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import machine
import numpy as np
from decision_check import StreamCheck, not_finite, tier_problems
from fuzz_inputs import TIERS, Inputs
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from sidecar_watch import WatchedSidecar

from specgov.controller.bundles import push
from specgov.proto.v1 import specgov_pb2 as pb

CONTROL = pb.DESCRIPTOR.services_by_name["SpeculationController"].methods_by_name["Control"]
SERVICES = tuple(
    service
    for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
)
METHODS = tuple(method for service in SERVICES for method in service.methods if method is not CONTROL)
STREAM_SHARE = 0.75
CALL_S = 60.0
WATCH_S = 0.02
SAMPLES = 200
BURST, PAUSE_S = 8, 0.002
REFUSALS = frozenset(
    (
        "UNIMPLEMENTED",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "FAILED_PRECONDITION",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
        "DEADLINE_EXCEEDED",
    )
)
"""What a call may end with. UNKNOWN would be an exception that nobody caught, INTERNAL a fault of gRPC's."""


@dataclass
class Findings:
    """What came back."""

    inputs: int = 0
    streams: int = 0
    decisions: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, what: str, data: bytes, problem: str) -> None:
        """Keep a problem with the input that caused it."""
        if len(self.problems) < 50:
            self.problems.append(f"{what}: {problem} (input {data[:400].hex()})")


class Fuzzer:
    """Sends inputs to the sidecar at ``target``."""

    def __init__(self, target: str, inputs: Inputs) -> None:
        self.found = Findings()
        self._inputs = inputs
        self._channel = grpc.insecure_channel(target)
        self._calls = {method.full_name: self._call(method) for method in (*METHODS, CONTROL)}
        self._numbers = np.random.default_rng(inputs.seed + 1)

    def close(self) -> None:
        self._channel.close()

    def turn(self) -> None:
        """One stream, or one unary call for each that keeps the shares."""
        length = int(self._numbers.integers(2, 201))
        self.stream(length)
        for _ in range(int(length * (1 - STREAM_SHARE) / STREAM_SHARE)):
            self.unary()

    def stream(self, length: int) -> None:
        """One ``Control`` stream."""
        messages, has_valid_info = self._inputs.stream(length)
        self.found.inputs += len(messages)
        self.found.streams += 1
        call = self._calls[CONTROL.full_name](_in_bursts(messages), timeout=CALL_S)
        check = StreamCheck(TIERS)
        try:
            for data in call:
                self.found.decisions += 1
                decision = pb.Decision.FromString(data)
                if has_valid_info:
                    problems = check.problems(decision, 2**64)
                else:
                    problems = [f"{name} is {value}" for name, value in not_finite(decision)]
                for problem in problems:
                    self.found.note("Control", b"".join(messages), problem)
            self._ended("Control", "OK", "", b"")
        except grpc.RpcError as error:
            self._ended("Control", error.code().name, error.details(), b"".join(messages))

    def unary(self) -> None:
        """One call of another method; of ``Watch`` what comes in a moment."""
        method, data = self._inputs.unary(METHODS)
        self.found.inputs += 1
        try:
            if method.client_streaming:
                answers = list(self._calls[method.full_name](iter([data]), timeout=CALL_S))
            elif method.server_streaming:
                answers = list(self._calls[method.full_name](data, timeout=WATCH_S))
            else:
                answers = [self._calls[method.full_name](data, timeout=CALL_S)]
            self._ended(method.name, "OK", "", b"")
        except grpc.RpcError as error:
            self._ended(method.name, error.code().name, error.details(), data)
            return
        for answer in answers:
            self._check(method, data, answer)

    def _check(self, method: MethodDescriptor, data: bytes, answer: bytes) -> None:
        message: Message = GetMessageClass(method.output_type).FromString(answer)
        problems = [f"{name} is {value}" for name, value in not_finite(message)]
        if isinstance(message, pb.Decision):
            request = pb.DecideRequest.FromString(data)
            problems += tier_problems(message, request.tiers or {e.num_steps for e in message.estimates})
        for problem in problems:
            self.found.note(method.name, data, problem)

    def _ended(self, method: str, status: str, details: str | None, data: bytes) -> None:
        self.found.statuses[f"{method} {status}"] += 1
        if status != "OK" and status not in REFUSALS:
            self.found.note(method, data, f"{status}: {details}")

    def _call(self, method: MethodDescriptor) -> Any:
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.client_streaming:
            return self._channel.stream_stream(path)
        return (
            self._channel.unary_stream(path) if method.server_streaming else self._channel.unary_unary(path)
        )


def _in_bursts(messages: list[bytes]) -> Iterator[bytes]:
    """Not all at once, so that the sidecar decides now and then."""
    for number, message in enumerate(messages):
        if number % BURST == 0:
            time.sleep(PAUSE_S)
        yield message


class GoodEngine:
    """An engine that behaves, asked for a decision now and then: the sidecar still serves those that do."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._number = 0

    def asks(self) -> str:
        """Steps of a stream of its own; what went wrong, empty where nothing did."""
        self._number += 1
        info = pb.EngineInfo(
            engine_id="good", boot_id=str(self._number), tiers=TIERS, max_running_requests=64
        )
        report = pb.StepReport(step_id=1, batch_size=2, num_steps=3, accepted_drafts=b"\x01\x02",
                               step_time_us=6000, step_time_valid=True)  # fmt: skip
        control = self._channel.stream_stream(
            f"/{CONTROL.containing_service.full_name}/{CONTROL.name}",
            request_serializer=pb.EngineMessage.SerializeToString,
            response_deserializer=pb.Decision.FromString,
        )
        outbox: queue.SimpleQueue[pb.EngineMessage] = queue.SimpleQueue()
        outbox.put(pb.EngineMessage(info=info))
        call = control(iter(outbox.get, None), timeout=CALL_S)
        try:
            next(call)
            outbox.put(pb.EngineMessage(report=report))
            known = next(call).known_step_id
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
        return "" if known == 1 else f"the decision knows step {known}, not 1"

    def close(self) -> None:
        self._channel.close()


def run(sidecar: WatchedSidecar, inputs: int, seed: int) -> dict[str, Any]:
    """Send the inputs; what came back, and the memory meanwhile."""
    fuzzer, good = Fuzzer(sidecar.target, Inputs(seed)), GoodEngine(sidecar.target)
    begun_s, rss = time.monotonic(), [(0, sidecar.sample(0.0).rss_kb)]
    good_asked = 0
    try:
        while fuzzer.found.inputs < inputs and sidecar.lives:
            fuzzer.turn()
            if fuzzer.found.inputs >= rss[-1][0] + inputs / SAMPLES:
                rss.append((fuzzer.found.inputs, sidecar.sample(0.0).rss_kb))
                good_asked += 1
                if problem := good.asks():
                    fuzzer.found.note("an engine that behaves", b"", problem)
    finally:
        good.close()
        fuzzer.close()
    late = np.array(rss[len(rss) // 2 :], float)
    return {
        "inputs": fuzzer.found.inputs,
        "seconds": round(time.monotonic() - begun_s, 1),
        "streams": fuzzer.found.streams,
        "decisions": fuzzer.found.decisions,
        "statuses": dict(sorted(fuzzer.found.statuses.items())),
        "good_engine_asked": good_asked,
        "rss_mb_first": round(rss[0][1] / 1024, 1),
        "rss_mb_half_way": round(late[0][1] / 1024, 1),
        "rss_mb_last": round(late[-1][1] / 1024, 1),
        "rss_mb_most": round(max(kb for _, kb in rss) / 1024, 1),
        "slope_kb_per_10000_inputs_second_half": round(
            float(np.polyfit(late[:, 0] / 1e4, late[:, 1], 1)[0]), 1
        ),
        "problems": fuzzer.found.problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz every call of a sidecar.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    facts = machine.facts(("specgov", "grpcio", "protobuf", "numpy"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "specgov.toml").write_text(
            "max_engines = 64\n"
            f'[decision_log]\npath = "{folder}/decisions.jsonl"\nmax_mb = 4.0\n'
            f'[state]\ndir = "{folder}/states"\nevery_s = 2.0\n[bundles]\ndir = "{folder}/bundles"\n'
        )
        push(Path(str(files("specgov.policies.bundles"))) / "default", folder / "bundles")
        sidecar = WatchedSidecar(folder, ["--config", str(folder / "specgov.toml")])
        sidecar.start()
        try:
            found = run(sidecar, options.inputs, options.seed)
        finally:
            lived = sidecar.lives
            status = sidecar.end(signal.SIGTERM)
        found |= {"sidecar_lived": lived, "exit_status": status, **sidecar.said()}
        found["log_kb"] = round(sidecar.messages_path.stat().st_size / 1024, 1)
    document = {"machine": facts, "load_average_at_the_end": round(os.getloadavg()[0], 2), **found}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    sys.exit(1 if found["problems"] or not lived or status or found["tracebacks_in_the_log"] else 0)


if __name__ == "__main__":
    main()
