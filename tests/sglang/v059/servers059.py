"""Starts servers of SGLang 0.5.9 under Specgov, on either of its workers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servers import ACCEPTED, START_TIMEOUT_S, Server, _answers, end, free_port, wait_until

HERE = Path(__file__).parent
V1, V2 = "EAGLEWorker", "EAGLEWorkerV2"
WORKERS: dict[str, dict[str, str]] = {V1: {}, V2: {"SGLANG_ENABLE_SPEC_V2": "1"}}
"""What leads to each worker, beside the arguments."""
NUM_STEPS = 3
FIRST_REJECTED = 128  # the draft is wrong after this token and those above it
LAUNCH = (str(Path(sys.executable).parent / "specgov"), "sglang", "launch", "--")
SERVER = (sys.executable, "-m", "specgov.sglang_plugin.v059.server")
"""What launch becomes, without the doctor's checks, which take a while."""
FLAGS = """
--device cpu --dtype float32 --attention-backend intel_amx --disable-cuda-graph
--max-running-requests 8 --context-length 1024 --skip-server-warmup
--speculative-algorithm EAGLE --speculative-eagle-topk 1
--speculative-num-steps 3 --speculative-num-draft-tokens 4
"""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRITON_INTERPRET": "1",  # EAGLE's small kernels have no other way on a CPU
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_models",
    "PYTHONPATH": str(HERE / "shim"),
}


@contextlib.contextmanager
def running(
    models: Path,
    folder: Path,
    worker: str,
    target: str,
    *flags: str,
    draft: str = "draft",
    command: tuple[str, ...] = SERVER,
    **variables: str,
) -> Iterator[Server]:
    """A server that answers; its processes end with the block."""
    port = free_port()
    options = {
        "port": port,
        "model-path": models / "target",
        "speculative-draft-model-path": models / draft,
        "max-total-tokens": 8192,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with (folder / "server.log").open("w") as output:
        process = subprocess.Popen(
            [*command, *FLAGS.split(), *arguments, *flags],
            env={
                **os.environ,
                **ENVIRONMENT,
                **WORKERS[worker],
                "SPECGOV_TARGET": target,
                "SPECGOV_TEST_TRACE": str(folder),
                **variables,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, folder)
    try:
        wait_until(lambda: _answers(server), START_TIMEOUT_S, lambda: f"not started:\n{server.log[-4000:]}")
        yield server
    finally:
        end(process)


def accepted_after(token: int) -> int:
    """How many of 3 drafts after ``token`` are accepted: by the models' making 128 is the last right one."""
    return max(0, min(NUM_STEPS, FIRST_REJECTED - token)) if token >= ACCEPTED else 0


def tier_pairs(steps: list[dict[str, Any]]) -> Iterator[tuple[int | None, dict[str, Any], int]]:
    """Each request's steps: the tier of the one before (None at the first), the step, and its place in it."""
    before: dict[str, int] = {}
    for step in steps:
        for place, request in enumerate(step["ids"]):
            if request in step["live"]:
                yield before.get(request), step, place
                before[request] = step["num_steps"]
