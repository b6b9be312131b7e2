"""Two tensor-parallel ranks and a sidecar that answers at random: the same tier on both at every step."""

from __future__ import annotations

import itertools
import os
import random
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from servers import Server, running
from sidecars import decision, fake_sidecar, reports_of

from specgov.proto.v1 import specgov_pb2 as pb

pytestmark = pytest.mark.sglang

STEPS = 500
TWO_RANKS = ("--tp-size", "2")
BINDING = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cpu % (os.cpu_count() or 1)) for cpu in range(2))}


def at_random(messages: Iterator[pb.EngineMessage], context: grpc.ServicerContext) -> Iterator[pb.Decision]:
    """Another tier for each range of batch sizes; some hold for a step only, and some reports get none."""
    rng = random.Random(5)
    for report in reports_of(messages):
        if rng.random() < 0.2:
            continue
        others = [
            pb.TierRange(batch_size_min=low, batch_size_max=low + 2, num_steps=rng.choice([0, 1, 3]))
            for low in (3, 6)
        ]
        sizes = {"batch_size_min": 1, "batch_size_max": 2}
        yield decision(
            report, rng.choice([0, 1, 3]), neighbours=others, ttl_steps=rng.choice([1, 3, 50]), **sizes
        )


def load(server: Server) -> None:
    """Requests until enough steps were made: one to eight at a time, of many lengths."""
    starts = itertools.count()
    for width in itertools.cycle((8, 2, 5, 1)):
        with ThreadPoolExecutor(width) as pool:
            list(pool.map(lambda _: server.check(20 + 25 * (next(starts) % 8), 30), range(width)))
        if len(server.steps()) >= STEPS:
            return


def tiers_by_step(server: Server, rank: int) -> dict[int, tuple[int, int]]:
    return {step["step_id"]: (step["num_steps"], len(step["ids"])) for step in server.steps(rank)}


def check_that_ranks_agree(models: Path, folder: Path, socket: Path, **variables: str) -> None:
    target = f"unix://{socket}"
    with (
        fake_sidecar(target, at_random) as recorder,
        running(models, folder, *TWO_RANKS, SPECGOV_TARGET=target, **BINDING, **variables) as server,
    ):
        load(server)
        ranks = [tiers_by_step(server, rank) for rank in range(2)]
        assert len(recorder.infos) == 1  # rank 0 alone has a stream
        assert recorder.infos[0].tensor_parallel_size == 2
    steps = ranks[0].keys() & ranks[1].keys()
    assert len(steps) >= STEPS - 1
    assert [step for step in steps if ranks[0][step] != ranks[1][step]] == []
    tiers = [ranks[0][step][0] for step in sorted(steps)]
    assert set(tiers) == {0, 1, 3}
    assert sum(a != b for a, b in itertools.pairwise(tiers)) > STEPS / 10
    followed = [r for r in recorder.reports if r.decision_id]
    assert len(followed) > STEPS / 4


def test_both_ranks_apply_the_same_tier_at_every_step(models: Path, tmp_path: Path, socket: Path) -> None:
    check_that_ranks_agree(models, tmp_path, socket)


def test_the_same_test_fails_where_orders_are_not_shared(models: Path, tmp_path: Path, socket: Path) -> None:
    failures: tuple[type[Any], ...] = (AssertionError, OSError, urllib.error.URLError)
    with pytest.raises(failures):
        check_that_ranks_agree(models, tmp_path, socket, SPECGOV_TEST_UNSHARED="1")
