"""Between two decode steps: requests arrive, wait, are prefilled, join the batch; some are retracted.

Environments advance together: each loop runs once for the environment with the most to do, and every pass
handles one request in all environments that still have one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specgov.env.acceptance import AcceptanceTables
from specgov.env.rng import Keys, Stream, draw, stream_keys
from specgov.env.server_config import ServerConfig
from specgov.env.server_state import Requests, RunningSlots, WaitingQueue, new_requests
from specgov.env.server_types import Flags, Floats, Ints, SimulationError, Workload


class Batching:
    """The scheduler's half of a server; all arrays have shape (N,).

    Attributes:
        time_ns: simulated time.
        request_ns: time integral of the number of requests in the system (running and waiting).
        context_tokens: prompt and output tokens of the running requests.
        partial_tokens: prompt tokens of the first waiting request that are prefilled already; they hold KV.
        idle_ns, prefill_ns, retracted: what happened before the coming step.

    """

    def __init__(
        self, config: ServerConfig, workload: Workload, tables: AcceptanceTables, n_envs: int
    ) -> None:
        self.slots = RunningSlots(n_envs, config.engine.max_running_requests)
        self.queue = WaitingQueue(n_envs)
        self.time_ns, self.request_ns = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.int64)
        self.context_tokens, self.partial_tokens = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.int64)
        self.idle_ns, self.prefill_ns = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.int64)
        self.retracted = np.zeros(n_envs, np.int64)
        self._config, self._workload, self._tables = config, workload, tables
        self._capacity = config.kv_capacity_tokens
        self._shared_capacity = int(self._capacity * (1.0 - config.kv_headroom))
        self._request_keys: Keys = np.zeros(n_envs, np.uint64)
        self._request_index = np.zeros(n_envs, np.int64)

    def clear(self, envs: Ints, keys: Keys) -> None:
        """Empty ``envs`` and begin them again at time 0 with new keys; the workload is not touched."""
        self.slots.clear(envs)
        self.queue.clear(envs)
        for values in (self.time_ns, self.request_ns, self.context_tokens, self.partial_tokens):
            values[envs] = 0
        self._request_keys[envs] = stream_keys(keys, Stream.ACCEPTANCE)
        self._request_index[envs] = 0

    def form(self, where: Flags) -> None:
        """Form the next batch in ``where``: at least one request runs there unless the workload ended.

        Raises:
            SimulationError: a request that the server can never hold.

        """
        # New arrays: the old ones belong to the step that they came before.
        self.idle_ns = np.where(where, 0, self.idle_ns)
        self.prefill_ns = np.where(where, 0, self.prefill_ns)
        self.retracted = np.where(where, 0, self.retracted)
        self._receive(where)
        empty = where & (self.in_system == 0)
        if empty.any():
            self._skip_idle_time(empty)
        if self._config.engine.kv_capacity_tokens:
            self._make_room(where)
        self._prefill(where)

    @property
    def time_s(self) -> Floats:
        """Simulated time in seconds."""
        return self.time_ns.astype(np.float64) * 1e-9

    @property
    def in_system(self) -> Ints:
        """Requests running and waiting."""
        return self.slots.running + self.queue.length

    @property
    def kv_tokens(self) -> Ints:
        """KV in use between steps."""
        return self.context_tokens + self.partial_tokens

    def pass_time(self, envs: Ints | Flags | slice, duration_ns: Ints) -> None:
        """Let time pass in ``envs`` while the number of requests in the system stays the same."""
        self.time_ns[envs] += duration_ns
        self.request_ns[envs] += duration_ns * (self.slots.running[envs] + self.queue.length[envs])

    def _receive(self, where: Flags) -> None:
        time_s = self.time_s
        while (due := ((self._workload.next_arrival_s() <= time_s) & where).nonzero()[0]).size:
            self._enqueue(due, from_open_loop=True)
        target = self._workload.target_concurrency(time_s)
        while (short := ((self.in_system < target) & where).nonzero()[0]).size:
            self._enqueue(short, from_open_loop=False)

    def _enqueue(self, envs: Ints, *, from_open_loop: bool) -> None:
        now_ns = self.time_ns[envs]
        batch = self._workload.take(envs, now_ns.astype(np.float64) * 1e-9)
        self._check_lengths(batch.prompt_tokens, batch.output_tokens)
        arrival_ns = now_ns
        if from_open_loop:
            arrival_ns = np.minimum(np.rint(batch.arrival_s * 1e9).astype(np.int64), now_ns)
            self.request_ns[envs] += now_ns - arrival_ns
        keys = draw(self._request_keys[envs], self._request_index[envs])
        self._request_index[envs] += 1
        request_effect, text_effect = self._tables.first_state(keys)
        self.queue.push(
            envs,
            new_requests(
                len(envs),
                key=keys,
                arrival_ns=arrival_ns,
                request_effect=request_effect,
                text_effect=text_effect,
                class_index=batch.class_index,
                prompt_tokens=batch.prompt_tokens,
                output_tokens=batch.output_tokens,
            ),
        )

    def _check_lengths(self, prompt_tokens: Ints, output_tokens: Ints) -> None:
        if prompt_tokens.min() < 1 or output_tokens.min() < 1:
            raise SimulationError(
                "the workload brought a request of no prompt or no output: both are at least 1"
            )
        needed = int((prompt_tokens + output_tokens).max()) + self._config.verify_width
        if needed > self._capacity:
            raise SimulationError(
                f"the workload brought a request that needs {needed} tokens of KV and the server has "
                f"{self._capacity}: raise kv_capacity_tokens or limit the lengths"
            )

    def _skip_idle_time(self, empty: Flags) -> None:
        time_s = self.time_s
        next_s = np.minimum(self._workload.next_arrival_s(), self._workload.resume_s(time_s))
        jumping = empty & np.isfinite(next_s)
        if not jumping.any():
            return
        # One nanosecond more, so that rounding cannot leave the arrival in the future.
        next_ns = np.ceil(next_s[jumping] * 1e9).astype(np.int64) + 1
        idle_ns = np.maximum(next_ns - self.time_ns[jumping], 0)
        self.idle_ns[jumping] = idle_ns
        self.pass_time(jumping, idle_ns)
        self._receive(jumping)

    def _make_room(self, where: Flags) -> None:
        """Retract requests until the largest verify width fits for all that run."""
        width = self._config.verify_width
        while True:
            needed = self.kv_tokens + width * self.slots.running
            over = ((needed > self._capacity) & where).nonzero()[0]
            if not over.size:
                return
            half_done = self.partial_tokens[over] > 0
            if half_done.any():
                self.partial_tokens[over[half_done]] = 0
                continue
            self._retract(over)

    def _retract(self, envs: Ints) -> None:
        requests = self.slots.leave(self.slots.youngest(envs))
        requests["cold"] = False  # prefill runs the draft model over all of the text
        self.context_tokens[envs] -= requests["prompt_tokens"] + requests["generated_tokens"]
        self.retracted[envs] += 1
        self.queue.push_front(envs, requests)

    def _prefill(self, where: Flags) -> None:
        """Prefill up to one chunk; where nothing runs, at least until one request does."""
        budget: Ints | None = None
        waiting = (where & (self.queue.length > 0)).nonzero()[0]
        while waiting.size:
            if budget is None:
                budget = np.full(len(where), self._config.prefill_chunk_tokens, np.int64)
            waiting = waiting[self.slots.running[waiting] < self.slots.width]
            heads = self.queue.heads(waiting)
            text_tokens = heads["prompt_tokens"] + heads["generated_tokens"]
            fits = self._fits(waiting, text_tokens)
            waiting, heads, text_tokens = waiting[fits], heads[fits], text_tokens[fits]
            if waiting.size:
                waiting = self._prefill_heads(waiting, heads, text_tokens, budget)

    def _fits(self, envs: Ints, text_tokens: Ints) -> Flags:
        running = self.slots.running[envs]
        needed = self.context_tokens[envs] + text_tokens + self._config.verify_width * (running + 1)
        return np.asarray(needed <= np.where(running > 0, self._shared_capacity, self._capacity))

    def _prefill_heads(self, envs: Ints, heads: Requests, text_tokens: Ints, budget: Ints) -> Ints:
        """Prefill the first request of each of ``envs``; returns those that may prefill another now."""
        chunk = self._config.prefill_chunk_tokens
        rest = text_tokens - self.partial_tokens[envs]
        tokens = np.where(self.slots.running[envs] > 0, np.minimum(rest, budget[envs]), rest)
        chunks = (chunk - budget[envs] + tokens + chunk - 1) // chunk - (budget[envs] < chunk)
        cost = self._config.prefill
        prefill_ns = np.rint((cost.ms_per_token * tokens + cost.fixed_ms * chunks) * 1e6).astype(np.int64)
        self.pass_time(envs, prefill_ns)
        self.prefill_ns[envs] += prefill_ns
        self.partial_tokens[envs] += tokens
        budget[envs] -= tokens
        done = tokens == rest
        self._join(envs[done], heads[done], text_tokens[done])
        return np.asarray(envs[done & (budget[envs] > 0) & (self.queue.length[envs] > 0)])

    def _join(self, envs: Ints, requests: Requests, text_tokens: Ints) -> None:
        if not envs.size:
            return
        self.queue.drop_heads(envs)
        self.partial_tokens[envs] = 0
        self.context_tokens[envs] += text_tokens
        first = requests["first_token_ns"]
        requests["first_token_ns"] = np.where(first < 0, self.time_ns[envs], first)
        self.slots.join(envs, requests, self._factor(requests, text_tokens))

    def _factor(self, requests: Requests, text_tokens: Ints) -> NDArray[np.float32]:
        return self._tables.factor(
            requests["class_index"],
            requests["request_effect"],
            requests["text_effect"],
            text_tokens,
            requests["cold"],
        )
