"""Which drafts are accepted: the simulator's model of acceptance, keyed by request and place in its text.

``specgov.env.acceptance`` holds the model. The keys are those of a simulated server of the same seed, so that
a request meets the same text here, there, and under every contestant, however fast it is written.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.acceptance import BLOCK_TOKENS, AcceptanceModel, AcceptanceTables
from specgov.env.acceptance_classes import CLASSES
from specgov.env.rng import Keys, Stream, draw, environment_keys, stream_keys

from .rid import parse

MAX_NUM_STEPS = 7
OTHERS_CLASS = "mixed"
"""The class of requests that are not the benchmark's."""

_INDEX_BY_NAME = {name: index for index, name in enumerate(CLASSES)}
_FIRST_CAPACITY = 1024


def request_key(seed: int, number: int) -> Keys:
    """The key of request ``number`` on a simulated server of this seed, shape (1,)."""
    return draw(stream_keys(environment_keys(seed, 1), Stream.ACCEPTANCE), number)


class Texts:
    """The texts of the requests of a run, and how far each has been written.

    Args:
        drafts_go_cold: whether a step at num_steps 0 leaves the draft's KV cache of its requests behind, so
            that fewer drafts of theirs are accepted from then on.

    """

    def __init__(self, *, drafts_go_cold: bool = False) -> None:
        self._drafts_go_cold = drafts_go_cold
        self._tables = AcceptanceTables(AcceptanceModel(tuple(CLASSES.values())), MAX_NUM_STEPS)
        self._capacity = _FIRST_CAPACITY
        self._key = np.zeros(_FIRST_CAPACITY, np.uint64)
        self._class = np.zeros(_FIRST_CAPACITY, np.int64)
        self._prompt = np.zeros(_FIRST_CAPACITY, np.int64)
        self._written = np.zeros(_FIRST_CAPACITY, np.int64)
        self._request = np.zeros(_FIRST_CAPACITY)
        self._text = np.zeros(_FIRST_CAPACITY)
        self._factor = np.ones(_FIRST_CAPACITY, np.float32)
        self._cold = np.zeros(_FIRST_CAPACITY, np.bool_)
        self.clear()

    def clear(self) -> None:
        """Forget all requests: another run begins."""
        self._row_by_id: dict[str, int] = {}
        self._last_ids: list[str] | None = None
        self._last_rows = np.zeros(0, np.int64)

    def rows(self, ids: list[str], prompt_tokens: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Where the requests ``ids`` are held, in order; new ones begin their texts."""
        if ids != self._last_ids:
            known = self._row_by_id
            new = [place for place, rid in enumerate(ids) if rid not in known]
            if new:
                self._begin([ids[p] for p in new], [prompt_tokens[p] if prompt_tokens else 0 for p in new])
            self._last_ids = ids
            self._last_rows = np.array([known[rid] for rid in ids], np.int64)
        return self._last_rows

    def write(self, rows: NDArray[np.int64], num_steps: int) -> NDArray[np.uint8]:
        """Accepted drafts of a step at ``num_steps``, one for each row; the texts move on by them and one."""
        written = self._written[rows]
        if num_steps:
            accepted = self._tables.accepted(
                self._key[rows],
                written,
                self._class[rows],
                self._factor[rows],
                np.full(len(rows), num_steps, np.uint8),
            )
        else:
            accepted = np.zeros(len(rows), np.uint8)
            if self._drafts_go_cold:
                self._let_go_cold(rows)
        after = written + accepted + 1
        self._written[rows] = after
        moved = written // BLOCK_TOKENS != after // BLOCK_TOKENS
        if moved.any():
            at = rows[moved]
            self._text[at] = self._tables.next_block(
                self._key[at], self._class[at], self._text[at], written[moved], after[moved]
            )
            self._set_factor(at)
        return accepted

    def survival(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """P(drafts 1..i all accepted) in the coming step, shape (rows, ``MAX_NUM_STEPS``)."""
        return self._tables.survival(self._class[rows], self._factor[rows])

    def context_tokens(self, rows: NDArray[np.int64]) -> int:
        """Tokens of the requests together, prompts included."""
        return int((self._prompt[rows] + self._written[rows]).sum())

    def _begin(self, ids: list[str], prompt_tokens: list[int]) -> None:
        first = len(self._row_by_id)
        while first + len(ids) > self._capacity:
            self._grow()
        at = np.arange(first, first + len(ids))
        for row, rid in zip(at.tolist(), ids, strict=True):
            self._row_by_id[rid] = row
            request = parse(rid)
            if request is None:
                self._key[row] = draw(environment_keys(zlib.crc32(rid.encode()), 1), 0)[0]
                self._class[row] = _INDEX_BY_NAME[OTHERS_CLASS]
            else:
                self._key[row] = request_key(request.run.seed, request.number)[0]
                self._class[row] = _INDEX_BY_NAME[request.class_name]
        self._prompt[at] = prompt_tokens
        self._written[at] = 0
        self._cold[at] = False
        self._request[at], self._text[at] = self._tables.first_state(self._key[at])
        self._set_factor(at)

    def _let_go_cold(self, rows: NDArray[np.int64]) -> None:
        at = rows[~self._cold[rows]]
        if len(at):
            self._cold[at] = True
            self._set_factor(at)

    def _set_factor(self, at: NDArray[np.int64]) -> None:
        self._factor[at] = self._tables.factor(
            self._class[at],
            self._request[at],
            self._text[at],
            self._prompt[at] + self._written[at],
            self._cold[at],
        )

    def _grow(self) -> None:
        def twice(values: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([values, np.zeros_like(values)])

        self._key, self._class, self._prompt = twice(self._key), twice(self._class), twice(self._prompt)
        self._written, self._request = twice(self._written), twice(self._request)
        self._text, self._factor, self._cold = twice(self._text), twice(self._factor), twice(self._cold)
        self._capacity *= 2


def steps_to_write(rid: str, prompt_tokens: int, output_tokens: int, num_steps: int) -> int:
    """Decode steps of a request alone at one tier, after the token that its prefill brings."""
    texts = Texts()
    rows = texts.rows([rid], [prompt_tokens])
    left, steps = output_tokens - 1, 0
    while left > 0:
        left -= int(texts.write(rows, num_steps)[0]) + 1
        steps += 1
    return steps
