"""What the decision log costs: bytes and time a row, and time and memory of a report on it.

    python benchmarks/decision_log.py --rows 1000000 -o out/decision_log.json

For each format it writes a log of that many steps of an engine with six tiers and batches of 1 to 255, and
makes a report of it in a process of its own. CPU time counts, since others may have the cores; beside the
report's stands the time by the clock. The writer's is that of the log's thread: making rows and encoding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import numpy as np

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log import DecisionLog
from specgov.controller.step_record import StepRecord
from specgov.policies.types import StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

TIERS = (0, 1, 2, 3, 5, 7)
BURST_STEPS = 1000

REPORT = """
import json, resource, sys, time
from specgov.controller.cli.main import main
started_s = time.perf_counter()
code = main(["report", sys.argv[1], "-o", sys.argv[2]])
seconds = time.perf_counter() - started_s
cpu_s = time.process_time()
peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"code": code, "report_s": round(seconds, 1), "report_cpu_s": round(cpu_s, 1),
                  "report_peak_mb": round(peak_mb)}))
"""


def write(path: Path, rows: int) -> float:
    """Write the log; returns the CPU seconds that the writer took."""
    now_s = [1_700_000_000.0]
    config = DecisionLogConfig(max_mb=100_000, queue_rows=10 * BURST_STEPS, rotate_s=1e9)
    log = DecisionLog(path, config, wall_clock=lambda: now_s[0])
    log.stream(pb.EngineInfo(engine_id="benchmark", tiers=TIERS, max_running_requests=256), "greedy")
    rng = np.random.default_rng(0)
    no_slots, no_generations = np.zeros(0, np.uint16), np.zeros(0, np.uint8)
    taken_s = 0.0
    for step_id in range(1, rows + 1):
        now_s[0] += 0.01
        batch = int(128 + 127 * np.sin(step_id / 5000))
        tier = TIERS[step_id // 100 % len(TIERS)]
        step = StepObservation(
            step_id=step_id,
            batch_size=batch,
            num_steps=tier,
            accepted=np.minimum(rng.geometric(0.3, batch) - 1, tier).astype(np.uint8),
            slots=no_slots,
            generations=no_generations,
            sum_seq_len_tokens=700 * batch,
            max_seq_len_tokens=2000,
            padded_batch_size=batch,
            step_ms=5.0 + tier / 2 + batch * (tier + 1) / 100,
        )
        decision = pb.Decision(
            decision_id=step_id,
            known_step_id=step_id,
            num_steps=tier,
            reason=pb.REASON_POLICY,
            policy="greedy",
            policy_version="1",
            propensity=1.0,
            estimates=[
                pb.TierEstimate(
                    num_steps=k,
                    expected_tokens=batch * (1 + k / 2),
                    expected_ms=5 + k / 2 + batch * (k + 1) / 100,
                )
                for k in TIERS
            ],
        )
        log.steps("benchmark", [StepRecord(step, step_id - 1, 1, None, 0)], decision, pb.MODE_ACTIVE)
        if step_id % BURST_STEPS == 0 or step_id == rows:
            started_s = time.process_time()
            log.flush(final=step_id == rows)
            taken_s += time.process_time() - started_s
    if log.rows_dropped:
        raise SystemExit(f"{path}: {log.rows_dropped} rows were dropped")
    return taken_s


def measure(name: str, rows: int, folder: Path) -> dict[str, float | str]:
    """One format."""
    path = folder / name
    write_s = write(path, rows)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    command = [sys.executable, "-c", REPORT, str(path), str(folder / "report.html")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return {
        "format": Path(name).suffix[1:],
        "rows": rows,
        "bytes_per_row": round(size / rows, 1),
        "write_cpu_us_per_row": round(1e6 * write_s / rows, 1),
        **json.loads(ran.stdout.splitlines()[-1]),
        "report_kb": round((folder / "report.html").stat().st_size / 1000),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    facts = machine.facts(("numpy", "pyarrow", "protobuf"))
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(name, arguments.rows, Path(folder)) for name in ("log.jsonl", "log.parquet")]
    text = json.dumps({"machine": facts, "results": results}, indent=1)
    print(text)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
