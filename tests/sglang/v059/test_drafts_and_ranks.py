"""Steps without drafts leave no trace: what is drafted after them is what is drafted where there were none.

The draft of these tests depends on its whole KV cache and on the target's hidden states. Two ranks share the
work, so that they must agree on every step too.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers import Server, expected, processes_of, wait_until
from servers059 import V1, V2, running, tier_pairs
from sidecars import at_tier, decision, fake_sidecar, reports_of

from specgov.proto.v1 import specgov_pb2 as pb

pytestmark = pytest.mark.sglang

STARTS = (20, 60, 150, 200)
TOKENS = 70
ROUNDS = 8
STEPS = 1000
Drafts = dict[tuple[int, int], list[int]]
"""What was drafted, by the request's start and its newest token: the tokens up to it are always the same."""


def ask(server: Server, start: int, name: str) -> None:
    """One request, checked; its id tells where it started."""
    answer = server.generate(start, TOKENS, rid=f"{start}:{name}")
    assert answer["output_ids"] == expected(start, TOKENS)


def drafts_of(steps: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, int], list[int], int | None]]:
    """What was drafted in each request's steps at num_steps 3, and the tier of its step before."""
    for tier_before, step, place in tier_pairs(steps):
        if step["num_steps"] == 3:
            start = int(step["ids"][place].partition(":")[0])
            yield (start, step["last"][place]), step["drafts"][place], tier_before


def uninterrupted(server: Server, target: str) -> Drafts:
    """What is drafted while every step has drafts."""
    with fake_sidecar(target, at_tier(3)) as recorder:
        wait_until(lambda: ask(server, STARTS[0], "first") or bool(recorder.reports))
        wait_until(lambda: ask(server, STARTS[0], "next") or server.steps()[-1]["num_steps"] == 3)
        before = len(server.steps())
        for start in STARTS:
            ask(server, start, "uninterrupted")
        steps = server.steps()[before:]
    assert {step["num_steps"] for step in steps} == {3}
    return {key: drafts for key, drafts, _ in drafts_of(steps)}


def tossing(messages: Iterator[pb.EngineMessage], context: Any) -> Iterator[pb.Decision]:
    """Drafts or none in turn for one to five steps, by chance; some decisions hold for one step only."""
    rng = random.Random(11)
    left, num_steps = 0, 3
    for report in reports_of(messages):
        if left == 0:
            left, num_steps = rng.randint(1, 5), 3 - num_steps
        left -= 1
        yield decision(report, num_steps, ttl_steps=rng.choice([1, 3, 50]))


def interrupted(server: Server, target: str, rounds: int) -> list[dict[str, Any]]:
    """The steps of requests, one to four at a time, at tiers that change by chance."""
    with fake_sidecar(target, tossing) as recorder:
        wait_until(lambda: ask(server, STARTS[0], "first") or bool(recorder.reports))
        before = len(server.steps())
        for number in range(rounds):
            with ThreadPoolExecutor(1 + number % 4) as pool:
                list(pool.map(lambda start, n=number: ask(server, start, str(n)), STARTS))
        steps = server.steps()[before:]
        assert sum(bool(report.decision_id) for report in recorder.reports) > len(steps) / 4
    return steps


def check_drafts(known: Drafts, steps: list[dict[str, Any]]) -> None:
    compared = 0
    for key, drafts, tier_before in drafts_of(steps):
        if key in known:
            assert drafts == known[key], f"start and newest token {key}, after num_steps {tier_before}"
            compared += tier_before == 0
    assert compared > 10


@pytest.mark.parametrize("worker", [V1, V2])
def test_two_ranks_agree_and_drafts_are_what_they_would_have_been(
    models: Path, tmp_path: Path, socket: Path, worker: str
) -> None:
    target = f"unix://{socket}"
    cpus = "|".join(str(cpu % (os.cpu_count() or 1)) for cpu in range(2))
    variables = {"SGLANG_CPU_OMP_THREADS_BIND": cpus}
    two = ("--tp-size", "2")
    with running(models, tmp_path, worker, target, *two, draft="draft-with-memory", **variables) as server:
        known = uninterrupted(server, target)
        steps = interrupted(server, target, ROUNDS)
        check_drafts(known, steps)
        (tmp_path / "cold").touch()  # with this mistake in it the same check must fail
        with pytest.raises(AssertionError, match="after num_steps"):
            check_drafts(known, interrupted(server, target, 1))
        ranks = [{s["step_id"]: (s["num_steps"], s["drafts"]) for s in server.steps(r)} for r in (0, 1)]
        check_that_it_ends(server, target)
    shared = ranks[0].keys() & ranks[1].keys()
    assert len(shared) >= STEPS
    assert len(shared) >= max(map(len, ranks)) - 1
    assert [step for step in shared if ranks[0][step] != ranks[1][step]] == []
    tiers = [step["num_steps"] for step in steps]
    assert sum(a != b for a, b in itertools.pairwise(tiers)) > len(tiers) / 20


def check_that_it_ends(server: Server, target: str) -> None:
    """SGLang 0.5.9 ends its schedulers with SIGKILL: the sidecar sees the stream end, and nothing is left."""
    with fake_sidecar(target, at_tier(0)) as recorder:
        wait_until(lambda: ask(server, STARTS[0], "last") or bool(recorder.reports))
        os.kill(server.process.pid, signal.SIGTERM)
        wait_until(lambda: processes_of(server.process.pid) == [], 30)
        wait_until(lambda: recorder.endings)
