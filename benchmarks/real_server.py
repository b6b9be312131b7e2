"""real_server.py   A real SGLang server with plugin and sidecar: a mixed load, or the cost of being there.

    python benchmarks/real_server.py mixed -o mixed.json -- <the server's arguments>
    python benchmarks/real_server.py cost -o cost.json -- <the server's arguments>

``mixed`` starts a sidecar and a server that follows it, holds a scripted number of requests in flight, and
reports output rate by stage, errors, tiers, decision lag and steps without a decision. ``cost`` starts the
same server with and without the plugin, in turn, at one fixed tier, and compares what the same load takes.
Run it with the Python of SGLang's environment, where specgov is installed too. Nothing here needs weights:
with ``--load-format dummy`` and SGLang's simulated acceptance (SGLANG_SIMULATE_ACC_LEN) the figures are those
of real kernels on random text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

STAGES = (1, 8, 64, 200, 256, 96, 24, 4, 128, 32, 2, 16)
START_TIMEOUT_S = 400
PORT = 30417


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-6000:]}")


def _end_with_parent() -> None:
    """In a new process: be killed when this one is, however that ends; it holds a GPU and a port."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextlib.contextmanager
def process(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own session, ended with all its children."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        yield child
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)


@contextlib.contextmanager
def server(arguments: list[str], log: Path, target: str | None) -> Iterator[None]:
    """A SGLang server that answers; it follows the sidecar at ``target``, or knows nothing of Specgov."""
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--host",
        "127.0.0.1",
        "--port",
        str(PORT),
        *arguments,
    ]
    variables = {"SPECGOV_TARGET": target, "SPECGOV_ENGINE_ID": "benchmark"} if target else {}
    with process(command, log, **variables) as child:
        wait_for(f"http://127.0.0.1:{PORT}/model_info", child, log)
        yield


def specgov(*words: str) -> list[str]:
    return [sys.executable, "-m", "specgov.controller.cli.main", *words]


@contextlib.contextmanager
def sidecar(folder: Path, policy: str) -> Iterator[str]:
    target = f"unix://{folder}/specgov.sock"
    words = (
        "serve",
        "--listen",
        target,
        "--policy",
        policy,
        "--decision-log",
        str(folder / "decisions.jsonl"),
    )
    with process(specgov(*words), folder / "sidecar.log"):
        deadline = time.monotonic() + 30
        while not (folder / "specgov.sock").exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"the sidecar did not start:\n{(folder / 'sidecar.log').read_text()}")
            time.sleep(0.1)
        yield target


class Load:
    """A number of requests in flight, changed while they run."""

    def __init__(
        self, session: Any, vocabulary: int, prompts: tuple[int, ...], outputs: tuple[int, int]
    ) -> None:
        self._session = session
        self._rng = random.Random(0)
        self._vocabulary = vocabulary
        self._prompts = prompts
        self._outputs = outputs
        self.wanted = 0
        self.tokens = self.requests = 0
        self.errors: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()

    async def _request(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(10, self._vocabulary) for _ in range(rng.choice(self._prompts))]
        wanted = rng.randint(*self._outputs)
        sampling = {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True}
        try:
            async with self._session.post(
                f"http://127.0.0.1:{PORT}/generate", json={"input_ids": prompt, "sampling_params": sampling}
            ) as answer:
                body = await answer.json()
                if answer.status != 200 or len(body["output_ids"]) != wanted:
                    self.errors[f"status {answer.status}, {str(body)[:80]}"] += 1
                    return
            self.tokens += wanted
            self.requests += 1
        except Exception as error:  # noqa: BLE001 whatever goes wrong is what is counted here
            self.errors[repr(error)[:120]] += 1

    async def hold(self, concurrency: int, seconds: float) -> dict[str, float]:
        """Keep ``concurrency`` requests in flight; the output rate counts requests that ended in the time."""
        started, tokens = time.monotonic(), self.tokens
        while (left := started + seconds - time.monotonic()) > 0:
            while len(self._running) < concurrency:
                task = asyncio.create_task(self._request())
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            await asyncio.wait(self._running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        took = time.monotonic() - started
        return {"concurrency": concurrency, "seconds": took, "tokens_per_s": (self.tokens - tokens) / took}

    async def drain(self) -> None:
        if self._running:
            await asyncio.wait(self._running)


async def play(
    stages: list[tuple[int, float]], options: argparse.Namespace
) -> tuple[list[dict[str, float]], Load]:
    import aiohttp

    # A connection a request: a kept one may be closed by the server at the moment when it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        load = Load(session, options.vocabulary, options.prompts, (options.output_min, options.output_max))
        results = [await load.hold(concurrency, seconds) for concurrency, seconds in stages]
        await load.drain()
    return results, load


def facts(arguments: list[str]) -> dict[str, Any]:
    gpu = "none"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "gpu": gpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("sglang", "torch", "specgov", "grpcio", "protobuf", "numpy")
        },
        "simulated_accept_length": os.environ.get("SGLANG_SIMULATE_ACC_LEN"),
        "server_arguments": arguments,
    }


def read_decisions(path: Path) -> dict[str, Any]:
    """Tiers, lag and step times of the decision log's steps, without warm-up."""
    steps = [row for row in map(json.loads, path.read_text().splitlines()) if row.get("kind") == "step"]
    steps = [row for row in steps if "warm_up" not in row["flags"]]
    lags = Counter(row["lag_steps"] for row in steps if row["lag_steps"] is not None)
    by_batch: dict[int, list[float]] = {}
    for row in steps:
        if row["step_ms"] is not None:
            by_batch.setdefault(row["batch_size"], []).append(row["step_ms"])
    return {
        "steps": len(steps),
        "steps_by_num_steps": dict(sorted(Counter(row["num_steps"] for row in steps).items())),
        "decision_lag_steps": dict(sorted(lags.items())),
        "steps_by_the_servers_own_rule": sum(not row["followed_decision_id"] for row in steps),
        "reports_dropped": sum(row.get("reports_dropped", 0) for row in steps),
        "step_ms_p50_by_batch_size": {
            b: statistics.median(ms) for b, ms in sorted(by_batch.items()) if len(ms) >= 20
        },
    }


def complaints(log: Path) -> list[str]:
    words = ("Traceback", "Error", "ERROR", "Exception", "Specgov")
    return [
        line[:300] for line in log.read_text(errors="replace").splitlines() if any(w in line for w in words)
    ]


def mixed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    seconds = options.seconds / len(options.stages)
    with sidecar(folder, options.policy) as target, server(options.server, folder / "server.log", target):
        results, load = asyncio.run(play([(stage, seconds) for stage in options.stages], options))
        show = subprocess.run(
            specgov("engines", "show", "benchmark", "--target", target, "--json"),
            capture_output=True,
            text=True,
        )
        time.sleep(2)  # the decision log is written off the decision path
    return {
        "stages": results,
        "requests": load.requests,
        "errors": dict(load.errors),
        "engine": json.loads(show.stdout)["engine"] if show.returncode == 0 else show.stderr,
        "decisions": read_decisions(folder / "decisions.jsonl"),
        "server_log": complaints(folder / "server.log"),
        "sidecar_log": complaints(folder / "sidecar.log"),
    }


def cost(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts in turn: off, on, on, off and so on, so that a drift of the machine falls on both alike."""
    adaptive = folder / "adaptive.json"
    adaptive.write_text(json.dumps({"1": {"candidate_steps": [options.num_steps]}}))
    fixed = [
        "--speculative-adaptive-config",
        str(adaptive),
        "--speculative-num-steps",
        str(options.num_steps),
    ]
    fixed += ["--speculative-num-draft-tokens", str(options.num_steps + 1)]
    stages = [(stage, options.seconds) for stage in options.stages]
    warm = [(stage, options.seconds / 2) for stage in options.stages]
    runs: list[dict[str, Any]] = []
    for number in range(options.starts):
        on = number % 4 in (1, 2)
        log = folder / f"server{number}.log"
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(sidecar(folder, f"static:{options.num_steps}"))
            stack.enter_context(server([*options.server, *fixed], log, target if on else None))
            asyncio.run(play(warm, options))
            results, load = asyncio.run(play(stages, options))
        runs.append({"plugin": on, "stages": results, "errors": dict(load.errors), "log": complaints(log)})
        print(json.dumps(runs[-1]), flush=True)
    ratios = {}
    for index, stage in enumerate(options.stages):
        rates = {
            on: [r["stages"][index]["tokens_per_s"] for r in runs if r["plugin"] is on]
            for on in (True, False)
        }
        if rates[True] and rates[False]:
            ratios[stage] = statistics.median(rates[True]) / statistics.median(rates[False])
    return {"runs": runs, "output_rate_on_over_off": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("mixed", "cost"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--policy", default="greedy")
    parser.add_argument("--seconds", type=float, help="of the whole load (mixed), of each stage (cost)")
    parser.add_argument("--stages", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--starts", type=int, default=4, help="of the server (cost)")
    parser.add_argument("--num-steps", type=int, default=3, help="the fixed tier (cost)")
    parser.add_argument("--vocabulary", type=int, default=30_000)
    parser.add_argument(
        "--prompts", type=lambda text: tuple(map(int, text.split(","))), default=(64, 256, 1024)
    )
    parser.add_argument("--output-min", type=int, default=32)
    parser.add_argument("--output-max", type=int, default=256)
    parser.add_argument("--keep", type=Path, help="a folder for logs and the decision log")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    options.server = arguments[cut + 1 :]
    options.stages = options.stages or (list(STAGES) if options.what == "mixed" else [8, 64])
    options.seconds = options.seconds or (300.0 if options.what == "mixed" else 20.0)
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        document = {"command": options.what, **facts(options.server)}
        document |= mixed(options, folder) if options.what == "mixed" else cost(options, folder)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({k: v for k, v in document.items() if k not in ("runs", "engine")}, indent=1))


if __name__ == "__main__":
    main()
