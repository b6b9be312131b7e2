"""Many engines on one sidecar for long, some of them always reconnecting; then restarts, all back at once.

    python benchmarks/soak.py -o out/soak.json [--minutes 20] [--engines 64] [--steps-per-s 60]

64 engines at 60 steps/s make what one core was measured to take; on a machine whose cores have other work,
let them make fewer. ``--pin`` gives the sidecar a core of its own.

The sidecar is a process of its own with all that it may write: decision log, saved states; its guard is on.
Every second engine has the policy ``threshold:32:3``, whose decisions are known beforehand, the others
``--policy``. A tenth of the engines reconnects each second: one in two after its last report was decided on,
one in two at once, as a crash would; one in four with a new boot.

Wrong is a decision that the engine could not follow (tier, ranges, numbers), whose id is not the next of its
stream, that knows less than the one before or more than was sent, that is for another batch, or is not what
``threshold:32:3`` gives where the guard did not step in. Lost is a report that no decision knows, itself or
through a later one, within 30 s; reports that were under way when a connection was cut are counted apart.
Any wrong or lost one, and any stream that the sidecar ends, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import select
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import machine
import numpy as np
from engine_load import LoadError
from sidecar_watch import MemoryWatch, WatchedSidecar, memory_facts
from soak_engine import EXACT_POLICY, LOST_S, SoakEngine, Tally

from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

RECONNECTING_SHARE_PER_S = 0.1
NEW_BOOT_SHARE = 0.25
LOG_MB = 8.0
"""Small, so that the log is rotated many times."""
RETRY_S, ALL_COME_S = 0.02, 60.0


@dataclass
class Fleet:
    """All engines, each with one stream."""

    socket_path: str
    step_s: float
    seed: int
    tally: Tally = field(default_factory=Tally)
    engines: dict[int, SoakEngine] = field(default_factory=dict)
    draining: set[int] = field(default_factory=set)

    def connect(self, number: int, *, new_boot: bool = False, first_step_s: float) -> SoakEngine:
        """Give an engine a new stream, the old one being closed."""
        old = self.engines.get(number)
        boot_id, last_step = ("boot-0", 0) if old is None else (old.boot_id, old.steps)
        if new_boot:
            boot_id, last_step = f"boot-{int(boot_id[5:]) + 1}", 0
        engine = SoakEngine(self.socket_path, number, boot_id, last_step, self.seed, self.tally)
        engine.next_s = first_step_s
        self.engines[number] = engine
        self.draining.discard(number)
        return engine

    def reconnect(self, number: int, rng: np.random.Generator) -> None:
        self.tally.reconnects += 1
        self.connect(
            number,
            new_boot=bool(rng.random() < NEW_BOOT_SHARE),
            first_step_s=time.monotonic() + self.step_s,
        )

    def turn(self) -> None:
        """Make the steps that are due, and read what has come."""
        now_s = time.monotonic()
        due = [n for n, engine in self.engines.items() if engine.next_s <= now_s and n not in self.draining]
        for number in due:
            engine = self.engines[number]
            engine.send_step(now_s)
            engine.next_s += self.step_s
            if engine.next_s < now_s - LOST_S:  # this machine was stopped, or is too slow for the rate
                engine.next_s = now_s
        sockets = {engine.socket: engine for engine in self.engines.values()}
        soonest_s = min(engine.next_s for engine in self.engines.values())
        wait_s = min(0.01, max(0.0, soonest_s - time.monotonic()))
        for ready in select.select(list(sockets), [], [], wait_s)[0]:
            engine = sockets[ready]
            try:
                engine.receive()
            except (LoadError, OSError) as error:
                self.tally.streams_ended_by_the_sidecar += 1
                self.tally.problems.append(f"{engine.engine_id}: {error}")
                engine.close()
                self.connect(engine.number, first_step_s=now_s + self.step_s)

    def shuffle(self, rng: np.random.Generator, count: int) -> None:
        """Let ``count`` engines reconnect: half at once, half when their last report is decided on."""
        free = [number for number in self.engines if number not in self.draining]
        for number in rng.permutation(free)[:count].tolist():
            if rng.random() < 0.5:
                self.engines[number].cut()
                self.reconnect(number, rng)
            else:
                self.draining.add(number)

    def finish_drained(self, rng: np.random.Generator) -> None:
        for number in list(self.draining):
            engine = self.engines[number]
            engine.count_lost(time.monotonic())
            if engine.is_answered:
                engine.close()
                self.reconnect(number, rng)


def soak(fleet: Fleet, seconds: float, rng: np.random.Generator) -> float:
    """Run the load, and then wait until every report is decided on or lost; seconds of the load."""
    begun_s, engines = time.monotonic(), len(fleet.engines)
    for number, engine in fleet.engines.items():
        engine.next_s = begun_s + fleet.step_s * number / engines
    owed, last_s, shown_s = 0.0, begun_s, begun_s
    while (now_s := time.monotonic()) < begun_s + seconds:
        fleet.turn()
        owed += (now_s - last_s) * RECONNECTING_SHARE_PER_S * engines
        last_s = now_s
        if owed >= 1.0:
            fleet.shuffle(rng, int(owed))
            owed -= int(owed)
        fleet.finish_drained(rng)
        if now_s - shown_s > 30.0:
            shown_s = now_s
            _say(f"{now_s - begun_s:.0f} s: {fleet.tally.reports} reports, {fleet.tally.wrong} wrong, "
                 f"{fleet.tally.lost} lost, load average {os.getloadavg()[0]:.1f}")  # fmt: skip
    lasted_s = time.monotonic() - begun_s
    fleet.draining = set(fleet.engines)
    while not all(engine.is_answered for engine in fleet.engines.values()):
        fleet.turn()
        for engine in fleet.engines.values():
            engine.count_lost(time.monotonic())
    return lasted_s


def set_exact_policies(target: str, engines: int) -> None:
    """Give every second engine the policy whose decisions are known beforehand."""
    with grpc.insecure_channel(target) as channel:
        admin = pb_grpc.ControllerAdminStub(channel)
        for number in range(0, engines, 2):
            request = pb.SetPolicyRequest(engine_id=f"soak-{number}", policy=EXACT_POLICY)
            admin.SetPolicy(request, timeout=60.0)


def all_come(fleet: Fleet, engines: int) -> list[float]:
    """Let all engines connect at once; when each had its first decision, in seconds, in their order."""
    begun_s = time.monotonic()
    waiting = set(range(engines))
    connected: set[int] = set()
    first_s: list[float] = []
    while waiting and time.monotonic() < begun_s + ALL_COME_S:
        for number in sorted(waiting - connected):
            try:
                fleet.connect(number, first_step_s=begun_s)
            except OSError:
                time.sleep(RETRY_S)
            else:
                connected.add(number)
        sockets = {fleet.engines[number].socket: fleet.engines[number] for number in waiting & connected}
        for ready in select.select(list(sockets), [], [], RETRY_S)[0]:
            engine = sockets[ready]
            try:
                engine.receive()
            except (LoadError, OSError):
                engine.close()
                connected.discard(engine.number)
                continue
            if engine.has_decision:
                first_s.append(time.monotonic() - begun_s)
                waiting.discard(engine.number)
    return first_s


def engines_restored(target: str) -> int:
    """How many engines went on from what had been saved of them."""
    with grpc.insecure_channel(target) as channel:
        engines = (
            pb_grpc.ControllerAdminStub(channel).ListEngines(pb.ListEnginesRequest(), timeout=60.0).engines
        )
    return sum(engine.restored_reports > 0 for engine in engines)


def restart(fleet: Fleet, sidecar: WatchedSidecar, number: signal.Signals) -> dict[str, Any]:
    """End the sidecar, start it, let all engines come back at once: how long until all have a decision."""
    status, engines = sidecar.end(number), len(fleet.engines)
    for engine in fleet.engines.values():
        engine.close()
    start_s = sidecar.start()
    first_s = all_come(fleet, engines)
    return {
        "signal": number.name,
        "exit_status": status,
        "start_to_socket_s": round(start_s, 3),
        "without_decision": engines - len(first_s),
        "socket_to_decision_s_p50": round(float(np.median(first_s)), 3),
        "socket_to_decision_s_most": round(first_s[-1], 3),
        "engines_restored": engines_restored(sidecar.target),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Soak a sidecar with engines that come and go.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--steps-per-s", type=float, default=60.0, help="of each engine")
    parser.add_argument("--policy", default="greedy", help="of every second engine")
    parser.add_argument("--restarts", type=int, default=3, help="by SIGTERM, and as many by SIGKILL")
    parser.add_argument("--settle-minutes", type=float, help="left out of the memory's slope; a quarter")
    parser.add_argument("--pin", action="store_true", help="the sidecar on a core of its own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settle_s = 60.0 * (options.minutes / 4 if options.settle_minutes is None else options.settle_minutes)
    facts = machine.facts(("specgov", "grpcio", "protobuf", "numpy"))
    rng = np.random.default_rng(options.seed)
    core, *others = sorted(os.sched_getaffinity(0))
    if options.pin and others:
        os.sched_setaffinity(0, set(others))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "specgov.toml").write_text(
            f'policy = "{options.policy}"\n[decision_log]\npath = "{folder}/decisions.jsonl"\n'
            f'max_mb = {LOG_MB}\n[state]\ndir = "{folder}/states"\n'
        )
        sidecar = WatchedSidecar(
            folder, ["--config", str(folder / "specgov.toml")], {core} if options.pin else None
        )
        sidecar.start()
        try:
            fleet = Fleet(str(sidecar.socket_path), 1.0 / options.steps_per_s, options.seed)
            if len(all_come(fleet, options.engines)) < options.engines:
                raise SystemExit(f"not all engines get a decision:\n{sidecar.messages()[-2000:]}")
            set_exact_policies(sidecar.target, options.engines)
            with MemoryWatch(sidecar, every_s=2.0) as watch:
                lasted_s = soak(fleet, 60.0 * options.minutes, rng)
            busy_s = _cpu_s(sidecar.pid)
            load = [round(value, 2) for value in os.getloadavg()]
            before_restarts = copy.deepcopy(fleet.tally)
            kinds = [signal.SIGTERM, signal.SIGKILL] * options.restarts
            restarts = [restart(fleet, sidecar, kind) for kind in kinds]
        finally:
            if sidecar.lives:
                sidecar.end(signal.SIGTERM)
        document = {
            "machine": facts,
            "load_average_at_the_end": load,
            "engines": options.engines,
            "steps_per_s_each": options.steps_per_s,
            "policy": options.policy,
            "seconds": round(lasted_s, 1),
            "reports_per_s": round(before_restarts.reports / lasted_s, 1),
            "sidecar_cpu_share": round(busy_s / lasted_s, 3),
            **_told(before_restarts),
            "memory": memory_facts(watch.samples, settle_s),
            "restarts": restarts,
            **sidecar.said(),
        }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    tally = before_restarts
    bad = tally.wrong or tally.lost or tally.streams_ended_by_the_sidecar
    bad = bad or any(found["without_decision"] for found in restarts) or document["tracebacks_in_the_log"]
    sys.exit(1 if bad else 0)


def _told(tally: Tally) -> dict[str, Any]:
    told = {key: value for key, value in vars(tally).items() if key != "round_trips_s"}
    p50, p99, most = np.percentile(np.asarray(tally.round_trips_s), (50, 99, 100)).tolist()
    return told | {
        "round_trip_ms_p50": round(p50 * 1e3, 2),
        "round_trip_ms_p99": round(p99 * 1e3, 2),
        "round_trip_ms_most": round(most * 1e3, 1),
    }


def _cpu_s(pid: int) -> float:
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
