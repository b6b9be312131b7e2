"""Kill -9 at random moments while a sidecar's parts write: what is left must be whole.

    python benchmarks/kill_saves.py -o out/kill_saves.json [--kills 200] [--seed 0]

Again and again a process takes up the state that is there, and in random order makes a step and saves the
state, writes and rotates a decision log, pushes a bundle into the store, and rewrites the folder of the
configured policy and reloads it; it says so after each, and is killed after up to 150 ms. Then everything
must be usable: no state set aside, no bundle of the store damaged, no row of the log lost or doubled (the
line that was being written excepted), and nothing lost that had been said to be done. Only the rewritten
folder may be half of each bundle, as its writer was killed too: then it is refused, and usable once it is
written again. Anything else ends the run with an error.
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
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np

from specgov.controller.bundles import Bundles, BundleWatcher, push, stored_bundles
from specgov.controller.config import BundlesConfig, DecisionLogConfig, ServeConfig, StateConfig
from specgov.controller.decision_log import DecisionLog
from specgov.controller.engine import Engine
from specgov.controller.state import StateKeeper
from specgov.controller.validation import check_info
from specgov.env.logged_rows import read_rows
from specgov.policies.bundle import Bundle, BundleError, load_bundle, save_bundle
from specgov.proto.v1 import specgov_pb2 as pb

LARGEST_DELAY_S = 0.15
KEPT_VERSIONS = 5
ROWS_AT_ONCE, LOG_MB, KEPT_LOGS = 20, 0.005, 400
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


@dataclass
class Done:
    """What was said to be done, or is found: reports saved, rows of the log, bundles of the store."""

    reports: int = 0
    rows: int = 0
    versions: int = 0
    reloads: int = 0


def open_log(folder: Path) -> DecisionLog:
    return DecisionLog(folder / "log.jsonl", DecisionLogConfig(max_mb=LOG_MB, keep_files=1_000))


def watcher_of(folder: Path, engine: Engine) -> BundleWatcher:
    """Of the folder that is the configured policy; it looks only when it is told to."""
    config = ServeConfig(policy=f"ppo:{folder / 'watched'}", bundles=BundlesConfig(watch_s=86_400.0))
    return BundleWatcher(config, Bundles(config), lambda: [engine])


def work(folder: Path, say: int, first_row: int, rng: random.Random) -> None:
    """Do what a sidecar does until killed; ``say`` is a pipe that hears of what is done."""
    engine, keeper = take_up(folder)
    log, row = open_log(folder), first_row
    bundles = variants()
    save_bundle(bundles[0], folder / "watched")
    watcher = watcher_of(folder, engine)
    watcher.start()
    step_id = 1_000_000 * (engine.restored_reports + 1)
    os.write(say, b"b")
    while True:
        doing = rng.choice("slpr")
        if doing == "s":
            step_id += 1
            make_step(engine, step_id)
            keeper.save()
        elif doing == "l":
            for _ in range(ROWS_AT_ONCE):
                log.decided("e", pb.Decision(decision_id=row), pb.MODE_ACTIVE)
                row += 1
            log.flush()
        elif doing == "p":
            push(folder / "bundle", folder / "store")
        else:
            bundles.reverse()
            save_bundle(bundles[0], folder / "watched")
            watcher.look()
        os.write(say, doing.encode())


def make_step(engine: Engine, step_id: int) -> None:
    engine.observe(
        pb.StepReport(
            step_id=step_id, batch_size=2, num_steps=3, accepted_drafts=bytes([1, 3]),
            sum_seq_len_tokens=100, max_seq_len_tokens=60, step_time_us=6000, step_time_valid=True,
        )
    )  # fmt: skip


def variants() -> list[Bundle]:
    """Two bundles that differ in a weight."""
    bundle = load_bundle("default")
    other = replace(bundle.network, head_bias=bundle.network.head_bias + np.float32(0.25))
    return [bundle, replace(bundle, network=other)]


def kill_once(folder: Path, before: Done, rng: random.Random) -> Done:
    """Start the work and kill it; what is said to be done by then."""
    hear, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(folder, say, before.rows + 1, rng)
        except Exception:  # noqa: BLE001 - it is shown, and ends the run
            traceback.print_exc()
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
    return Done(
        before.reports + said.count(b"s"),
        before.rows + ROWS_AT_ONCE * said.count(b"l"),
        before.versions + said.count(b"p"),
        before.reloads + said.count(b"r"),
    )


def check(folder: Path, said: Done) -> Done:
    """Use all that is there as the next start does; what it holds now.

    Raises:
        SystemExit: something is damaged or lost.

    """
    engine, keeper = take_up(folder)
    keeper.close(60.0)
    if keeper.set_aside or engine.restored_reports < said.reports:
        raise SystemExit(f"{said.reports} reports were saved, {engine.restored_reports} are left")
    stored = stored_bundles(folder / "store")
    newest = max((bundle.version for bundle in stored), default=0)
    if any(bundle.problem for bundle in stored) or newest < said.versions:
        raise SystemExit(f"{said.versions} bundles were pushed, and there are {stored}")
    for bundle in stored[:-KEPT_VERSIONS]:
        shutil.rmtree(folder / "store" / bundle.name / str(bundle.version))
    return Done(engine.restored_reports, check_log(folder, said.rows), newest, said.reloads)


def check_log(folder: Path, said: int) -> int:
    """The newest row; the rows that are left follow each other, once a start has cut off the last line."""
    log = open_log(folder)
    log.start()
    log.close(60.0)
    files = sorted(folder.glob("log.jsonl*"), key=lambda path: int(path.suffix.strip(".jsonl") or 0))
    rows = [row for _, row in read_rows(files) if row["kind"] == "decision"] if files else []
    ids = sorted(row["decision"]["decision_id"] for row in rows)
    if ids != list(range(ids[0], ids[0] + len(ids))) if ids else said > 0:
        raise SystemExit(f"rows of the log are lost or doubled: {len(ids)} from {ids[:1]} to {ids[-1:]}")
    if ids and ids[-1] < said:
        raise SystemExit(f"{said} rows were written, and the last that is left is {ids[-1]}")
    for path in files[KEPT_LOGS:]:
        path.unlink()
    return ids[-1] if ids else 0


def watched_is_refused(folder: Path) -> bool:
    """Whether the next start refuses the folder of the configured policy; it must not, once it is written."""
    refused = False
    try:
        load_bundle(folder / "watched")
    except BundleError:
        refused = True
        save_bundle(load_bundle("default"), folder / "watched")
        load_bundle(folder / "watched")
    return refused


def main() -> None:
    """Kill and check."""
    parser = argparse.ArgumentParser(description="Kill -9 while states, logs and bundles are written.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    facts, rng = machine.facts(("numpy", "safetensors")), random.Random(arguments.seed)
    done, left_over, refused = Done(), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_bundle(load_bundle("default"), folder / "bundle")
        for _ in range(arguments.kills):
            said = kill_once(folder, done, random.Random(rng.random()))
            left_over += sum(1 for _ in (folder / "states").glob("*.tmp"))
            for half in list((folder / "store").glob("*/.push-*")):
                left_over += 1
                shutil.rmtree(half)
            refused += watched_is_refused(folder)
            done = check(folder, said)
    document: dict[str, Any] = {
        "machine": facts,
        "kills": arguments.kills,
        "reports": done.reports,
        "log_rows": done.rows,
        "bundles": done.versions,
        "reloads": done.reloads,
        "left_half_written": left_over,
        "configured_bundle_refused": refused,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
