"""What the rules share about tiers: checking them against an engine's, and tiers by batch-size range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specgov.policies.types import EngineSpec, PolicyError, TierRange


def require_tiers(engine: EngineSpec, wanted: Iterable[int]) -> None:
    """Check that the engine has every tier that is wanted.

    Raises:
        PolicyError: it lacks some; the message names them and the tiers that it has.

    """
    missing = sorted(set(wanted) - set(engine.tiers))
    if missing:
        raise PolicyError(
            f"this engine has no tier {_listed(missing)}: its tiers are {_listed(engine.tiers)}"
        )


def nearest_tier(engine: EngineSpec, num_steps: int) -> int:
    """The engine's largest tier that does not exceed ``num_steps``, else its smallest."""
    return max((tier for tier in engine.tiers if tier <= num_steps), default=engine.tiers[0])


def nearest_threshold(tiers: Sequence[int], batch_size: int, num_steps: int) -> str:
    """The text of ``threshold:batch_size:num_steps``, or of what comes nearest to it with these tiers."""
    below = nearest_tier(EngineSpec(tuple(tiers)), num_steps)
    if 0 in tiers:
        return f"threshold:{batch_size}:{below}"
    return f"schedule:1={below}:{batch_size}={min(tiers)}"


def tier_ranges(engine: EngineSpec, starts: Iterable[tuple[int, int]]) -> tuple[TierRange, ...]:
    """Ranges that cover 1 to the engine's largest batch size.

    Neighbours with the same tier become one range, and what lies above the largest batch size is left out.

    Args:
        engine: gives the largest batch size.
        starts: (first batch size, num_steps), ascending from batch size 1; of two equal the later counts.

    """
    changes: dict[int, int] = {}
    for batch_size, num_steps in starts:
        if batch_size <= engine.largest_batch_size:
            changes[batch_size] = num_steps
    firsts: list[int] = []
    for batch_size, num_steps in changes.items():
        if not firsts or changes[firsts[-1]] != num_steps:
            firsts.append(batch_size)
    lasts = [first - 1 for first in firsts[1:]] + [engine.largest_batch_size]
    return tuple(TierRange(first, last, changes[first]) for first, last in zip(firsts, lasts, strict=True))


def _listed(tiers: Iterable[int]) -> str:
    return ", ".join(map(str, tiers))
