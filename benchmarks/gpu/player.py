"""Plays a load to a real server: the requests that the simulator would make, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specgov.env.rng import environment_keys
from specgov.env.scenario import Scenario

sys.path.insert(0, str(Path(__file__).parent / "plugin"))
from specgov_gpu_benchmark.rid import RequestId, Run

TICK_S = 0.01
"""How often a script of concurrency is looked at."""
ABORT_TIMEOUT_S = 30.0
POOL_TOKENS = 1 << 17


@dataclass
class Played:
    """``began_s`` is on the monotonic clock; ``sent_s`` by request number. ``errors`` by what was said."""

    began_s: float = 0.0
    ended_s: float = 0.0
    sent_s: dict[int, float] = field(default_factory=dict)
    finished: int = 0
    aborted: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class Player:
    """Sends requests to the server at ``url``; prompts are random ids from ``vocabulary``."""

    def __init__(self, url: str, vocabulary: tuple[int, int], seed: int = 0) -> None:
        self.url = url
        rng = random.Random(seed)
        self._ids = [str(rng.randint(*vocabulary)) for _ in range(POOL_TOKENS)]

    def body(self, rid: RequestId, prompt_tokens: int, output_tokens: int) -> bytes:
        """A request to ``/generate``; the prompt depends on the run's seed and the request's number."""
        at = random.Random(rid.run.seed * 1_000_003 + rid.number).randrange(POOL_TOKENS - prompt_tokens)
        sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        rest = json.dumps({"rid": rid.text(), "sampling_params": sampling})
        return f'{{"input_ids": [{",".join(self._ids[at : at + prompt_tokens])}], {rest[1:]}'.encode()

    async def one(
        self, session: Any, rid: RequestId, prompt_tokens: int, output_tokens: int
    ) -> dict[str, Any]:
        """One request and its answer."""
        data = self.body(rid, prompt_tokens, output_tokens)
        headers = {"content-type": "application/json"}
        async with session.post(f"{self.url}/generate", data=data, headers=headers) as answer:
            body: dict[str, Any] = await answer.json(content_type=None)
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {str(body)[:120]}")
            return body

    async def play(self, session: Any, scenario: Scenario, run: Run) -> Played:
        """Play a load for its duration and abort what still runs then; returns when the server is idle.

        Raises:
            RuntimeError: requests do not end though they were aborted.

        """
        load, in_flight = _Requests(scenario, run), _InFlight(self, session)
        played = in_flight.played
        played.began_s = time.monotonic()
        while (now_s := time.monotonic() - played.began_s) < scenario.duration_s:
            for rid, prompt_tokens, output_tokens in load.due(now_s, len(in_flight.tasks)):
                in_flight.start(rid, prompt_tokens, output_tokens)
            await in_flight.wait(min(TICK_S, scenario.duration_s - now_s))
        played.ended_s = time.monotonic()
        await in_flight.abort()
        return played


class _InFlight:
    """The requests that run, and what became of the others."""

    def __init__(self, player: Player, session: Any) -> None:
        self._player = player
        self._session = session
        self._one_ended = asyncio.Event()
        self._aborting = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.played = Played()

    def start(self, rid: RequestId, prompt_tokens: int, output_tokens: int) -> None:
        task = asyncio.create_task(self._send(rid, prompt_tokens, output_tokens))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def wait(self, seconds: float) -> None:
        """Until a request ends, so long at most."""
        self._one_ended.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._one_ended.wait(), seconds)

    async def abort(self) -> None:
        self._aborting = True
        deadline_s = time.monotonic() + ABORT_TIMEOUT_S
        while self.tasks:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{len(self.tasks)} requests run on, {ABORT_TIMEOUT_S:g} s after an abort")
            everything = {"rid": "", "abort_all": True}
            async with self._session.post(f"{self._player.url}/abort_request", json=everything):
                pass
            if self.tasks:  # the last may have ended meanwhile
                await asyncio.wait(self.tasks, timeout=1.0)

    async def _send(self, rid: RequestId, prompt_tokens: int, output_tokens: int) -> None:
        self.played.sent_s[rid.number] = time.monotonic()
        try:
            body = await self._player.one(self._session, rid, prompt_tokens, output_tokens)
            problem = _problem(body, output_tokens)
        except Exception as error:  # noqa: BLE001 whatever goes wrong is what is counted here
            problem = repr(error)[:160]
        if not problem:
            self.played.finished += 1
        elif self._aborting:
            self.played.aborted += 1
        else:
            self.played.errors[problem] += 1
            await asyncio.sleep(0.05)  # a server that refuses at once must not be flooded
        self._one_ended.set()


def _problem(body: dict[str, Any], output_tokens: int) -> str:
    """Why an answer is not whole; "" where it is."""
    reason = (body["meta_info"].get("finish_reason") or {}).get("type")
    made = len(body["output_ids"])
    return "" if reason == "length" and made == output_tokens else f"ended by {reason} after {made} tokens"


class _Requests:
    """The requests of a load, in the order of a simulated server of the run's seed."""

    def __init__(self, scenario: Scenario, run: Run) -> None:
        self._workload = scenario.workload()
        self._workload.start(environment_keys(run.seed, 1))
        self._classes = [table.acceptance for table in scenario.table.classes]
        if not all(self._classes):
            raise ValueError(f"{scenario.name}: its classes must be named ones")
        self._run = run
        self._number = 0

    def due(self, now_s: float, running: int) -> list[tuple[RequestId, int, int]]:
        """The requests to send now: id, prompt tokens, output tokens."""
        now = np.array([now_s])
        missing = int(self._workload.target_concurrency(now)[0]) - running
        found = [self._take(now) for _ in range(missing)]
        while math.isfinite(due_s := self._workload.next_arrival_s()[0]) and due_s <= now_s:
            found.append(self._take(now))
        return found

    def _take(self, now: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[RequestId, int, int]:
        batch = self._workload.take(np.array([0]), now)
        rid = RequestId(self._run, self._classes[int(batch.class_index[0])], self._number)
        self._number += 1
        # The simulator does not count the token that prefill brings.
        return rid, int(batch.prompt_tokens[0]), int(batch.output_tokens[0]) + 1


def session() -> Any:
    """An HTTP session: a connection a request, since a kept one may be closed when it is used again."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))
