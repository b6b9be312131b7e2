"""Posterior sampling by epoch: the best tier of one plausible world, kept for a while, then of another.

Formula: at the start of an epoch draw acceptance and step times from their posteriors (``acceptance.py``,
``cost.py``); for each batch size take the tier with the largest ``E[tok | k] / T(k)`` in that draw, and hold
it for ``epoch_steps`` steps. A tier whose draw beats the one in use by less than ``margin`` is not taken. An
epoch ends early when a change is found. Epochs at another tier than the best by posterior mean are short,
``first_epoch_steps``: a few steps tell what a tier costs. So are all while little is known: they begin at
that length and double. The temperatures scale a draw's deviations from the mean: the acceptance of a small
batch stays uncertain for as long as its requests live, so it is drawn closer to the mean; step times are
learnt for good.

- Sampling at every step would switch at every step; by epoch the exploration is the same and the switches few
  (Osband, Russo and Van Roy, "(More) Efficient Reinforcement Learning via Posterior Sampling", NeurIPS 2013,
  sample by episode for that reason).
- Tier 0 shows no acceptance: after ``blind_steps`` steps there, one step at the best positive tier.
- After an alarm of the step times the tier that was in force is tried again for some steps
  (``alarm_trial.py``).
- Where the draft's KV cache goes cold at tier 0, tier 0 must win by ``cold_draft_margin`` more, and by
  the mean too.

Source: Thompson, "On the likelihood that one unknown probability exceeds another", Biometrika 1933.
Regimes: as ``greedy``; explores more where much is unknown, and goes on exploring among tiers that are nearly
equal, which costs little. The propensity of a choice is not known in closed form and left out.
Defaults: see ``Config``; intervals in steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.learnt import Learnt
from specgov.policies.rate_model import RateModel, Rates, with_probe
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, Reason, StepObservation


@final
class Thompson(Learnt):
    """The best tier of a world drawn from the posterior, a new one each epoch."""

    name: ClassVar[str] = "thompson"
    version: ClassVar[str] = "1"

    model: RateModel
    _rng: np.random.Generator
    _current: NDArray[np.intp]
    _blind_for: int
    _left: int
    _length: int

    @dataclass(frozen=True, slots=True)
    class Config:
        """Options, as in the module's docstring."""

        epoch_steps: int = 16
        first_epoch_steps: int = 4
        acceptance_temperature: float = 0.3
        cost_temperature: float = 1.0
        margin: float = 0.003
        blind_steps: int = 60
        cold_draft_margin: float = 0.03

        def __post_init__(self) -> None:
            if not 1 <= self.first_epoch_steps <= self.epoch_steps:
                raise PolicyError("epochs must satisfy 1 <= first_epoch_steps <= epoch_steps")
            if self.blind_steps < 1:
                raise PolicyError(f"blind_steps must be 1 or more, not {self.blind_steps}")
            for name in ("acceptance_temperature", "cost_temperature", "margin", "cold_draft_margin"):
                if getattr(self, name) < 0:
                    raise PolicyError(f"{name} must be 0 or more, not {getattr(self, name)}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._config = config
        self._rng = context.rng
        self._blind_steps = config.blind_steps * (1 if context.engine.draft_kv_stays_warm else 4)
        self.model = RateModel(context, config.cold_draft_margin)
        self._current = np.full(len(self.model.cost.batch_sizes), -1, dtype=np.intp)
        self._blind_for = 0
        self._left = 0
        self._length = config.first_epoch_steps

    def observe(self, step: StepObservation) -> None:
        """Learn from a step."""
        if self.model.observe(step):
            self._restart_epochs()
        self._left -= 1
        self._blind_for = 0 if step.num_steps > 0 else self._blind_for + 1

    def choose(self, batch: BatchView) -> Choice:
        """The tiers of this epoch, newly drawn when it begins."""
        rates = self.model.rates(batch)
        reason = Reason.HOLD
        if self._left <= 0:
            reason = self._begin_epoch(batch, rates)
        choices, recheck = self._current, self.model.recheck()
        if recheck is not None and recheck != choices[rates.grid]:
            choices, reason = with_probe(choices, rates.grid, recheck), Reason.EXPLORATION
        elif self._blind_for >= self._blind_steps and self.model.tiers[choices[rates.grid]] == 0:
            choices, reason, self._blind_for = self._peek(rates), Reason.EXPLORATION, 0
        return Choice(self.model.ranges(choices), reason, None, rates.tokens, rates.ms[rates.grid])

    def forget(self) -> None:
        """Drop what is known of acceptance; step times stay."""
        self.model.acceptance.forget()
        self._restart_epochs()

    def estimates(self) -> dict[str, float]:
        """Acceptance of a typical request by position, spread between requests, noise, changes found."""
        return self.model.estimates()

    def _begin_epoch(self, batch: BatchView, rates: Rates) -> Reason:
        config = self._config
        self._left, self._length = self._length, min(2 * self._length, config.epoch_steps)
        drawn = self.model.sample_rates(
            batch, self._rng, config.acceptance_temperature, config.cost_temperature
        ).log_rate
        best, rows = np.argmax(drawn, axis=1), np.arange(len(drawn))
        mean_best = np.argmax(rates.log_rate, axis=1)
        best = np.where(self.model.is_probed[best], best, mean_best)
        moves = (self._current < 0) | (drawn[rows, best] > drawn[rows, self._current] + config.margin)
        self._current = np.where(moves, best, self._current)
        if self._current[rates.grid] == mean_best[rates.grid]:
            return Reason.POLICY
        self._left = min(self._left, config.first_epoch_steps)
        return Reason.EXPLORATION

    def _peek(self, rates: Rates) -> NDArray[np.intp]:
        """The choices with the best positive tier wherever they hold tier 0."""
        positive = np.where(self.model.tiers > 0, rates.log_rate, -np.inf)
        at_zero = self.model.tiers[self._current] == 0
        has_positive = bool((self.model.tiers > 0).any())
        return np.where(at_zero & has_positive, np.argmax(positive, axis=1), self._current)

    def _restart_epochs(self) -> None:
        self._length = self._config.first_epoch_steps
        self._left = 0
