"""What tests of rules share: engines, steps, and step times given as a table."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specgov.policies.registry import make_policy
from specgov.policies.types import EngineSpec, Policy, PolicyContext, StepObservation


class TableOfTiers:
    """Step times that depend on num_steps alone, in ms; implements ``StepTime``."""

    def __init__(self, ms_by_num_steps: dict[int, float]) -> None:
        self._ms = np.zeros(max(ms_by_num_steps) + 1)
        for num_steps, ms in ms_by_num_steps.items():
            self._ms[num_steps] = ms

    def step_ms(self, batch_size, num_steps, sum_seq_len_tokens):  # type: ignore[no-untyped-def]
        shape = np.broadcast_shapes(*map(np.shape, (batch_size, num_steps, sum_seq_len_tokens)))
        return np.broadcast_to(self._ms[np.asarray(num_steps)], shape)


@pytest.fixture
def make_rule() -> Callable[..., Policy]:
    """``make_rule(text, tiers, ms={...}, largest=64, rng=...)``: a rule from the registry."""

    def make(
        text: str,
        tiers: Sequence[int],
        ms: dict[int, float] | None = None,
        largest: int = 64,
        rng: np.random.Generator | None = None,
        **engine: object,
    ) -> Policy:
        spec = EngineSpec(tuple(tiers), max_running_requests=largest, **engine)  # type: ignore[arg-type]
        step_time = None if ms is None else TableOfTiers(ms)
        return make_policy(text, PolicyContext(spec, rng or np.random.default_rng(0), lambda: 0.0, step_time))

    return make


@pytest.fixture
def make_step() -> Callable[..., StepObservation]:
    """``make_step(step_id, num_steps, accepted, step_ms)``: a step of len(accepted) requests."""

    def make(
        step_id: int, num_steps: int, accepted: Sequence[int], step_ms: float | None = None
    ) -> StepObservation:
        return StepObservation(
            step_id=step_id,
            batch_size=len(accepted),
            num_steps=num_steps,
            accepted=np.array(accepted, np.uint8),
            slots=np.zeros(0, np.uint16),
            generations=np.zeros(0, np.uint8),
            sum_seq_len_tokens=100 * len(accepted),
            max_seq_len_tokens=100,
            step_ms=step_ms,
        )

    return make


class Draws:
    """Stands for a generator: gives the numbers that a test names, in order, and no more."""

    def __init__(self, integers: Sequence[int] = (), random: Sequence[float] = ()) -> None:
        self._integers, self._random = iter(integers), iter(random)

    def integers(self, high: int) -> int:
        drawn = next(self._integers)
        assert 0 <= drawn < high
        return drawn

    def random(self) -> float:
        return next(self._random)


@pytest.fixture
def draws() -> Callable[..., Draws]:
    """``draws(integers=[...], random=[...])``: a generator of given numbers."""
    return Draws
