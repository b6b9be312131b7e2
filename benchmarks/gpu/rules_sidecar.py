"""rules_sidecar.py TARGET   A sidecar with rules for tests and measurements; never to serve with.

``random``           a tier drawn for every range of batch sizes, each step: do tensor-parallel ranks agree?
``turns:N:0,1,3``    those tiers for N steps each, in turn: what do steps cost?
"""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass
from typing import ClassVar

from specgov.controller.config import ServeConfig
from specgov.controller.guard.config import GuardConfig
from specgov.controller.server import Sidecar
from specgov.policies.registry import register
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, Reason, StepObservation


class _Rule:
    """Learns nothing."""

    version: ClassVar[str] = "1"

    def observe(self, step: StepObservation) -> None:
        """Nothing is learnt."""

    def forget(self) -> None:
        """There is nothing to forget."""

    def estimates(self) -> dict[str, float]:
        """None."""
        return {}


class Random(_Rule):
    """A tier at random for each range of batch sizes."""

    name: ClassVar[str] = "random"

    @dataclass(frozen=True, slots=True)
    class Config:
        """No options."""

    def __init__(self, context: PolicyContext, config: Config) -> None:  # noqa: ARG002
        self._context = context

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002
        """Drawn anew each time."""
        engine, rng = self._context.engine, self._context.rng
        starts = [1, 3, 9, 33, 129]
        drawn = [(start, int(rng.choice(engine.tiers))) for start in starts]
        return Choice(tier_ranges(engine, drawn), Reason.EXPLORATION)


class Turns(_Rule):
    """Some tiers for some steps each, in turn."""

    name: ClassVar[str] = "turns"

    @dataclass(frozen=True, slots=True)
    class Config:
        """``steps``: how many each of the ``tiers`` is kept for."""

        steps: int
        tiers: tuple[int, ...]

        @classmethod
        def from_arguments(cls, arguments: tuple[str, ...]) -> Turns.Config:
            """From ``N`` and ``0,1,3``."""
            steps, tiers = arguments
            return cls(int(steps), tuple(map(int, tiers.split(","))))

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._steps = config.steps
        self._choices = [
            Choice(tier_ranges(context.engine, [(1, tier)]), Reason.EXPLORATION) for tier in config.tiers
        ]

    def choose(self, batch: BatchView) -> Choice:
        """The tier whose turn it is at the batch's step."""
        return self._choices[batch.step_id // self._steps % len(self._choices)]


RULES = {"random": "rules_sidecar:Random", "turns": "rules_sidecar:Turns"}


def main() -> None:
    for name, target in RULES.items():
        register(name, target)
    sidecar = Sidecar(ServeConfig(listen=sys.argv[1], policy="random", guard=GuardConfig(enabled=False)))
    sidecar.start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    sidecar.stop()


if __name__ == "__main__":
    main()
