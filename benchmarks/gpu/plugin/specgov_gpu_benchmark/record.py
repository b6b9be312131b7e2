"""What a scheduler did, as lines of a file: one for each step and prefill, and two for each request.

``head,VERSION,RANK``                                          once
``step,RUN,t_s,step_id,batch_size,live,num_steps,tokens,context_tokens,chosen_by,decision_id,waiting``
                                                               a decode step whose result was processed
``fill,RUN,t_s,step_id,requests``                              a prefill, or a chunk of one, was processed
``first,RUN,t_s,NUMBER``                                       a request's first token was processed
``done,RUN,t_s,NUMBER,tokens``                                 a request ended

``t_s`` is the monotonic clock, which is one for all processes of a machine. ``tokens`` are those that
requests got, without what SGLang makes beyond their length; ``context_tokens`` is that of the newest launch,
on a server that does not speculate that of the step; ``chosen_by`` is the kind of the order or 0 (see
specgov.sglang_plugin.orders).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

STEPS_BETWEEN_FLUSHES = 256


class Recorder:
    """Appends to ``FOLDER/steps.RANK.csv``."""

    def __init__(self, folder: Path, rank: int, version: str) -> None:
        self._file = (folder / f"steps.{rank}.csv").open("a", buffering=1 << 20)
        self._file.write(f"head,{version},{rank}\n")
        self._run = "-"
        self._unflushed = 0
        self.flush()

    def enter(self, run: str) -> None:
        """Lines of ``run`` follow; what came before is handed on."""
        if run != self._run:
            self._run = run
            self.flush()

    def flush(self) -> None:
        """Hand on what was written."""
        self._file.flush()
        self._unflushed = 0

    def step(self, run: str, *values: int) -> None:
        """A decode step whose result was processed."""
        self._file.write(f"step,{run},{time.monotonic():.6f},{','.join(map(str, values))}\n")
        self._unflushed += 1
        if self._unflushed >= STEPS_BETWEEN_FLUSHES:
            self.flush()

    def filled(self, run: str, step_id: int, requests: int) -> None:
        """A prefill whose result was processed."""
        self._file.write(f"fill,{run},{time.monotonic():.6f},{step_id},{requests}\n")

    def first_tokens(self, run: str, numbers: list[int]) -> None:
        """Requests whose prefill was processed."""
        now_s = time.monotonic()
        for number in numbers:
            self._file.write(f"first,{run},{now_s:.6f},{number}\n")

    def ended(self, run: str, requests: list[tuple[int, int]]) -> None:
        """Requests that ended: number and tokens."""
        now_s = time.monotonic()
        for number, tokens in requests:
            self._file.write(f"done,{run},{now_s:.6f},{number},{tokens}\n")


def tokens_beyond(requests: list[Any]) -> int:
    """Tokens that SGLang made beyond the wanted lengths of requests that have just ended."""
    return sum(max(0, len(r.output_ids) - r.sampling_params.max_new_tokens) for r in requests)
