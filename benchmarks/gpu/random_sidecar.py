"""random_sidecar.py TARGET   A sidecar that draws a tier for every range of batch sizes, each step.

For the test that tensor-parallel ranks agree; never to serve with.
"""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass
from typing import ClassVar

from specgov.controller.config import ServeConfig
from specgov.controller.server import Sidecar
from specgov.policies.registry import register
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, Reason, StepObservation


class Random:
    """A tier at random for each range of batch sizes."""

    name: ClassVar[str] = "random"
    version: ClassVar[str] = "1"

    @dataclass(frozen=True, slots=True)
    class Config:
        """No options."""

    def __init__(self, context: PolicyContext, config: Config) -> None:  # noqa: ARG002
        self._context = context

    def observe(self, step: StepObservation) -> None:
        """Nothing is learnt."""

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002
        """Drawn anew each time."""
        engine, rng = self._context.engine, self._context.rng
        starts = [1, 3, 9, 33, 129]
        drawn = [(start, int(rng.choice(engine.tiers))) for start in starts]
        return Choice(tier_ranges(engine, drawn), Reason.EXPLORATION)

    def forget(self) -> None:
        """There is nothing to forget."""

    def estimates(self) -> dict[str, float]:
        """None."""
        return {}


def main() -> None:
    register("random", "random_sidecar:Random")
    sidecar = Sidecar(ServeConfig(listen=sys.argv[1], policy="random"))
    sidecar.start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    sidecar.stop()


if __name__ == "__main__":
    main()
