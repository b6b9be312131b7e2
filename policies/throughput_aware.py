"""SGLang's proposed throughput-aware rule: expected tokens by position window over a start-up cost table.

Formula: each draft position i keeps the last ``window_steps`` values of "share of the batch with more than i
accepted drafts", from steps that drafted it; p_i is their mean, one for all batch sizes. Then

    score(k) = (1 + p_0 + ... + p_{k-1}) / cost_ms(batch size, k)

- A position without data is extrapolated geometrically, ``p_n = p_{n-1} (p_{n-1} / p_0)^(1 / (n - 1))``; the
  second repeats the first.
- Every ``update_interval`` results, and only when all positions of the present tier have full windows, the
  best score takes over if it exceeds the present tier's by more than ``switch_hysteresis``.
- A switch to a smaller tier empties the windows of the positions that it no longer drafts.
- The cost table is measured when the server starts, at contexts of ``profile_seq_len`` tokens, and read at
  the next larger graph batch size. It never changes afterwards.

Source: https://github.com/sgl-project/sglang/pull/28045, "[SPEC] feat: add throughput-aware policy for
cost-guided adaptive speculative steps" (open in 2026): its description, and public copies of its policy and
helper modules, against which formula and defaults were checked. Earlier copies have no hysteresis and an
interval of 10; the pull request's head itself was not at hand.
Regimes: any model and batch size, since it knows costs; contexts longer than the profiled ones, and requests
that differ within a batch, it does not see. It never uses num_steps 0, and moves in steps of 10 %.
Defaults: those of the latest copy, and one slot of batch sizes with every positive tier of the engine, since
a table by slot can only take candidates away.
What was chosen here: where the engine has a profile, it is the cost table; without one the project's cost
estimator (``cost.py``) learns in its place, which the pull request's rule need not do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.cost import CostEstimator
from specgov.policies.learnt import Learnt
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, StepObservation

Floats = NDArray[np.float64]


class PositionWindows(Learnt):
    """Acceptance by draft position, from the last steps that drafted it."""

    _windows: list[deque[float]]

    def __init__(self, positions: int, window_steps: int) -> None:
        self._windows = [deque(maxlen=window_steps) for _ in range(positions)]

    def update(self, accepted: NDArray[np.uint8], num_steps: int) -> None:
        """Take in a step's accepted drafts (at least one request)."""
        for position, window in enumerate(self._windows[:num_steps]):
            window.append(float(np.mean(accepted > position)))

    def clear_from(self, position: int) -> None:
        """Empty the windows of ``position`` and all beyond."""
        for window in self._windows[position:]:
            window.clear()

    def full(self, num_steps: int) -> bool:
        """Whether the positions of the tier ``num_steps`` all have full windows."""
        return all(len(window) == window.maxlen for window in self._windows[:num_steps])

    def rates(self) -> list[float]:
        """p by position, extrapolated beyond the data; as far as that is possible."""
        rates: list[float] = []
        for window in self._windows:
            if window:
                rates.append(sum(window) / len(window))
            elif len(rates) == 1:
                rates.append(rates[0])
            elif rates and rates[0] > 0:
                rates.append(rates[-1] * (rates[-1] / rates[0]) ** (1.0 / (len(rates) - 1)))
            else:
                break
        return rates


@final
class ThroughputAware(Learnt):
    """SGLang PR 28045's rule: expected accept length over a start-up cost table, with 10 % hysteresis."""

    name: ClassVar[str] = "throughput_aware"
    version: ClassVar[str] = "1"

    _current: int
    _windows: PositionWindows
    _cost: CostEstimator
    _results: int

    @dataclass(frozen=True, slots=True)
    class Config:
        """Options, as in the module's docstring; ``initial_num_steps`` None is the middle positive tier."""

        initial_num_steps: int | None = None
        window_steps: int = 20
        update_interval: int = 5
        switch_hysteresis: float = 0.1
        profile_seq_len: int = 128

        def __post_init__(self) -> None:
            for name in ("window_steps", "update_interval", "profile_seq_len"):
                if getattr(self, name) < 1:
                    raise PolicyError(f"{name} must be 1 or more, not {getattr(self, name)}")
            if self.switch_hysteresis < 0:
                raise PolicyError(f"switch_hysteresis must be 0 or more, not {self.switch_hysteresis}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._config = config
        self._engine = context.engine
        self._candidates = [tier for tier in context.engine.tiers if tier > 0] or list(
            context.engine.tiers[:1]
        )
        first = config.initial_num_steps
        if first is None:
            first = self._candidates[len(self._candidates) // 2]
        if first not in self._candidates:
            raise PolicyError(
                f"initial_num_steps must be one of the positive tiers {self._candidates}, not {first}"
            )
        self._current = first
        self._windows = PositionWindows(self._candidates[-1], config.window_steps)
        self._cost = CostEstimator(context.engine, context.step_time)
        self._cost_is_learnt = context.step_time is None
        self._columns = [context.engine.tiers.index(tier) for tier in self._candidates]
        self._results = 0

    def observe(self, step: StepObservation) -> None:
        """Add the step to the windows."""
        if self._cost_is_learnt:
            self._cost.observe(step)
        if len(step.accepted):
            self._windows.update(step.accepted, step.num_steps)
            self._results += 1

    def choose(self, batch: BatchView) -> Choice:
        """The present tier for every batch size; reviewed for the batch's own when a review is due."""
        if self._results >= self._config.update_interval:
            if self._windows.full(self._current):
                self._review(batch)
            self._results = 0
        return Choice(tier_ranges(self._engine, [(1, self._current)]), propensity=1.0)

    def forget(self) -> None:
        """Empty the windows; costs and the present tier stay."""
        self._windows.clear_from(0)

    def estimates(self) -> dict[str, float]:
        """p by position: the share of requests that get that far."""
        return {f"survival_{i + 1}": rate for i, rate in enumerate(self._windows.rates())}

    def _review(self, batch: BatchView) -> None:
        score = self._scores(batch)
        best = max(score, key=lambda tier: score[tier], default=self._current)
        if score.get(best, 0.0) > score.get(self._current, 0.0) * (1 + self._config.switch_hysteresis):
            if best < self._current:
                self._windows.clear_from(best)
            self._current = best

    def _scores(self, batch: BatchView) -> dict[int, float]:
        """Expected tokens of a request in a ms, of the tiers whose positions are known or extrapolated."""
        rates = self._windows.rates()
        size = max(batch.batch_size, 1)
        context = batch.sum_seq_len_tokens / size if self._cost_is_learnt else self._config.profile_seq_len
        ms = self._cost.predict(context)[self._cost.grid_index(size), self._columns]
        return {
            tier: (1.0 + sum(rates[:tier])) / float(tier_ms)
            for tier, tier_ms in zip(self._candidates, ms, strict=True)
            if tier <= len(rates)
        }
