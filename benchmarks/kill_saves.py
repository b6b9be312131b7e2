"""Kill -9 at random moments while states are saved and bundles pushed: what is left must be whole.

    python benchmarks/kill_saves.py -o out/kill_saves.json [--kills 200] [--seed 0]

Again and again a process takes up the state that is there, makes steps, saves after each, and pushes a bundle
now and then; it says so after each, and is killed after up to 150 ms. Then everything must be readable: no
state set aside, no bundle damaged, and nothing lost that had been said to be done. Anything else ends the run
with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

from specgov.controller.bundles import push, stored_bundles
from specgov.controller.config import ServeConfig, StateConfig
from specgov.controller.engine import Engine
from specgov.controller.state import StateKeeper
from specgov.controller.validation import check_info
from specgov.policies.bundle import load_bundle, save_bundle
from specgov.proto.v1 import specgov_pb2 as pb

LARGEST_DELAY_S = 0.15
STEPS_BY_PUSH = 2
KEPT_VERSIONS = 5
INFO = pb.EngineInfo(engine_id="e", boot_id="b", tiers=[0, 1, 3, 5], max_running_requests=64)


def take_up(folder: Path) -> tuple[Engine, StateKeeper]:
    """An engine with what was saved of it, and its keeper, as a sidecar makes them at its start."""
    engine = Engine(INFO, check_info(INFO), ServeConfig(), clock=lambda: 0.0)
    keeper = StateKeeper(StateConfig(dir=str(folder / "states"), every_s=86_400.0), 10, lambda: [engine])
    keeper.start()
    saved = keeper.saved("e")
    if saved is not None:
        engine.resume(saved)
    return engine, keeper


def work(folder: Path, say: int) -> None:
    """Make steps, save and push until killed; ``say`` is a pipe that hears of what is done."""
    engine, keeper = take_up(folder)
    step_id = 1_000_000 * (engine.restored_reports + 1)
    while True:
        step_id += 1
        engine.observe(
            pb.StepReport(
                step_id=step_id, batch_size=2, num_steps=3, accepted_drafts=bytes([1, 3]),
                sum_seq_len_tokens=100, max_seq_len_tokens=60, step_time_us=6000, step_time_valid=True,
            )
        )  # fmt: skip
        keeper.save()
        os.write(say, b"s")
        if step_id % STEPS_BY_PUSH == 0:
            push(folder / "bundle", folder / "store")
            os.write(say, b"p")


def kill_once(folder: Path, rng: random.Random) -> tuple[int, int]:
    """Start the work and kill it; how many saves and pushes it had said to be done."""
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(folder, say)
        finally:
            os._exit(1)  # only an error leads here
    os.close(say)
    said = os.read(hear, 1)
    time.sleep(rng.uniform(0, LARGEST_DELAY_S))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit("the work ended by itself: see its error above")
    while more := os.read(hear, 4096):
        said += more
    os.close(hear)
    return said.count(b"s"), said.count(b"p")


def check(folder: Path, reports_before: int, saves: int, versions: int) -> int:
    """Read all that is there; the reports that the state now rests on."""
    engine, keeper = take_up(folder)
    keeper.close(60.0)
    if keeper.set_aside or engine.restored_reports < reports_before + saves:
        raise SystemExit(f"{reports_before} + {saves} reports were saved, {engine.restored_reports} are left")
    stored = stored_bundles(folder / "store")
    if any(bundle.problem for bundle in stored) or (stored and stored[-1].version < versions):
        raise SystemExit(f"{versions} bundles were pushed, and there are {stored}")
    for bundle in stored[:-KEPT_VERSIONS]:
        shutil.rmtree(folder / "store" / bundle.name / str(bundle.version))
    return engine.restored_reports


def main() -> None:
    """Kill and check."""
    parser = argparse.ArgumentParser(description="Kill -9 while states are saved and bundles pushed.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    facts, rng = machine.facts(("numpy", "safetensors")), random.Random(arguments.seed)
    reports = versions = left_over = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_bundle(load_bundle("default"), folder / "bundle")
        for _ in range(arguments.kills):
            saves, pushes = kill_once(folder, rng)
            left_over += sum(1 for _ in (folder / "states").glob("*.tmp"))
            for half in list((folder / "store").glob("*/.push-*")):
                left_over += 1
                shutil.rmtree(half)
            versions += pushes
            reports = check(folder, reports, saves, versions)
            versions = max([versions, *(bundle.version for bundle in stored_bundles(folder / "store"))])
    document: dict[str, Any] = {
        "machine": facts,
        "kills": arguments.kills,
        "reports": reports,
        "bundles": versions,
        "left_half_written": left_over,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
