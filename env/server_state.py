"""Where the simulated server keeps requests: a waiting queue and running slots for each environment.

Both hold rows of `REQUEST`, so a request moves by one assignment. What every step reads lies in arrays of
its own beside the slots. Slots are flat: environment e has slots ``e * width`` to ``(e + 1) * width -
1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.server_types import Ints

REQUEST = np.dtype(
    [
        ("key", np.uint64),
        ("arrival_ns", np.int64),
        ("first_token_ns", np.int64),  # -1 = none yet
        ("request_effect", np.float64),  # u and z of the acceptance model
        ("text_effect", np.float64),
        ("class_index", np.int64),
        ("prompt_tokens", np.int64),
        ("output_tokens", np.int64),  # asked for
        ("generated_tokens", np.int64),
        ("cold", np.bool_),
    ],
    align=True,
)
"""A request outside the hot path."""

Requests = NDArray[np.void]


class WaitingQueue:
    """A first-in first-out queue for each of n environments; grows as needed.

    Attributes:
        length: requests waiting, shape (n,).

    """

    def __init__(self, n_envs: int) -> None:
        self.length = np.zeros(n_envs, np.int64)
        self._first = np.zeros(n_envs, np.int64)
        self._ring: Requests = np.zeros((n_envs, 8), REQUEST)

    def clear(self, envs: Ints) -> None:
        """Forget what waits in ``envs``."""
        self.length[envs] = 0

    def push(self, envs: Ints, requests: Requests) -> None:
        """Append one request in each of ``envs`` (distinct)."""
        self._grow_for(envs)
        place = (self._first[envs] + self.length[envs]) % self._ring.shape[1]
        self._ring[envs, place] = requests
        self.length[envs] += 1

    def push_front(self, envs: Ints, requests: Requests) -> None:
        """Put one request in each of ``envs`` (distinct) before the others."""
        self._grow_for(envs)
        self._first[envs] = (self._first[envs] - 1) % self._ring.shape[1]
        self._ring[envs, self._first[envs]] = requests
        self.length[envs] += 1

    def heads(self, envs: Ints) -> Requests:
        """Copies of the first request of each of ``envs``, none of which may be empty."""
        heads: Requests = self._ring[envs, self._first[envs]]
        return heads

    def drop_heads(self, envs: Ints) -> None:
        """Take the first request from each of ``envs`` (distinct)."""
        self._first[envs] = (self._first[envs] + 1) % self._ring.shape[1]
        self.length[envs] -= 1

    def _grow_for(self, envs: Ints) -> None:
        width = self._ring.shape[1]
        if int(self.length[envs].max()) < width:
            return
        order = (self._first[:, None] + np.arange(width)) % width
        unrolled = np.take_along_axis(self._ring, order, axis=1)
        self._ring = np.concatenate([unrolled, np.zeros_like(unrolled)], axis=1)
        self._first[:] = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The running requests of all environments, flat, sorted by (environment, slot); shape (n,).

    Everything here stays the same until a request joins or leaves. ``first`` and ``occupied`` are, for
    environments that run at least one request, the position of their first request and their number.
    """

    at: Ints  # into all slots
    env: Ints
    slot: Ints  # within the environment
    generation: NDArray[np.uint8]
    key: NDArray[np.uint64]
    class_index: Ints
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    first: Ints
    occupied: Ints


class RunningSlots:
    """Slots of running requests, ``width`` for each of n environments.

    Attributes:
        running: requests running, shape (n,).
        generated: output tokens so far of each slot, shape (n * width,).
        factor: each slot's hazard factor without the server's drift.
        request: the rest; its copies of what is in an array of its own are brought up to date by `leave`.

    """

    def __init__(self, n_envs: int, width: int) -> None:
        size = n_envs * width
        self.width = width
        self.running = np.zeros(n_envs, np.int64)
        self.request: Requests = np.zeros(size, REQUEST)
        self.generated = np.zeros(size, np.int32)
        self.factor = np.zeros(size, np.float32)
        self.generation = np.zeros(size, np.uint8)
        self._live = np.zeros(size, np.bool_)
        self._key = np.zeros(size, np.uint64)
        self._class_index = np.zeros(size, np.int64)
        self._prompt = np.zeros(size, np.int32)
        self._asked = np.zeros(size, np.int32)
        # A stack of free slots for each environment; the top is at n - running - 1.
        self._free = np.tile(np.arange(width - 1, -1, -1, dtype=np.int64), (n_envs, 1))
        self._batch: Batch | None = None

    def clear(self, envs: Ints) -> None:
        """Empty the slots of ``envs``; their generations begin again."""
        rows = (envs[:, None] * self.width + np.arange(self.width)).ravel()
        self._live[rows] = False
        self.generation[rows] = 0
        self.running[envs] = 0
        self._free[envs] = np.arange(self.width - 1, -1, -1)
        self._batch = None

    def join(self, envs: Ints, requests: Requests, factor: NDArray[np.float32]) -> None:
        """Start one request in each of ``envs`` (distinct), none of which may be full."""
        at = envs * self.width + self._free[envs, self.width - 1 - self.running[envs]]
        self.running[envs] += 1
        self._live[at] = True
        self.generation[at] += np.uint8(1)
        self.request[at] = requests
        self.factor[at] = factor
        self.generated[at] = requests["generated_tokens"]
        self._key[at] = requests["key"]
        self._class_index[at] = requests["class_index"]
        self._prompt[at] = requests["prompt_tokens"]
        self._asked[at] = requests["output_tokens"]
        self._batch = None

    def leave(self, at: Ints) -> Requests:
        """End the requests in the slots ``at`` (ascending); returns them as they are now."""
        envs = at // self.width
        rank = np.arange(len(at)) - np.searchsorted(envs, envs)
        self._free[envs, self.width - self.running[envs] + rank] = at - envs * self.width
        np.subtract.at(self.running, envs, 1)
        self._live[at] = False
        self._batch = None
        requests: Requests = self.request[at]
        requests["generated_tokens"] = self.generated[at]
        return requests

    def youngest(self, envs: Ints) -> Ints:
        """The slot of the request with the fewest output tokens in each of ``envs`` (none empty).

        Of equals the first. SGLang, too, retracts these first.
        """
        rows = envs[:, None] * self.width + np.arange(self.width)
        age = np.where(self._live[rows], self.generated[rows], np.iinfo(np.int32).max)
        return np.asarray(rows[np.arange(len(envs)), age.argmin(axis=1)])

    def batch(self) -> Batch:
        """The running requests, flat."""
        if self._batch is None:
            at = self._live.nonzero()[0]
            nonempty = self.running.nonzero()[0]
            occupied = self.running[nonempty]
            envs = np.repeat(nonempty, occupied)
            self._batch = Batch(
                at,
                envs,
                at - envs * self.width,
                self.generation[at],
                self._key[at],
                self._class_index[at],
                self._prompt[at],
                self._asked[at],
                np.cumsum(occupied) - occupied,
                nonempty,
            )
        return self._batch


def new_requests(count: int, **fields: Any) -> Requests:
    """``count`` requests with the given fields; no output yet, drafts warm."""
    requests: Requests = np.zeros(count, REQUEST)
    requests["first_token_ns"] = -1
    for name, values in fields.items():
        requests[name] = values
    return requests
