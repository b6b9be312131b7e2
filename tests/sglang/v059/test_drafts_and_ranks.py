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
ROUNDS = 6
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


def interrupted(server: Server, target: str) -> list[dict[str, Any]]:
    """The steps of requests, one to four at a time, at tiers that change by chance."""
    with fake_sidecar(target, tossing) as recorder:
        wait_until(lambda: ask(server, STARTS[0], "first") or bool(recorder.reports))
        before = len(server.steps())
        for number in range(ROUNDS):
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
    assert compared > 50


@pytest.mark.parametrize("worker", [V1, V2])
def test_two_ranks_agree_and_drafts_are_what_they_would_have_been(
    models: Path, tmp_path: Path, socket: Path, worker: str
) -> None:
    target = f"unix://{socket}"
    cpus = "|".join(str(cpu % (os.cpu_count() or 1)) for cpu in range(2))
    ranks = ("--tp-size", "2")
    with running(
        models,
        tmp_path,
        worker,
        target,
        *ranks,
        draft="draft-with-memory",
        SGLANG_CPU_OMP_THREADS_BIND=cpus,
    ) as server:
        known = uninterrupted(server, target)
        steps = interrupted(server, target)
        check_drafts(known, steps)
        by_rank = [{s["step_id"]: (s["num_steps"], s["drafts"]) for s in server.steps(r)} for r in (0, 1)]
        with fake_sidecar(target, at_tier(0)) as recorder:
            wait_until(lambda: ask(server, STARTS[0], "last") or bool(recorder.reports))
            os.kill(server.process.pid, signal.SIGTERM)
            wait_until(lambda: processes_of(server.process.pid) == [], 30)
            wait_until(lambda: recorder.endings)
        assert recorder.endings == ["closed"]
        assert recorder.events[-1:] == [pb.EngineEvent.KIND_SHUTTING_DOWN]
    shared = by_rank[0].keys() & by_rank[1].keys()
    assert len(shared) >= max(len(rank) for rank in by_rank) - 1
    assert [step for step in shared if by_rank[0][step] != by_rank[1][step]] == []
    tiers = [step["num_steps"] for step in steps]
    assert sum(a != b for a, b in itertools.pairwise(tiers)) > len(tiers) / 20


@pytest.mark.parametrize("worker", [V1, V2])
def test_the_same_test_fails_where_the_drafts_cache_stays_behind(
    models: Path, tmp_path: Path, socket: Path, worker: str
) -> None:
    target = f"unix://{socket}"
    cold = {"SPECGOV_TEST_COLD_DRAFT": "1"}
    with running(models, tmp_path, worker, target, draft="draft-with-memory", **cold) as server:
        known = uninterrupted(server, target)
        steps = interrupted(server, target)
        with pytest.raises(AssertionError, match="after num_steps"):
            check_drafts(known, steps)
