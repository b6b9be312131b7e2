"""profile_bias.py   Why does ``specgov sglang profile`` find other step times than a load does?

    python benchmarks/gpu/contest.py -o o.json --profile-bias bias.json --loads ramp -- ARGUMENTS
    python benchmarks/gpu/profile_bias.py bias.json

The first measures, on a contest's server and before its runs: the same tiers at the same batch sizes under
variants that differ in one thing each, in an order drawn anew for each pass, so that what changes with time
(a slow host) is told apart from what belongs to a variant. The second prints the tables, among them how slow
each slice was beside what the host said of itself. All times are those
of the benchmark's own record, from result to result, under the profile command's rules of what counts.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "plugin")]

from figures import Recorded, Step  # noqa: E402
from specgov_gpu_benchmark.rid import RequestId, Run  # noqa: E402

if TYPE_CHECKING:
    from runs import Contest

PROMPT_TOKENS, OUTPUT_TOKENS = 300, 420
"""Of a batch: around a context of 512."""
CLOSED_S, FILL_S = 1.0, 0.4
"""What a closed loop at one tier is played for, and its first part for which the batch fills."""
TURNING_S = 2.4
COMMAND_TIMEOUT_S = 60.0
SETTLED_STEPS = 3
PLACES = tuple(range(5, 17))
LATE_PLACES = ((17, 32), (33, 64))
LEAST = 3
STRANGERS = "-"
"""The run of requests that are not the benchmark's: those of the profile command."""


@dataclass(frozen=True)
class Variant:
    """``sends``: "command" (``specgov sglang profile`` itself), "batch" (one HTTP call for all), "single" (a
    call each, at the same time) or "closed" (a request that ended is replaced at once). ``hold``: steps for
    which a tier is kept; 0: a fixed tier. ``governed``: Specgov's plugin reports and follows a sidecar; else
    it is silent and the tier is chosen inside the scheduler, as for a contest's other contestants.
    """

    name: str
    sends: str
    hold: int
    governed: bool


VARIANTS = (
    Variant("command", "command", 16, governed=True),
    Variant("batch-16", "batch", 16, governed=True),
    Variant("single-16", "single", 16, governed=True),
    Variant("batch-64", "batch", 64, governed=True),
    Variant("single-64", "single", 64, governed=True),
    Variant("batch-16-silent", "batch", 16, governed=False),
    Variant("closed-16", "closed", 16, governed=True),
    Variant("closed-fixed", "closed", 0, governed=True),
    Variant("closed-fixed-silent", "closed", 0, governed=False),
)


class Usable(NamedTuple):
    """A step that counts: ``place`` in the hold of its tier, from 1."""

    batch_size: int
    num_steps: int
    place: int
    step_ms: float


def usable_steps(steps: Sequence[Step]) -> Iterator[Usable]:
    """The steps of a run that count: settled, contiguous, and none that waited for a prefill's launch."""
    place, settled = 1, 0
    for (before, step), after in zip_longest(pairwise(steps), steps[2:]):
        place = place + 1 if step.num_steps == before.num_steps else 1
        contiguous = step.step_id == before.step_id + 1
        alike = (step.batch_size, step.num_steps) == (before.batch_size, before.num_steps)
        settled = settled + 1 if contiguous and alike else 0
        if after is not None and after.step_id == step.step_id + 1 and settled >= SETTLED_STEPS:
            yield Usable(step.batch_size, step.num_steps, place, 1e3 * (step.t_s - before.t_s))


def cell(steps: Sequence[Usable]) -> dict[str, Any]:
    """A cell's figures; ``by_place``: the median at each place in the hold (None where there are few)."""
    ms = sorted(step.step_ms for step in steps)
    if not ms:
        return {"n": 0}

    def quantile(share: float) -> float:
        return round(ms[min(len(ms) - 1, int(share * len(ms)))], 3)

    def between(first: int, last: int) -> float | None:
        found = [step.step_ms for step in steps if first <= step.place <= last]
        return round(statistics.median(found), 3) if len(found) >= LEAST else None

    return {
        "n": len(ms),
        "median_ms": round(statistics.median(ms), 3),
        "p10_ms": quantile(0.1),
        "p90_ms": quantile(0.9),
        "p99_ms": quantile(0.99),
        "by_place": {str(place): between(place, place) for place in PLACES},
        "late": {f"{first}-{last}": between(first, last) for first, last in LATE_PLACES},
    }


class ProfileBias:
    """Measures on the server of ``contest`` and writes ``path`` anew after every slice."""

    def __init__(self, contest: Contest, path: Path, sizes: Sequence[int], tiers: Sequence[int]) -> None:
        self._contest = contest
        self._path = path
        self._sizes = list(sizes)
        self._tiers = list(tiers)
        self._played = 0
        self._found: dict[tuple[str, int, int], list[tuple[int, Usable]]] = defaultdict(list)
        self._document: dict[str, Any] = {
            **{key: contest.document[key] for key in ("gpu", "cores", "python", "versions")},
            "command": "profile_bias",
            "server_arguments": contest.document["server_arguments"],
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds_after_start": round(time.monotonic() - contest.options.began_s, 1),
            "lengths": {"prompt": PROMPT_TOKENS, "output": OUTPUT_TOKENS},
            "slices": [],
            "failed": [],
            "cells": [],
        }

    async def measure(self, http: Any, seconds: float, passes: int) -> None:
        """Whole passes over all variants while there is time; the last one may be cut."""
        deadline_s, rng = time.monotonic() + seconds, random.Random(0)
        for number in range(passes):
            slices = [
                (variant, size)
                for variant in VARIANTS
                for size in (self._sizes if variant.sends != "command" else [0])
            ]
            rng.shuffle(slices)
            for variant, size in slices:
                if time.monotonic() < deadline_s:
                    await self._slice_or_note(http, variant, size, number)
        self._document["seconds"] = round(time.monotonic() - deadline_s + seconds, 1)
        self._write()

    async def _slice_or_note(self, http: Any, variant: Variant, size: int, number: int) -> None:
        from host import HostWatch

        watch, began_s = HostWatch(), time.monotonic()
        watch.begin()
        try:
            runs = await self._play(http, variant, size)
        except Exception as error:  # noqa: BLE001 a variant that fails must not cost the others
            self._document["failed"].append(f"{variant.name}, {size}: {type(error).__name__}: {error}"[:500])
            runs = []
        host = watch.end()
        counted = 0
        for recorded in runs:
            for step in usable_steps(recorded.steps):
                wanted = next((s for s in self._sizes if 0 <= s - step.batch_size <= s // 64), None)
                if wanted is not None and step.num_steps in self._tiers:
                    self._found[variant.name, wanted, step.num_steps].append((number, step))
                    counted += 1
        took_s = round(time.monotonic() - began_s, 2)
        self._document["slices"].append(
            {
                "variant": variant.name,
                "batch_size": size,
                "pass": number,
                "s": took_s,
                "counted": counted,
                **host,
            }
        )
        self._write()
        print(
            f"bias: pass {number} {variant.name:20} {size:3} {counted:5} steps, {took_s} s, {host}",
            flush=True,
        )

    async def _play(self, http: Any, variant: Variant, size: int) -> list[Recorded]:
        """A slice of a variant; what was recorded of its runs."""
        if variant.sends == "command":
            return [await self._command(http)]
        turns = f"{variant.hold}:{','.join(map(str, self._tiers))}"
        if variant.sends == "closed" and not variant.hold:
            rules = [(f"static:{tier}", f"turns:16:{tier}") for tier in self._tiers]
        else:
            rules = [(f"cycle:{turns}", f"turns:{turns}")]
        runs = []
        for silent, governed in rules:
            if variant.governed:
                self._govern(governed)
            run = self._run("specgov" if variant.governed else silent)
            if variant.sends == "closed":
                await self._closed(http, run, size, TURNING_S if variant.hold else CLOSED_S)
            elif variant.sends == "single":
                await self._single(http, run, size)
            else:
                await self._batch(http, run, size)
            runs.append(await self._recorded(http, run))
        return runs

    def _govern(self, policy: str) -> None:
        from contestants import NO_PROFILE, Contestant

        if self._contest.governor is not None:
            self._contest.governor.serve(Contestant("", "specgov", policy, NO_PROFILE))

    def _run(self, rule: str) -> Run:
        self._played += 1
        return Run(f"bias-{self._played}", rule, self._played)

    async def _recorded(self, http: Any, run: Run) -> Recorded:
        await self._contest.close_run(http, run)
        return self._contest.tail.read().get(run.name, Recorded())

    async def _single(self, http: Any, run: Run, size: int) -> None:
        rids = [RequestId(run, "mixed", number) for number in range(size)]
        one = self._contest.player.one
        await asyncio.gather(*(one(http, rid, PROMPT_TOKENS, OUTPUT_TOKENS) for rid in rids))

    async def _batch(self, http: Any, run: Run, size: int) -> None:
        player = self._contest.player
        bodies = [
            json.loads(player.body(RequestId(run, "mixed", number), PROMPT_TOKENS, OUTPUT_TOKENS))
            for number in range(size)
        ]
        body = {key: [each[key] for each in bodies] for key in ("rid", "input_ids")}
        body["sampling_params"] = bodies[0]["sampling_params"]
        async with http.post(f"{player.url}/generate", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {(await answer.text())[:200]}")
            await answer.read()

    async def _closed(self, http: Any, run: Run, size: int, seconds: float) -> None:
        from loads import get_load

        scenario = get_load(f"steady_{size}", duration_s=seconds + FILL_S).scenario
        await self._contest.player.play(http, scenario, run)

    async def _command(self, http: Any) -> Recorded:
        """The profile command itself, in the sidecar's place."""
        from real_server import specgov

        contest, governor = self._contest, self._contest.governor
        if governor is None:
            raise RuntimeError("there is no sidecar whose place the command could take")
        # Specgov is silent until a request says otherwise, and those of the command say nothing.
        await contest.player.one(http, RequestId(self._run("specgov"), "mixed", 0), 16, 4)
        governor.stop()
        out = contest.folder / f"bias-{len(self._document['slices'])}.jsonl"
        words = [
            "sglang",
            "profile",
            "--url",
            contest.player.url,
            "--target",
            governor.target,
            "-o",
            str(out),
        ]
        words += ["--batch-sizes", ",".join(map(str, self._sizes)), "--contexts", "512", "--max-rounds", "2"]
        words += ["--vocabulary", "-".join(map(str, contest.options.vocabulary))]
        contest.tail.read()
        done = await asyncio.to_thread(
            subprocess.run, specgov(*words), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
        said = (done.stdout + done.stderr).strip()
        self._document.setdefault("command_said", []).append(said.splitlines())
        if "num_steps" not in said:
            raise RuntimeError(said[-400:])
        run = self._run("static:0")
        await contest.close_run(http, run)
        return contest.tail.read().get(STRANGERS, Recorded())

    def _write(self) -> None:
        cells = []
        for (variant, size, tier), found in sorted(self._found.items()):
            by_pass = {
                str(number): cell([step for at, step in found if at == number])
                for number in sorted({at for at, _ in found})
            }
            cells.append(
                {
                    "variant": variant,
                    "batch_size": size,
                    "num_steps": tier,
                    **cell([step for _, step in found]),
                    "median_by_pass_ms": {number: each["median_ms"] for number, each in by_pass.items()},
                }
            )
        self._document["cells"] = cells
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._document, separators=(",", ":")) + "\n")
        part.replace(self._path)


def tables(document: dict[str, Any]) -> str:
    """Medians by variant and cell, and by the place in the hold."""
    cells = {(c["variant"], c["batch_size"], c["num_steps"]): c for c in document["cells"]}
    at = sorted({key[1:] for key in cells})
    names = [variant.name for variant in VARIANTS if any(key[0] == variant.name for key in cells)]
    lines = [
        "| variant | " + " | ".join(f"{size} at {tier}" for size, tier in at) + " |",
        "|---" * (len(at) + 1) + "|",
    ]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(_said(cells.get((name, *place))) for place in at) + " |")
    lines += ["", "Median by the place in the hold, ms:", ""]
    heads = [*map(str, PLACES), *(f"{first}-{last}" for first, last in LATE_PLACES)]
    lines += ["| variant | cell | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for name in names:
        for size, tier in at:
            if found := cells.get((name, size, tier)):
                values = [*found["by_place"].values(), *found["late"].values()]
                said = " | ".join("" if value is None else f"{value:.2f}" for value in values)
                lines.append(f"| {name} | {size} at {tier} | {said} |")
    return "\n".join(lines)


def slices(document: dict[str, Any]) -> str:
    """How slow each slice was: its medians over the fastest of each cell, and what the host said then."""
    medians: dict[tuple[int, int], dict[tuple[str, str], float]] = defaultdict(dict)
    for found in document["cells"]:
        for number, ms in found.get("median_by_pass_ms", {}).items():
            medians[found["batch_size"], found["num_steps"]][found["variant"], number] = ms
    lines = [
        "| pass | variant | batch size | over the fastest | spin, ms | scheduler waits |",
        "|---" * 6 + "|",
    ]
    paired: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for each in document["slices"]:
        key, size = (each["variant"], str(each["pass"])), each["batch_size"]
        over = [
            at[key] / min(at.values())
            for (of_size, _), at in sorted(medians.items())
            if key in at and size in (0, of_size)
        ]
        if not over:
            continue
        slow, spin = statistics.fmean(over) - 1, each["spin_ms"]
        waits = each.get("scheduler_waits", "")
        lines.append(f"| {key[1]} | {key[0]} | {size or 'both'} | {slow:+.0%} | {spin} | {waits} |")
        if size and spin is not None:
            paired[size].append((slow, spin))
    said = ", ".join(f"{size}: {_rank_correlation(found):+.2f}" for size, found in sorted(paired.items()))
    return "\n".join([*lines, "", f"Rank correlation of slowness and spin, by batch size: {said}."])


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's (equals take the first one's rank); nan for few pairs or where a column never changes."""
    columns = list(zip(*pairs, strict=True))
    if len(pairs) < LEAST or any(len(set(column)) < 2 for column in columns):
        return math.nan
    ranks = [[sorted(column).index(value) for value in column] for column in columns]
    return statistics.correlation(*ranks)


def _said(found: dict[str, Any] | None) -> str:
    if not found or not found["n"]:
        return ""
    by_pass = ", ".join(f"{ms:.2f}" for ms in found["median_by_pass_ms"].values())
    return (
        f"{found['median_ms']:.2f} ({found['p10_ms']:.2f} to {found['p90_ms']:.2f}); {by_pass}; {found['n']}"
    )


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    print("Median (p10 to p90), ms; the median of each pass; steps.\n")
    print(tables(document))
    print(f"\nEach slice, in order:\n\n{slices(document)}")


if __name__ == "__main__":
    main()
