"""A request's id says to which run it belongs, who decides in it, and what the request's text is like."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

MARK = "~"


class Run(NamedTuple):
    """``rule``: who decides the tier, see ``rules.py``; ``seed``: of the texts."""

    name: str
    rule: str
    seed: int


class RequestId(NamedTuple):
    """``class_name``: of ``specgov.env.acceptance_classes``; ``number``: from 0, of the load's requests."""

    run: Run
    class_name: str
    number: int

    def text(self) -> str:
        """The id as SGLang gets it."""
        run, rule, seed = self.run
        return MARK.join((run, rule, str(seed), self.class_name, str(self.number)))


@lru_cache(maxsize=4096)
def parse(rid: str) -> RequestId | None:
    """What an id says; None for those that are not the benchmark's (warm-up, health checks, other loads)."""
    parts = rid.split(MARK)
    if len(parts) != 5:
        return None
    run, rule, seed, class_name, number = parts
    return RequestId(Run(run, rule, int(seed)), class_name, int(number))
