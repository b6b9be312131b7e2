"""A real SGLang server on a CPU, over tiny models, with a rule of ours in place of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
START_TIMEOUT_S = 240
FLAGS = """
--skip-tokenizer-init --device cpu --dtype float32 --attention-backend intel_amx --disable-cuda-graph
--max-total-tokens 8192 --max-running-requests 8 --context-length 1024 --skip-server-warmup
--speculative-algorithm EAGLE --speculative-eagle-topk 1 --speculative-adaptive
"""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # with the stand-in for triton the first request hangs otherwise
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tiny_models",
    "PYTHONPATH": os.pathsep.join([str(HERE / "shim"), str(HERE / "plugin")]),
}


@dataclass(frozen=True)
class Server:
    """A server that answers, and what its policy was asked and told."""

    url: str
    trace_file: Path

    def generate(self, last_token: int, tokens: int) -> dict[str, Any]:
        """SGLang's answer, ``tokens`` tokens long, to a prompt that ends with ``last_token``."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": [1, 2, 3, last_token], "sampling_params": sampling})
        request = urllib.request.Request(
            self.url + "/generate", body.encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def trace(self) -> list[dict[str, Any]]:
        """Launches (``batch_size``, ``num_steps``) and results (``batch_size``, ``accepted``) in order."""
        return [json.loads(line) for line in self.trace_file.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: use make test-sglang")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models ``target`` and ``draft``."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, HERE / "make_models.py", folder], check=True)
    return folder


@pytest.fixture
def serve(models: Path, tmp_path: Path) -> Iterator[Callable[[str, Path], Server]]:
    """Start a server: ``serve(rule, table)``, the table in SGLang's format. It starts at num_steps 3."""
    with contextlib.ExitStack() as stack:

        def start(rule: str, table: Path) -> Server:
            trace_file = tmp_path / "trace.jsonl"
            variables = {"SPECGOV_TEST_RULE": rule, "SPECGOV_TEST_TRACE": str(trace_file)}
            options = {
                "model-path": models / "target",
                "speculative-draft-model-path": models / "draft",
                "speculative-adaptive-config": table,
                "speculative-num-steps": 3,
                "speculative-num-draft-tokens": 4,
            }
            return Server(
                stack.enter_context(_running(options, variables, tmp_path / "server.log")), trace_file
            )

        yield start


@contextlib.contextmanager
def _running(options: dict[str, Any], variables: dict[str, str], log: Path) -> Iterator[str]:
    """A server's address; its processes end with the block."""
    port = _free_port()
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *FLAGS.split(), *arguments],
            env={**os.environ, **ENVIRONMENT, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(process, url, log)
        yield url
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/model_info", timeout=2):
            return
        time.sleep(0.25)
    raise RuntimeError(f"the server did not start; the end of its log:\n{log.read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and the processes that it started: its session is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
