"""A tier for each range of batch sizes.

Formula: num_steps = K_i for B_i <= batch size < B_{i+1}.
Source: batch-size tables as engines take them; the default is the largest tier of each batch-size slot of
SGLang 0.5.23 (``DEFAULT_ADAPTIVE_CONFIG`` in sglang/srt/speculative/adaptive_spec_params.py).
Regimes: as good as any rule where acceptance is stable and the table was found by benchmarking this very
model, draft and GPU; blind to acceptance and context length.
Defaults: 1=7:8=3:32=1:64=0, each the nearest tier at or below that the engine has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self, final

from specgov.policies.tiers import nearest_tier, require_tiers, tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, StepObservation

DEFAULT_STARTS = ((1, 7), (8, 3), (32, 1), (64, 0))


@final
class Schedule:
    """From each batch size on, its num_steps: schedule:1=7:9=3:65=0."""

    name: ClassVar[str] = "schedule"
    version: ClassVar[str] = "1"

    @dataclass(frozen=True, slots=True)
    class Config:
        """``starts``: (first batch size, num_steps), from batch size 1 up; None is the default table."""

        starts: tuple[tuple[int, int], ...] | None = None

        def __post_init__(self) -> None:
            if self.starts is None:
                return
            if not self.starts or self.starts[0][0] != 1:
                raise PolicyError("a schedule begins with batch size 1, as in schedule:1=7:9=3:65=0")
            for (before, _), (after, _) in pairwise(self.starts):
                if after <= before:
                    raise PolicyError(f"batch sizes must ascend, and {after} follows {before}")
            for batch_size, num_steps in self.starts:
                if num_steps < 0:
                    raise PolicyError(
                        f"num_steps must be 0 or more, not {num_steps} (from batch size {batch_size})"
                    )

        @classmethod
        def from_arguments(cls, arguments: tuple[str, ...]) -> Self:
            """Read ``BATCH_SIZE=NUM_STEPS`` texts; none is the default schedule."""
            return cls(tuple(map(_start, arguments)) if arguments else None)

    def __init__(self, context: PolicyContext, config: Config) -> None:
        engine = context.engine
        if config.starts is None:
            starts = tuple((first, nearest_tier(engine, num_steps)) for first, num_steps in DEFAULT_STARTS)
        else:
            starts = config.starts
            require_tiers(engine, (num_steps for _, num_steps in starts))
        self._choice = Choice(tier_ranges(engine, starts), propensity=1.0)

    def observe(self, step: StepObservation) -> None:
        """Nothing is learnt."""

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002 the protocol's signature
        """The table."""
        return self._choice

    def forget(self) -> None:
        """There is nothing to forget."""

    def estimates(self) -> dict[str, float]:
        """None."""
        return {}


def _start(argument: str) -> tuple[int, int]:
    batch_size, _, num_steps = argument.partition("=")
    try:
        return int(batch_size), int(num_steps)
    except ValueError:
        raise PolicyError(f"{argument!r} is not BATCH_SIZE=NUM_STEPS in whole numbers, as in 9=3") from None
