"""``launch`` becomes a real server, ``profile`` records its step times, and ``calibrate`` takes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from servers import (
    ENVIRONMENT,
    FLAGS,
    Server,
    end,
    free_port,
    wait_until_it_answers,
    write_table,
)

pytestmark = pytest.mark.sglang

SPECGOV = str(Path(sys.executable).parent / "specgov")


def test_a_launched_server_is_profiled(models: Path, socket: Path, tmp_path: Path) -> None:
    target, port = f"unix://{socket}", free_port()
    flags = FLAGS.replace("--speculative-adaptive\n", "\n").split()
    assert "--speculative-adaptive" not in flags
    files = ["--model-path", models / "target", "--speculative-draft-model-path", models / "draft"]
    more = [
        "--speculative-adaptive-config",
        write_table(tmp_path),
        "--max-total-tokens",
        8192,
        "--port",
        port,
    ]
    command = [SPECGOV, "sglang", "launch", "--target", target, "--", *flags, *map(str, [*files, *more])]
    with (tmp_path / "server.log").open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=output, stderr=output, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, tmp_path)
    try:
        wait_until_it_answers(server)
        assert f"added: --speculative-adaptive; SPECGOV_TARGET={target}" in server.log
        assert "the fallback rule decides until the sidecar answers" in server.log
        # It has become the server: the same process.
        assert b"sglang.launch_server" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        _profile_and_calibrate(server, target, tmp_path)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        end(process)


def _profile_and_calibrate(server: Server, target: str, folder: Path) -> None:
    recording, made = folder / "steps.jsonl", folder / "made.json"
    options = ["--url", server.url, "--target", target, "--vocabulary", "10-245", "--batch-sizes", "1,4"]
    # One CPU core's times scatter: what is tested is the way from a server to a profile.
    wide = ["--contexts", "64,256", "--precision", "0.5", "--hold-steps", "8"]
    done = subprocess.run(
        [SPECGOV, "sglang", "profile", "-o", str(recording), *options, *wide],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("num_steps 0 ") == done.stdout.count("num_steps 3 ") == 4
    calibrate = [SPECGOV, "calibrate", str(recording), "-o", str(made), "--model", "llama-3.1-8b"]
    subprocess.run([*calibrate, "--hardware", "H200"], check=True, timeout=120)
    profile = json.loads(made.read_text())
    assert profile["tiers"] == [0, 1, 3]
    assert profile["facts"]["measured_cells"] >= 2 * 2 * 3
