"""Small servers whose every number can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from specgov.env.acceptance import AcceptanceModel
from specgov.env.acceptance_classes import AcceptanceClass
from specgov.env.rng import Keys, Stream, draw, stream_keys, to_uniform
from specgov.env.server import RequestBatch, ServerConfig
from specgov.policies.types import EngineSpec


class PlainStepTime:
    """4 ms, 1 ms more for each draft step, and 0.01 ms for each request."""

    def step_ms(
        self,
        batch_size: NDArray[np.int64] | int,
        num_steps: NDArray[np.int64] | int,
        sum_seq_len_tokens: NDArray[np.int64] | NDArray[np.float64] | float,
    ) -> NDArray[np.float64]:
        return (
            4.0
            + 1.0 * np.asarray(num_steps)
            + 0.01 * np.asarray(batch_size)
            + 0.0 * np.asarray(sum_seq_len_tokens)
        )


@dataclass
class KeyedWorkload:
    """Open loop (``gap_s`` > 0; ends after ``limit`` requests) or closed, lengths uniform up to a bound.

    ``count``, ``asked`` and ``arrivals_ns`` are the number of requests taken in each environment, the
    output tokens that they ask for, and the sum of their times of arrival.
    """

    concurrency: int = 4
    gap_s: float = 0.0
    limit: int | None = None
    max_prompt: int = 200
    max_output: int = 60
    n_classes: int = 2
    count: NDArray[np.int64] = field(init=False)
    asked: NDArray[np.int64] = field(init=False)
    arrivals_ns: NDArray[np.int64] = field(init=False)

    def start(self, keys: Keys) -> None:
        self.count, self.asked, self.arrivals_ns = (np.zeros(len(keys), np.int64) for _ in range(3))
        self._keys = stream_keys(keys, Stream.REQUEST)
        self._next_s = np.zeros(len(keys))
        self.reset(np.arange(len(keys)), keys)

    def reset(self, envs: NDArray[np.int64], keys: Keys) -> None:
        self._keys[envs] = stream_keys(keys, Stream.REQUEST)
        self.count[envs] = self.asked[envs] = self.arrivals_ns[envs] = 0
        self._next_s[envs] = self.gap_s or np.inf

    def next_arrival_s(self) -> NDArray[np.float64]:
        return np.where(self._over(), np.inf, self._next_s)

    def take(self, envs: NDArray[np.int64], time_s: NDArray[np.float64]) -> RequestBatch:
        uniforms = to_uniform(draw(draw(self._keys[envs], self.count[envs])[:, None], np.arange(4)))
        prompt = 1 + (uniforms[:, 0] * self.max_prompt).astype(np.int64)
        output = 1 + (uniforms[:, 1] * self.max_output).astype(np.int64)
        arrival_s = self._next_s[envs].copy()
        self._next_s[envs] += self.gap_s * 2 * uniforms[:, 2]
        self.count[envs] += 1
        self.asked[envs] += output
        arrived_s = np.minimum(arrival_s, time_s) if self.gap_s else time_s
        self.arrivals_ns[envs] += np.rint(arrived_s * 1e9).astype(np.int64)
        return RequestBatch(arrival_s, prompt, output, (uniforms[:, 3] * self.n_classes).astype(np.int64))

    def target_concurrency(self, time_s: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.full(len(time_s), 0 if self.gap_s else self.concurrency)

    def resume_s(self, time_s: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.full(len(time_s), np.inf) if self.gap_s else time_s

    def _over(self) -> NDArray[np.bool_]:
        return np.zeros(len(self.count), np.bool_) if self.limit is None else self.count >= self.limit


@dataclass
class ListedWorkload:
    """The same listed requests in every environment: (arrival_s, prompt tokens, output tokens), class 0."""

    requests: Sequence[tuple[float, int, int]]

    def start(self, keys: Keys) -> None:
        self._count = np.zeros(len(keys), np.int64)

    def reset(self, envs: NDArray[np.int64], keys: Keys) -> None:
        self._count[envs] = 0

    def next_arrival_s(self) -> NDArray[np.float64]:
        times = np.array([request[0] for request in self.requests] + [np.inf])
        return times[self._count]

    def take(self, envs: NDArray[np.int64], time_s: NDArray[np.float64]) -> RequestBatch:
        rows = [self.requests[i] for i in self._count[envs]]
        self._count[envs] += 1
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        return RequestBatch(columns[0], columns[1], columns[2], np.zeros(len(rows), np.int64))

    def target_concurrency(self, time_s: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.zeros(len(time_s), np.int64)

    def resume_s(self, time_s: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.full(len(time_s), np.inf)


ALWAYS = AcceptanceClass("always", (1.0,), spread=0.0)
NEVER = AcceptanceClass("never", (0.0,), spread=0.0)
HALF = AcceptanceClass("half", (0.5,))
GOOD = AcceptanceClass("good", (0.9, 0.8), context_hazard=0.05)


def make_config(
    *,
    tiers: tuple[int, ...] = (0, 1, 3),
    max_running_requests: int = 8,
    kv_capacity_tokens: int = 0,
    classes: tuple[AcceptanceClass, ...] = (HALF, GOOD),
    draft_kv_stays_warm: bool = True,
    **changes: object,
) -> ServerConfig:
    engine = EngineSpec(
        tiers,
        (1, 2, 4, 8),
        max_running_requests,
        kv_capacity_tokens=kv_capacity_tokens,
        draft_kv_stays_warm=draft_kv_stays_warm,
    )
    return replace(ServerConfig(engine, PlainStepTime(), AcceptanceModel(classes)), **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """What this file defines: test modules cannot import it."""
    return SimpleNamespace(
        config=make_config,
        keyed=KeyedWorkload,
        listed=ListedWorkload,
        always=ALWAYS,
        never=NEVER,
        half=HALF,
        good=GOOD,
    )
