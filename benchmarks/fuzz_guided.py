"""fuzz_guided.py   Streams of messages that atheris shapes by the branches that they reach in the sidecar.

    pip install atheris && python benchmarks/fuzz_guided.py --runs 100000 -o out/fuzz_guided.json

Where ``fuzz.py`` sends what it drew to a whole sidecar, this gives a session (``controller/session.py``)
bytes in its own process, with no gRPC between, and keeps as seeds those that reached new code. It begins with
streams of ``fuzz_inputs.py``. Checked are each decision, each status, and that no exception leaves the
session. Exits with 1 where one did, and says which input, kept beside the output.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CHILD = "--fuzz"
SEEDS = 300
LONGEST = 8
"""Messages of a seed."""
MAX_BYTES = 8192
ENDS = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}


def framed(messages: list[bytes]) -> bytes:
    """Messages as one input: each with its length in front, in two bytes, little end first."""
    return b"".join(len(message).to_bytes(2, "little") + message for message in messages)


def unframed(data: bytes) -> Iterator[bytes]:
    """The messages of any input; the last may be short."""
    while data:
        length = int.from_bytes(data[:2], "little")
        yield data[2 : 2 + length]
        data = data[2 + length :]


def fuzz(arguments: list[str]) -> None:
    """Run in a process of its own: libFuzzer ends it."""
    import logging

    import atheris

    with atheris.instrument_imports(include=["specgov"]):
        from specgov.controller import session, validation
        from specgov.controller.config import ServeConfig
        from specgov.controller.engines import Engines
        from specgov.controller.metrics import Metrics
        from specgov.controller.telemetry import Telemetry
    from decision_check import StreamCheck

    from specgov.proto.v1 import specgov_pb2 as pb

    logging.disable(logging.CRITICAL)
    telemetry = Telemetry(Metrics(), timer=lambda: 0.0)

    def one_input(data: bytes) -> None:
        messages = [validation.read_message(message) for message in unframed(data)]
        engines = Engines(ServeConfig(), clock=lambda: 0.0)
        stream = session.Session(engines, telemetry, hello_timeout_s=0.0)
        steps = [0]
        first = messages[0] if messages else None
        tiers = first.info.tiers if isinstance(first, pb.EngineMessage) else ()
        check = StreamCheck(tiers)
        try:
            decisions = stream.run()
            for message in messages:
                stream.deliver(message)
                if isinstance(message, pb.EngineMessage):
                    steps.append(message.report.step_id)
                stream.refresh()  # so that there is a decision after a message that is rejected, too
                if problems := check.problems(next(decisions), max(steps)):
                    raise AssertionError("; ".join(problems))
        except session.SessionEnded as ended:
            if ended.code.name not in ENDS and messages:
                raise
        finally:
            stream.leave()

    atheris.Setup(arguments, one_input)
    atheris.Fuzz()


def write_seeds(folder: Path, seed: int) -> None:
    """Streams of the other fuzzer, some of them sound."""
    from fuzz_inputs import Inputs

    inputs = Inputs(seed, valid_share=0.6)
    for number in range(SEEDS):
        messages, _ = inputs.stream(1 + number % LONGEST)
        data = framed([message for message in messages if len(message) < MAX_BYTES // LONGEST])
        (folder / f"seed-{number}").write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    from machine import facts

    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_seeds(Path(folder), options.seed)
        words = [sys.executable, __file__, CHILD, folder, f"-runs={options.runs}", f"-seed={options.seed}"]
        words += [f"-max_len={MAX_BYTES}", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"]
        words.append(f"-artifact_prefix={options.output.parent.resolve()}/")
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    said = done.stderr + done.stdout
    stats = {name: int(value) for name, value in re.findall(r"stat::(\w+):\s+(\d+)", said)}
    reached = re.findall(r"cov: (\d+)", said)
    document = {
        "command": "fuzz_guided",
        **facts(("protobuf", "numpy", "atheris")),
        "runs": stats.get("number_of_executed_units", 0),
        "runs_per_s": stats.get("average_exec_per_sec"),
        "inputs_that_reached_new_code": stats.get("new_units_added"),
        "branches_reached_by_the_seeds_and_at_the_end": [int(value) for value in reached[:1] + reached[-1:]],
        "peak_memory_mb": stats.get("peak_rss_mb"),
        "crashed": done.returncode != 0,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    if done.returncode:
        print(said[-6000:], file=sys.stderr)
    return 1 if done.returncode else 0


if __name__ == "__main__":
    if CHILD in sys.argv:
        fuzz([word for word in sys.argv if word != CHILD])
    else:
        sys.exit(main())
