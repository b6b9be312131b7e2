"""The runs of a contest on a server that answers: acceptance checked, loads played, figures written."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "plugin")]

from contestants import Contestant  # noqa: E402
from figures import Recorded, RecordTail, decisions, figures, recording  # noqa: E402
from governor import Governor  # noqa: E402
from loads import Load  # noqa: E402
from player import Player  # noqa: E402
from real_server import PORT, facts  # noqa: E402
from specgov_gpu_benchmark.rid import RequestId, Run  # noqa: E402
from specgov_gpu_benchmark.texts import steps_to_write  # noqa: E402

URL = f"http://127.0.0.1:{PORT}"
CHECKED = ("code", "mixed", "creative", "useless_drafter")
CHECK_TOKENS = 48
TABLE_STEPS = 80
TABLE_TOKENS = 400_000
"""Of a batch at most, so that it fits into the KV cache."""


class Contest:
    """A server that answers, its record, and what was played on it."""

    def __init__(self, options: argparse.Namespace, folder: Path, governor: Governor | None) -> None:
        self.options = options
        self.folder = folder
        self.governor = governor
        self.player = Player(URL, options.vocabulary, options.seed)
        self.tail = RecordTail(folder / "record" / "steps.0.csv")
        self.document: dict[str, Any] = {
            "command": "contest",
            **facts(options.server),
            "simulated_accept_length": "by request: see the loads",
            "server": "plain" if options.plain else "governed",
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "loads": {},
            "runs": [],
            "left_out": [],
            "cut": [],
            "failed": [],
        }
        self._played = 0

    def write(self) -> None:
        """Write the output, whole."""
        path = self.options.output
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.document, separators=(",", ":")) + "\n")
        part.replace(path)

    async def check(self, http: Any, num_steps: int, rule: str) -> None:
        """Let one request a class be written alone, and count its steps: the texts say how many it takes.

        Raises:
            SystemExit: acceptance on the server is not what it is meant to be.

        """
        for number, name in enumerate(CHECKED):
            rid = RequestId(Run("check", rule, self.options.seed), name, number)
            answer = await self.player.one(http, rid, 32, CHECK_TOKENS)
            took = answer["meta_info"].get("spec_verify_ct", CHECK_TOKENS - 1)
            should = steps_to_write(rid.text(), 32, CHECK_TOKENS, num_steps)
            if took != should:
                raise SystemExit(
                    f"{name} at num_steps {num_steps}: {took} steps for {CHECK_TOKENS} tokens, and the texts "
                    f"say {should}: acceptance is not what it must be; the end of the server's log:\n"
                    + (self.folder / "server.log").read_text(errors="replace")[-3000:]
                )
        self.document.setdefault("acceptance_checked_at", []).append(num_steps)

    async def play(self, http: Any, load: Load, who: Contestant, repeat: int) -> None:
        """One run: the contestant is put in force, the load is played, and the figures are noted."""
        if self.governor is not None and who.rule == "specgov":
            self.governor.serve(who)
            self.governor.skip_steps()
        self._played += 1
        # The same seed in a repeat for all: the same requests, the same texts.
        run = Run(f"{self._played}", who.rule, self.options.seed + repeat)
        played = await self.player.play(http, load.scenario, run)
        await self.close_run(http, run)
        runs = self.tail.read()
        recorded = runs.pop(run.name, Recorded())
        strangers = sum(
            played.began_s <= step.t_s < played.ended_s and step.live > 0
            for other in runs.values()
            for step in other.steps
        )
        if strangers:
            played.errors["steps of another run"] += strangers
        entry = {
            "load": load.name,
            "contestant": who.name,
            "repeat": repeat,
            "rule": who.rule if who.rule != "specgov" else who.policy,
            "profile": who.profile,
            "seed": run.seed,
            "duration_s": load.duration_s,
            "at_most": self.options.at_most,
            "errors": dict(played.errors),
            "requests": {"sent": len(played.sent_s), "finished": played.finished, "aborted": played.aborted},
            **figures(recorded, played.sent_s, played.began_s, load.count_from_s, load.duration_s),
        }
        if self.governor is not None and who.rule == "specgov":
            entry["decisions"] = decisions(self.governor.steps())
        self.document["runs"].append(entry)
        self.write()
        print(
            f"{load.name:12} {who.name:26} {entry['output_tokens_per_s']:8.0f} tok/s  steps "
            f"{entry['steps']:5} tiers {entry['tier_time_shares']} errors {sum(played.errors.values())}",
            flush=True,
        )

    async def table(self, http: Any, path: Path, contexts: list[int], sizes: list[int]) -> None:
        """Record what the steps of batches of fixed sizes cost on this server; for ``specgov calibrate``."""
        path.unlink(missing_ok=True)
        for number, (context, size) in enumerate((c, b) for c in contexts for b in sizes):
            if context * size > TABLE_TOKENS:
                continue
            run = Run(f"table-{number}", "none", self.options.seed)
            rids = [RequestId(run, CHECKED[0], place) for place in range(size)]
            await asyncio.gather(*(self.player.one(http, rid, context, TABLE_STEPS) for rid in rids))
            await self.close_run(http, run)
            lines = recording(self.tail.read()[run.name], context, size)
            with path.open("a") as file:
                file.write("\n".join(lines) + "\n")
        self.document["table"] = str(path)

    async def close_run(self, http: Any, run: Run) -> None:
        """A last small request of no run: the recorder then hands on what it has."""
        rid = RequestId(Run(f"after-{run.name}", "static:0", 0), CHECKED[0], 0)
        await self.player.one(http, rid, 16, 4)

    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.options.deadline_s - (time.monotonic() - self.options.began_s)


def compare_ranks(folder: Path) -> dict[str, Any]:
    """The steps of all ranks: same ids, tiers and batch sizes?"""
    ranks = []
    for path in sorted((folder / "record").glob("steps.*.csv")):
        runs = RecordTail(path).read()
        ranks.append({s.step_id: (s.num_steps, s.batch_size) for r in runs.values() for s in r.steps})
    common = set.intersection(*(set(rank) for rank in ranks)) if ranks else set()
    differ = [step for step in sorted(common) if len({rank[step] for rank in ranks}) > 1]
    tiers = [ranks[0][step][0] for step in sorted(common)] if ranks else []
    return {
        "ranks": len(ranks),
        "steps_by_rank": [len(rank) for rank in ranks],
        "steps_compared": len(common),
        "steps_that_differ": len(differ),
        "first_that_differ": differ[:10],
        "tier_switches": sum(a != b for a, b in pairwise(tiers)),
        "steps_by_tier": {str(tier): tiers.count(tier) for tier in sorted(set(tiers))},
    }
