"""The sidecar of a contest: the right process for a contestant, and its policy, fresh."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from contestants import Contestant
from real_server import process, specgov

from specgov.proto.v1 import specgov_pb2 as pb
from specgov.proto.v1 import specgov_pb2_grpc as pb_grpc

ENGINE = "benchmark"
WAIT_S = 30.0
FLUSH_S = 0.2
HERE = Path(__file__).parent
_RULES = ("random", "turns")
"""Of ``rules_sidecar.py``."""


class GovernorError(RuntimeError):
    """The sidecar or the engine's stream to it is not as it must be."""


class Governor(contextlib.ExitStack):
    """Starts and replaces the sidecar at ``target``.

    A sidecar holds one profile, so a contestant with another one gets another process; the engine connects to
    it by itself. A policy that is set anew knows nothing of what was learnt before.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._socket = folder / "s.sock"
        self.target = f"unix://{self._socket}"
        self._running: tuple[str, str] | None = None
        self._started = 0
        self._log: Path | None = None
        self._read_to = 0

    def serve(self, contestant: Contestant) -> None:
        """Let the engine be governed as ``contestant`` says, from nothing."""
        wanted = contestant.policy.partition(":")[0]
        self.start("rules" if wanted in _RULES else "serve", contestant.profile)
        self._wait_for_engine()
        with grpc.insecure_channel(self.target) as channel:
            request = pb.SetPolicyRequest(engine_id=ENGINE, policy=contestant.policy)
            engine = pb_grpc.ControllerAdminStub(channel).SetPolicy(request, timeout=10).engine
        if engine.policy != wanted or engine.policy_failure:
            raise GovernorError(f"wanted the policy {wanted}: {engine.policy} {engine.policy_failure}")

    def tiers(self) -> list[int]:
        """The engine's tiers."""
        return list(self._engine().info.tiers)

    def steps(self) -> list[dict[str, Any]]:
        """The steps in the decision log that were not read yet, without warm-up."""
        if self._log is None or not self._log.exists():
            return []
        time.sleep(2 * FLUSH_S)  # the log is written every FLUSH_S
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        rows = [json.loads(line) for line in whole.splitlines()]
        return [row for row in rows if row.get("kind") == "step" and "warm_up" not in row["flags"]]

    def skip_steps(self) -> None:
        """Pass over what is in the decision log."""
        if self._log is not None and self._log.exists():
            self._read_to = self._log.stat().st_size

    def complaints(self) -> list[str]:
        """What sidecars said that is no information."""
        texts = (path.read_text(errors="replace") for path in sorted(self._folder.glob("sidecar*.log")))
        lines = (line for text in texts for line in text.splitlines())
        return [line[:300] for line in lines if '"info"' not in line and "[info" not in line and line.strip()]

    def stop(self) -> None:
        """End the sidecar."""
        self.close()
        self._running = self._log = None

    def start(self, kind: str, profile: str) -> None:
        """Have a sidecar of this kind with this profile; the engine may come later."""
        if self._running == (kind, profile):
            return
        self.stop()
        self._started += 1
        said = self._folder / f"sidecar{self._started}.log"
        if kind == "rules":
            command = [sys.executable, str(HERE / "rules_sidecar.py"), self.target]
        else:
            self._log, self._read_to = self._folder / f"decisions{self._started}.jsonl", 0
            config = self._folder / "specgov.toml"
            config.write_text(
                f"[decision_log]\npath = {json.dumps(str(self._log))}\nmax_mb = 4096\nflush_s = {FLUSH_S}\n"
            )
            options = ("--policy", "static:0", "--profile", profile, "--config", str(config))
            command = specgov("serve", "--listen", self.target, *options)
        child = self.enter_context(process(command, said, PYTHONPATH=os.environ.get("PYTHONPATH", "")))
        deadline_s = time.monotonic() + WAIT_S
        while not self._socket.exists():
            if child.poll() is not None or time.monotonic() > deadline_s:
                raise GovernorError(f"the sidecar does not start:\n{said.read_text()[-3000:]}")
            time.sleep(0.05)
        self._running = (kind, profile)

    def _wait_for_engine(self) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(grpc.RpcError, GovernorError):
                if self._engine().connected:
                    return
            if time.monotonic() > deadline_s:
                raise GovernorError(f"the engine does not connect within {WAIT_S:g} s")
            time.sleep(0.05)

    def _engine(self) -> pb.EngineState:
        with grpc.insecure_channel(self.target, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            engines = (
                pb_grpc.ControllerAdminStub(channel).ListEngines(pb.ListEnginesRequest(), timeout=5).engines
            )
        for engine in engines:
            if engine.info.engine_id == ENGINE:
                return engine
        raise GovernorError(f"the engine {ENGINE} is not connected")
