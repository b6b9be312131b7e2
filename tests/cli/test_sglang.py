"""``specgov sglang``: the front of doctor, launch and check-wheel, and profile against a made-up server."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgov.client import Report, StreamClient
from specgov.controller.cli.cell_times import LogTail, cell_times, median_half_width
from specgov.controller.cli.main import main
from specgov.controller.cli.sglang_load import Load, is_one_token
from specgov.controller.cli.sglang_profile import default_batch_sizes, lengths
from specgov.env.recording import Row
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.sglang_plugin import versions
from specgov.sglang_plugin.errors import PluginError

TIERS = (0, 1, 3)


def step_us(batch_size: int, num_steps: int) -> int:
    """What a step of the made-up server costs."""
    return 5000 + 100 * batch_size + 500 * num_steps


@dataclass
class MadeUpServer:
    """Answers /generate by playing decode steps to the sidecar, one decision at a time; accepts no draft."""

    target: str
    one_token: bool = False
    scatter: float = 0.0
    scatters_at: tuple[int, ...] = (1, 2, 4)
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    url: str = ""
    _step: int = 0

    def start(self) -> None:
        info = pb.EngineInfo(
            engine_id="made-up", boot_id="1", engine="sglang", tiers=TIERS, max_running_requests=4
        )
        info.kv_capacity_tokens = 4 * 1000
        self._client = StreamClient(self.target, info)
        self._client.start()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"model_path": "m"} if self.path == "/model_info" else None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self._answer(owner.generate(body))

            def _answer(self, value: Any) -> None:
                self.send_response(200 if value is not None else 400)
                self.end_headers()
                self.wfile.write(json.dumps(value if value is not None else "too long").encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._client.close()

    def generate(self, body: dict[str, Any]) -> Any:
        prompts, tokens = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        batch_size, context = len(prompts), len(prompts[0])
        if context > 900:
            return None
        self.batches.append((batch_size, context, tokens))
        self._step += 5  # a prefill in between: the first step's time means nothing
        for done in range(tokens):
            self._decode(batch_size, context + done, first=done == 0)
        ids = [7] * tokens if self.one_token else list(range(tokens))
        return [{"output_ids": ids} for _ in prompts]

    def _decode(self, batch_size: int, length: int, *, first: bool) -> None:
        decision = self._client.wait_for_step(self._step, 1.0) if not first else self._client.newest()
        num_steps = decision.num_steps if decision is not None else TIERS[-1]
        self._step += 1
        slow = self.scatter * (self._step % 2) if batch_size in self.scatters_at else 0.0
        step_time_us = int(step_us(batch_size, num_steps) * (1 + slow))
        self._client.submit(
            Report(
                step_id=self._step,
                batch_size=batch_size,
                num_steps=num_steps,
                accepted=np.zeros(batch_size, np.uint8),
                slots=np.zeros(0, np.uint16),
                generations=np.zeros(0, np.uint8),
                sum_seq_len_tokens=batch_size * length,
                max_seq_len_tokens=length,
                step_time_us=0 if first else step_time_us,
                step_time_valid=not first,
            )
        )


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeUpServer]:
    server = MadeUpServer(f"unix://{tmp_path_factory.mktemp('s')}/s")
    server.start()
    yield server
    server.stop()


def profile(server: MadeUpServer, out: Path, *arguments: str) -> int:
    common = ["--url", server.url, "--target", server.target, "-o", str(out), "--hold-steps", "6"]
    return main(["sglang", "profile", *common, *arguments])


def test_a_profile_is_recorded_and_can_be_calibrated(
    server: MadeUpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "steps.jsonl"
    assert profile(server, out, "--contexts", "64,256", "--batch-sizes", "1,4") == 0
    # Answers of one turn of all tiers, 6 * (1 + 2 + 4) tokens; prompts of half of it less than the context,
    # or of 0.72 times the context where that is more: 256 - 21, ceil(0.72 * 64).
    # Times do not scatter, so two rounds are enough, and they are rounds: no batch is repeated at once.
    assert server.batches == [(1, 47, 42), (4, 47, 42), (1, 235, 42), (4, 235, 42)] * 2
    said = capsys.readouterr().out
    # The made-up server's times do not scatter: medians are its formula, exactly.
    assert "num_steps 3 6.60 ms +-0.0%, p99 6.60 ms" in said
    assert "num_steps 0 5.40 ms +-0.0%" in said
    made = tmp_path / "made.json"
    assert (
        main(["calibrate", str(out), "-o", str(made), "--model", "llama-3.1-8b", "--hardware", "H200"]) == 0
    )
    assert json.loads(made.read_text())["facts"]["measured_cells"] == 2 * 2 * 3


def test_lengths_stay_near_their_power_of_two() -> None:
    # floor(1.4 * 64) - ceil(0.72 * 64) = 89 - 47 tokens have room; 16 * (1 + 3) = 64 do not, 6 * 4 do.
    assert lengths(64, (0, 2), 16) == (47, 42)
    # 64 in the middle of 24: from 52 to 76. Of 384 tokens around 4096: from 3904 to 4288.
    assert lengths(64, (0, 2), 6) == (52, 24)
    assert lengths(4096, (0, 1, 2, 3, 5, 7), 16) == (3904, 384)
    for context in (8, 512, 4096):
        prompt, tokens = lengths(context, range(16), 16)
        assert round(math.log2(prompt)) == round(math.log2(prompt + tokens)) == math.log2(context)


def test_default_batch_sizes_and_what_does_not_fit(
    server: MadeUpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 4 * (2027 + 42) tokens are more than the 4,000 of the cache; the server takes prompts of 900 at most.
    assert profile(server, tmp_path / "a", "--contexts", "2048", "--batch-sizes", "4") == 0
    assert "left out, the KV cache holds 4000 tokens only" in capsys.readouterr().out
    assert profile(server, tmp_path / "b", "--contexts", "2048", "--batch-sizes", "1") == 1
    assert "refused with 400" in capsys.readouterr().err
    assert default_batch_sizes(pb.EngineInfo(max_running_requests=48)) == [1, 2, 4, 8, 16, 32, 48]
    assert default_batch_sizes(pb.EngineInfo(max_running_requests=48, graph_batch_sizes=[1, 8])) == [
        1,
        2,
        4,
        8,
    ]
    assert default_batch_sizes(pb.EngineInfo())[-1] == 256


def test_a_median_that_is_not_sure_enough_is_told(
    server: MadeUpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every other step takes 10 % longer: the interval of the median reaches from one kind to the other.
    server.scatter = 0.1
    assert profile(server, tmp_path / "a", "--contexts", "64", "--batch-sizes", "2", "--max-rounds", "2") == 1
    assert "batch size 2, 2 rounds" in capsys.readouterr().out


def test_only_what_is_not_sure_goes_into_more_rounds(
    server: MadeUpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scatters_at = (2,)
    server.scatter = 0.1
    options = ("--contexts", "64", "--batch-sizes", "1,2,4", "--max-rounds", "4")
    assert profile(server, tmp_path / "a", *options) == 1
    assert [batch[0] for batch in server.batches] == [1, 2, 4, 1, 2, 4, 2, 2]
    said = capsys.readouterr().out
    assert "batch size 1, 2 rounds" in said
    assert "batch size 4, 2 rounds" in said
    assert "batch size 2, 4 rounds" in said


def test_one_round_where_no_more_are_wanted(server: MadeUpServer, tmp_path: Path) -> None:
    profile(server, tmp_path / "a", "--contexts", "64", "--batch-sizes", "1,4", "--max-rounds", "1")
    assert [batch[0] for batch in server.batches] == [1, 4]


def test_answers_of_one_token_are_warned_of(
    server: MadeUpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.one_token = True
    profile(server, tmp_path / "a", "--contexts", "64", "--batch-sizes", "1")
    assert "real-draft-token" in capsys.readouterr().err
    assert not is_one_token([[7] * 9, [8] * 9])
    assert not is_one_token([[7] * 8])


def test_no_server_no_engine_no_room(
    server: MadeUpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["sglang", "profile", *arguments])
        return code, capsys.readouterr().err

    out = str(tmp_path / "a")
    code, said = run("-o", out, "--url", "http://127.0.0.1:9")
    assert (code, "no SGLang server answers" in said) == (3, True)
    assert run("-o", out, "--url", "nonsense")[0] == 1
    other = f"unix://{tmp_path}/o"
    code, said = run("-o", out, "--url", server.url, "--target", other, "--wait-s", "0")
    assert (code, "no engine connects" in said) == (3, True)
    Path(out).unlink(missing_ok=True)
    for wrong in (
        ["--precision", "0"],
        ["--max-rounds", "0"],
        ["--hold-steps", "5"],
        ["--vocabulary", "9"],
        ["--batch-sizes", "0"],
        ["--contexts", "500"],
    ):
        code, said = run("-o", out, *wrong)
        assert (code, wrong[0] in said) == (2, True)
    Path(out).touch()
    assert run("-o", out)[0] == 2


def test_prompts_are_the_same_each_time_and_of_the_wanted_ids() -> None:
    load = Load("http://x", 10, 12, seed=3)
    assert load.prompts(2, 50) == load.prompts(3, 50)[:2]
    assert {token for prompt in load.prompts(3, 50) for token in prompt} == {10, 11, 12}
    assert load.prompts(1, 50) != Load("http://x", 10, 12, seed=4).prompts(1, 50)


def test_how_sure_a_median_is() -> None:
    # Ranks of 100 values: 49.5 -+ 9.8, so from the 40th to the 61st of 0..99 (floor 39, ceiling 60).
    assert median_half_width(np.arange(100.0)) == (60 - 39) / 2
    assert median_half_width(np.full(6, 3.0)) == 0.0
    assert math.isinf(median_half_width(np.arange(3.0)))


@pytest.mark.parametrize(
    ("runs", "wanted", "counted"),
    [(255, 256, 13), (252, 256, 13), (251, 256, 0), (257, 256, 0), (64, 64, 13), (62, 64, 0), (31, 32, 0)],
)
def test_a_batch_short_of_few_requests_counts(runs: int, wanted: int, counted: int) -> None:
    # Of sixteen steps at a tier those count that have three like them before.
    rows = [Row(i, True, runs, 1, 1000 * i, 5.0, run_batch_size=runs) for i in range(1, 17)]
    (cell,) = cell_times(rows, wanted, (1,))
    assert (cell.steps, cell.median_ms) == (
        (counted, 5.0) if counted else (0, pytest.approx(math.nan, nan_ok=True))
    )


def test_a_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    row = {
        "kind": "step",
        "step_id": 1,
        "batch_size": 2,
        "num_steps": 1,
        "sum_seq_len_tokens": 9,
        "step_ms": 5.0,
        "padded_batch_size": 2,
        "flags": [],
    }
    path, line = tmp_path / "log", json.dumps(row)
    tail = LogTail(path)
    assert tail.new_steps() == []
    path.write_text(f'{{"kind":"log"}}\n{line}\n{line[:9]}')
    assert [step.batch_size for step in tail.new_steps()] == [2]
    path.write_text(f'{{"kind":"log"}}\n{line}\n{line}\n')
    assert [step.batch_size for step in tail.new_steps()] == [2]
    assert [(cell.num_steps, cell.steps) for cell in cell_times([], 2, (0, 1))] == [(0, 0), (1, 0)]


def test_a_cells_p99_is_that_of_its_nearest_step() -> None:
    # Of 200 steps at 1 to 200 ms the first three settle: of 197, 4 to 200 ms, the 196th is the first from
    # 0.99 * 197 = 195.03 on.
    rows = [Row(i, True, 1, 1, 1000, float(i), run_batch_size=1) for i in range(1, 201)]
    (cell,) = cell_times(rows, 1, (1,))
    assert (cell.steps, cell.median_ms, cell.p99_ms) == (197, 102.0, 199.0)


def test_doctor_and_launch_without_sglang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def missing() -> str:
        raise PluginError("SGLang is not installed in this environment")

    monkeypatch.setattr(versions, "installed_version", missing)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SPECGOV_TARGET", raising=False)
    assert main(["sglang", "doctor", "--target", f"unix://{tmp_path}/s", "--", "--model-path", "m"]) == 1
    said = capsys.readouterr().out
    assert "SGLang is not installed" in said
    assert said.endswith("3 checks, 2 failed\n")
    assert main(["sglang", "launch", "--", "--model-path", "m"]) == 1
    assert f"{tmp_path}/specgov/specgov.sock" in "".join(capsys.readouterr().out.split())
    assert main(["sglang", "doctor"]) == 2
    assert "after --" in capsys.readouterr().err


def test_check_wheel_says_what_is_wrong_with_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sglang", "check-wheel", str(tmp_path / "sglang-0.5.23-x.whl")]) == 1
    assert "cannot be read as a wheel" in capsys.readouterr().err
