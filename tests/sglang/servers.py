"""Starts real servers on free ports, asks them, checks every token, and ends them by process id."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_TIMEOUT_S = 240
WAIT_S = 60
FIRST, LAST = 10, 245  # the target's cycle of tokens
ACCEPTED, REJECTED = 10, 128  # last tokens of prompts whose next 100 drafts are all right, or all wrong
TABLE = {
    "1": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
    "4": {"candidate_steps": [0, 1]},
    "ema_alpha": 0.5,
    "warmup_batches": 2,
    "update_interval": 2,
}
FLAGS = """
--device cpu --dtype float32 --attention-backend intel_amx --disable-cuda-graph
--max-running-requests 8 --context-length 1024 --skip-server-warmup
--speculative-algorithm EAGLE --speculative-eagle-topk 1 --speculative-adaptive
--speculative-num-steps 3 --speculative-num-draft-tokens 4
"""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more of them fight over few cores: a step took 300 ms in place of 7
    "TORCHDYNAMO_DISABLE": "1",  # with the stand-in for triton the first request hangs otherwise
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_models",
    "PYTHONPATH": os.pathsep.join([str(HERE / "shim"), str(HERE / "plugin")]),
}


@dataclass(frozen=True)
class Server:
    """A server that answers, and what was written down about it (see plugin/specgov_test_trace.py)."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def generate(
        self, last_token: int, tokens: int, grammar: dict[str, str] | None = None, **body: Any
    ) -> dict[str, Any]:
        """SGLang's answer to a prompt that ends with ``last_token``, ``tokens`` long or a grammar's."""
        # The cycle has no end-of-sequence token.
        sampling = {"temperature": 0, "max_new_tokens": tokens, **(grammar or {})}
        return self.post("/generate", input_ids=[1, 2, 3, last_token], sampling_params=sampling, **body)

    def check(self, last_token: int, tokens: int) -> int:
        """Check every token of an answer; returns the decode steps that it took."""
        answer = self.generate(last_token, tokens)
        assert answer["output_ids"] == expected(last_token, tokens)
        return answer["meta_info"]["spec_verify_ct"]

    def check_eight_at_once(self, tokens: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: self.check(20 + 25 * i, tokens), range(8)))

    def live_num_steps(self) -> int:
        """The tier that SGLang says it is at."""
        with urllib.request.urlopen(self.url + "/server_info", timeout=60) as answer:
            return json.loads(answer.read())["internal_states"][0]["speculative_num_steps"]

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """The decode steps that SGLang made, on a rank."""
        return _lines(self.folder / f"steps.{rank}.jsonl")

    def policy_lines(self) -> list[dict[str, Any]]:
        """What the policy was asked and told, on the one rank."""
        (path,) = self.folder.glob("launches.*.jsonl")
        return _lines(path)

    def launches(self) -> list[dict[str, Any]]:
        return [line for line in self.policy_lines() if "num_steps" in line]


def expected(last_token: int, tokens: int) -> list[int]:
    """The target's tokens after ``last_token``."""
    cycle = LAST + 1 - FIRST
    return [FIRST + (last_token + 1 + i - FIRST) % cycle for i in range(tokens)]


def write_table(folder: Path) -> Path:
    path = folder / "adaptive.json"
    path.write_text(json.dumps(TABLE))
    return path


@contextlib.contextmanager
def running(models: Path, folder: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """A server that answers; its processes end with the block."""
    with started(models, folder, *flags, **variables) as server:
        wait_until_it_answers(server)
        yield server


@contextlib.contextmanager
def started(models: Path, folder: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """A server that was told to start; its processes end with the block."""
    port = free_port()
    options = {
        "port": port,
        "model-path": models / "target",
        "speculative-draft-model-path": models / "draft",
        "speculative-adaptive-config": write_table(folder),
        "max-total-tokens": 8192,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with (folder / "server.log").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *FLAGS.split(), *arguments, *flags],
            env={**os.environ, **ENVIRONMENT, "SPECGOV_TEST_TRACE": str(folder), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, folder)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and the processes that it started: its session is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def processes_of(session: int) -> list[int]:
    """The living processes of a session, by their ids."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def free_port() -> int:
    """A port that stays free until the server takes it, half a minute later.

    One below those that Linux gives to whoever asks for any (32768 and up): of those gloo and other tests'
    servers may get it in the meantime.
    """
    while True:
        port = random.randrange(20_000, 31_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(holds: Callable[[], Any], timeout_s: float = WAIT_S, what: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what() or "what must happen did not"
        time.sleep(0.05)


def wait_until_it_answers(server: Server) -> None:
    wait_until(lambda: _answers(server), START_TIMEOUT_S, lambda: f"not started:\n{server.log[-4000:]}")


def _answers(server: Server) -> bool:
    if server.process.poll() is not None:
        raise RuntimeError(f"the server ended; the end of its log:\n{server.log[-4000:]}")
    with contextlib.suppress(OSError), urllib.request.urlopen(server.url + "/model_info", timeout=2):
        return True
    return False


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is still written to."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
