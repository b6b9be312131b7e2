"""The simulated server: N engines with continuous batching, advanced one decode step at a time.

One implementation serves the emulated engine, the single environment (N = 1) and the vectorised one: the
physics of an environment depends on its seed alone, not on N.

A step decodes the batch that was formed before it, with the num_steps given, and then forms the next:
requests that arrived are taken in, idle time is skipped, requests are retracted if the KV cache would
overflow, and up to a chunk of prompts is prefilled (`server_batching`). `Server.truth` speaks of the
batch that is formed and waits for its step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specgov.env.acceptance import BLOCK_TOKENS, AcceptanceTables
from specgov.env.hiccups import ServerHiccups
from specgov.env.rng import Keys, Stream, draw, environment_keys, stream_keys
from specgov.env.server_batching import Batching
from specgov.env.server_config import ServerConfig
from specgov.env.server_noise import ServerNoise
from specgov.env.server_state import Batch, Requests
from specgov.env.server_types import (
    FinishedRequests,
    Floats,
    Ints,
    LiveRequests,
    RequestBatch,
    SimulationError,
    StepResult,
    Truth,
    Workload,
)

__all__ = [
    "FinishedRequests",
    "LiveRequests",
    "RequestBatch",
    "Server",
    "ServerConfig",
    "SimulationError",
    "StepResult",
    "Truth",
    "Workload",
]


class _Decoded(NamedTuple):
    """What a step decoded; ``ended`` are positions in the batch, the last two sums by environment."""

    accepted: NDArray[np.uint8]
    ended: Ints
    tokens: Ints
    histogram: Ints


_NO_TIER = -1
"""Before the first step."""


class Server:
    """N simulated servers.

    Args:
        config: the server, the same for all environments.
        workload: where requests come from; the server starts and resets it, and nothing else may.
        n_envs: N, at least 1.
        seed: environment e is the environment 0 of seed + e.

    Attributes:
        keys: of the environments, shape (N,); for draws of what is built on the server.

    Raises:
        SimulationError: also from every method, where the workload brings a request that can never run.

    """

    def __init__(self, config: ServerConfig, workload: Workload, n_envs: int = 1, seed: int = 0) -> None:
        if n_envs < 1:
            raise SimulationError(f"n_envs is {n_envs}: there must be at least one environment")
        self.config = config
        self.n_envs = n_envs
        self.keys: Keys = environment_keys(seed, n_envs)
        self._first_keys = self.keys.copy()
        self._workload = workload
        self._positions = max(config.largest_num_steps, 1)
        self._tables = AcceptanceTables(config.acceptance, self._positions)
        self._batching = Batching(config, workload, self._tables, n_envs)
        self._is_tier = np.isin(np.arange(config.largest_num_steps + 1), config.engine.tiers)
        self._drafts = np.arange(self._positions + 1)
        self._cold_log_hazard = config.acceptance.cold_log_hazard
        self._everywhere = np.ones(n_envs, np.bool_)
        self._step_id, self._episode = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.int64)
        self._noise = ServerNoise(config.noise, n_envs)
        self._hiccups = ServerHiccups(config.hiccups, n_envs)
        self._last_tier = np.full(n_envs, _NO_TIER)
        workload.start(self.keys)
        self._begin(np.arange(n_envs))

    def reset(self, envs: Ints | None = None, seed: int | None = None) -> None:
        """Begin ``envs`` (all by default) again, empty, at time 0.

        With ``seed`` environment e begins with the key of seed + e; without, its next episode differs
        from the ones before.
        """
        which = np.arange(self.n_envs) if envs is None else np.asarray(envs, np.int64)
        if seed is None:
            self._episode[which] += 1
            self.keys[which] = draw(
                stream_keys(self._first_keys[which], Stream.EPISODE), self._episode[which]
            )
        else:
            self._first_keys[which] = environment_keys(seed, self.n_envs)[which]
            self._episode[which] = 0
            self.keys[which] = self._first_keys[which]
        self._workload.reset(which, self.keys[which])
        self._begin(which)

    def step(self, num_steps: NDArray[Any]) -> StepResult:
        """Decode one step of every environment, then form the next batch.

        Args:
            num_steps: of each environment, shape (N,); each one of the engine's tiers.

        """
        tiers = self._checked(num_steps)
        batching, batch = self._batching, self._batching.slots.batch()
        running = batching.slots.running.copy()
        waiting, kv_tokens = batching.queue.length.copy(), batching.kv_tokens
        context_tokens, max_context_tokens = batching.context_tokens.copy(), self._max_context(batch)
        idle_ns, prefill_ns, retracted = batching.idle_ns, batching.prefill_ns, batching.retracted
        step_ms = self._step_ms(running, tiers)
        decoded = self._decode(batch, tiers)
        self._step_id += running > 0
        batching.pass_time(slice(None), np.rint(step_ms * 1e6).astype(np.int64))
        batching.context_tokens += decoded.tokens
        ended_envs = batch.env[decoded.ended]
        finished = self._finish(batch.at[decoded.ended], ended_envs)
        end_ns = batching.time_ns.copy()
        batching.form(self._everywhere)
        return StepResult(
            step_id=self._step_id.copy(),
            batch_size=running,
            num_steps=tiers,
            step_ms=step_ms,
            idle_ns=idle_ns,
            prefill_ns=prefill_ns,
            output_tokens=decoded.tokens,
            accepted_histogram=decoded.histogram,
            sum_seq_len_tokens=context_tokens,
            max_seq_len_tokens=max_context_tokens,
            waiting_requests=waiting,
            kv_use_ratio=kv_tokens / self.config.kv_capacity_tokens,
            finished_requests=self._per_env(ended_envs),
            retracted_requests=retracted,
            exhausted=self.exhausted,
            time_ns=end_ns,
            live=LiveRequests(batch.env, batch.slot, batch.generation, decoded.accepted),
            finished=finished,
        )

    def truth(self, as_if_warm: bool = False) -> Truth:
        """What each tier would really bring in the coming step; a switch's cost is left out.

        With ``as_if_warm`` what it would bring if no draft were cold.
        """
        batching, batch = self._batching, self._batching.slots.batch()
        left = batch.output_tokens - batching.slots.generated[batch.at]
        factors = self._factors(batch)
        if as_if_warm:
            cold = self._batching.slots.request["cold"][batch.at]
            factors = np.where(cold, factors * np.float32(np.exp(-self._cold_log_hazard)), factors)
        survival = self._tables.survival(batch.class_index, factors)
        reached = self._sum_by_env(batch, survival)
        survival *= np.arange(1, self._positions + 1) < left[:, None]
        running = batching.slots.running
        counted = self._sum_by_env(batch, survival)
        tokens = np.concatenate([np.zeros((self.n_envs, 1)), counted.cumsum(axis=1)], axis=1)
        tiers = np.array(self.config.engine.tiers)
        step_ms = self.config.step_time.step_ms(running[:, None], tiers, batching.context_tokens[:, None])
        active = (running > 0)[:, None]
        into = np.concatenate([running[:, None].astype(float), reached[:, :-1]], axis=1)
        conditional = np.divide(reached, into, out=np.full_like(reached, np.nan), where=into > 0)
        return Truth(
            expected_tokens=running[:, None] + tokens[:, tiers],
            expected_ms=np.where(active, step_ms, 0.0),
            conditional_acceptance=conditional,
        )

    @property
    def time_ns(self) -> Ints:
        """Simulated time in integer nanoseconds, prefill before the coming step included; shape (N,)."""
        return self._batching.time_ns.copy()

    @property
    def batch_size(self) -> Ints:
        """Requests of the batch that waits for its step, shape (N,)."""
        return self._batching.slots.running.copy()

    @property
    def waiting_requests(self) -> Ints:
        """Requests in the waiting queue, shape (N,)."""
        return self._batching.queue.length.copy()

    @property
    def context_tokens(self) -> Ints:
        """Prompt and output tokens of the batch that waits for its step, shape (N,)."""
        return self._batching.context_tokens.copy()

    @property
    def kv_tokens(self) -> Ints:
        """KV in use, shape (N,)."""
        return self._batching.kv_tokens

    @property
    def request_ns(self) -> Ints:
        """Time integral of the number of requests in the system since the reset, shape (N,).

        Exactly the sum of the times that finished and present requests have spent in it (Little's law).
        """
        return self._batching.request_ns.copy()

    @property
    def exhausted(self) -> NDArray[np.bool_]:
        """Where the workload has ended and nothing runs or waits, shape (N,)."""
        return np.asarray(self._batching.slots.running == 0)

    def _begin(self, envs: Ints) -> None:
        keys = self.keys[envs]
        self._step_id[envs] = 0
        self._last_tier[envs] = _NO_TIER
        self._noise.begin(envs, keys)
        self._hiccups.begin(envs, keys)
        self._batching.clear(envs, keys)
        where = np.zeros(self.n_envs, np.bool_)
        where[envs] = True
        self._batching.form(where)

    def _checked(self, num_steps: NDArray[Any]) -> Ints:
        tiers = np.asarray(num_steps)
        if tiers.shape != (self.n_envs,) or tiers.dtype.kind not in "iu":
            raise SimulationError(
                f"num_steps must be {self.n_envs} integers, got {tiers.dtype} {tiers.shape}"
            )
        try:
            known = tiers.min() >= 0 and self._is_tier[tiers].all()
        except IndexError:
            known = False
        if not known:
            raise SimulationError(
                f"num_steps must be among the tiers {self.config.engine.tiers}, got {tiers}"
            )
        return tiers.astype(np.int64)

    def _decode(self, batch: Batch, tiers: Ints) -> _Decoded:
        """Accept drafts, write output up to the lengths asked for, and move along the text."""
        slots = self._batching.slots
        live_tiers = tiers.astype(np.uint8)[batch.env]
        before = slots.generated[batch.at]
        factors = self._factors(batch)
        accepted = self._tables.accepted(batch.key, before, batch.class_index, factors, live_tiers)
        if not self.config.engine.draft_kv_stays_warm:
            self._cool(batch, live_tiers)
        after = before + accepted
        after += 1
        ended = (after >= batch.output_tokens).nonzero()[0]
        excess = after[ended] - batch.output_tokens[ended]
        after[ended] -= excess
        slots.generated[batch.at] = after
        self._move_along_text(batch, before, after)
        histogram = self._histogram(batch, accepted)
        tokens = histogram @ self._drafts + slots.running - self._per_env(batch.env[ended], excess)
        return _Decoded(accepted, ended, tokens, histogram)

    def _factors(self, batch: Batch) -> NDArray[np.float32]:
        factors = self._batching.slots.factor[batch.at]
        drift = self.config.acceptance.drift
        if not drift.is_none:
            factors *= drift.gain(self.keys, self._batching.time_s)[batch.env]
        return factors

    def _cool(self, batch: Batch, live_tiers: NDArray[np.uint8]) -> None:
        """Draft-extend is skipped at num_steps 0: from the next step on these requests' drafts are cold."""
        slots = self._batching.slots
        at = batch.at[live_tiers == 0]
        at = at[~slots.request["cold"][at]]
        slots.request["cold"][at] = True
        slots.factor[at] *= np.float32(np.exp(self._cold_log_hazard))

    def _move_along_text(self, batch: Batch, before: NDArray[np.int32], after: NDArray[np.int32]) -> None:
        # Unequal quotients: a block's length is a power of two, so a bit at or above it differs.
        moved = ((before ^ after) >= BLOCK_TOKENS).nonzero()[0]
        if not moved.size:
            return
        at, class_index, tokens = batch.at[moved], batch.class_index[moved], after[moved]
        request = self._batching.slots.request
        text = self._tables.next_block(
            batch.key[moved], class_index, request["text_effect"][at], before[moved], tokens
        )
        request["text_effect"][at] = text
        self._batching.slots.factor[at] = self._tables.factor(
            class_index,
            request["request_effect"][at],
            text,
            batch.prompt_tokens[moved] + tokens,
            request["cold"][at],
        )

    def _step_ms(self, running: Ints, tiers: Ints) -> Floats:
        expected = self.config.step_time.step_ms(running, tiers, self._batching.context_tokens)
        if self.config.switch_ms:
            switched = (self._last_tier != tiers) & (self._last_tier != _NO_TIER)
            expected = expected + self.config.switch_ms * switched
            self._last_tier = np.where(running > 0, tiers, self._last_tier)
        noisy = np.where(running > 0, self._noise.apply(expected, self._step_id), 0.0)
        return self._hiccups.apply(noisy, self._step_id, running > 0)

    def _histogram(self, batch: Batch, accepted: NDArray[np.uint8]) -> Ints:
        bins = self._positions + 1
        counts = np.bincount(batch.env * bins + accepted, minlength=self.n_envs * bins)
        return counts.reshape(self.n_envs, bins)

    def _per_env(self, envs: Ints, values: NDArray[Any] | None = None) -> Ints:
        """Sum of ``values`` (of ones by default) by environment."""
        if not envs.size:
            return np.zeros(self.n_envs, np.int64)
        return np.bincount(envs, values, minlength=self.n_envs).astype(np.int64)

    def _sum_by_env(self, batch: Batch, values: Floats) -> Floats:
        sums = np.zeros((self.n_envs, values.shape[1]))
        if len(values):
            sums[batch.occupied] = np.add.reduceat(values, batch.first, axis=0)
        return sums

    def _max_context(self, batch: Batch) -> Ints:
        largest = np.zeros(self.n_envs, np.int64)
        if len(batch.at):
            context = batch.prompt_tokens + self._batching.slots.generated[batch.at]
            largest[batch.occupied] = np.maximum.reduceat(context, batch.first)
        return largest

    def _finish(self, at: Ints, envs: Ints) -> FinishedRequests:
        batching = self._batching
        requests: Requests = batching.slots.request[at]
        if at.size:
            requests = batching.slots.leave(at)
            held = requests["prompt_tokens"] + requests["generated_tokens"]
            np.subtract.at(batching.context_tokens, envs, held)
        return FinishedRequests(
            env=envs,
            class_index=requests["class_index"],
            prompt_tokens=requests["prompt_tokens"],
            output_tokens=requests["generated_tokens"],
            arrival_ns=requests["arrival_ns"],
            first_token_ns=requests["first_token_ns"],
            finish_ns=batching.time_ns[envs],
        )
