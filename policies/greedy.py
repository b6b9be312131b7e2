"""The rate-optimal tier by posterior mean, with rare probes and hysteresis.

Formula: for each batch size the tier with the largest ``E[tok | k] / T(k)``, where ``E[tok | k]`` comes from
``acceptance.py`` for the live requests and ``T(k)`` from ``cost.py``.

- Hysteresis: a tier is left only when another promises ``margin`` more, and ``doubt`` standard deviations of
  the log ratio of the two rates, up to ``largest_margin``.
- Probes: one step at a tier that may be better. Tier t is worth it when its knowledge gradient ``s f(-d /
  s)``, ``f(z) = pdf(z) + z cdf(z)``, over ``horizon_steps`` exceeds the loss ``d`` of the step: d is the log
  ratio of the rates, s the standard deviation of what one such step will move it by. At most one in
  ``probe_every_steps``.
- After an alarm of the step times the tier that was in force is tried again for some steps
  (``alarm_trial.py``).
- Tier 0 shows no acceptance at all. There the positive tier that loses least, by a relative ``d``, is also
  probed after ``d / blind_cost`` steps, so that such probes cost a share ``blind_cost``; never before
  ``blind_steps`` or after ``largest_blind_steps`` steps. While the change detector is suspicious, probes
  follow at once.
- Where the draft's KV cache goes cold at tier 0, acceptance of the running requests suffers until they end:
  tier 0 must win by ``cold_draft_margin`` more and is never probed, and blind probes come a quarter as often,
  since cold requests tell little.

Source: the decision model of ``model.py``, by certainty equivalence; the knowledge gradient is that of
Frazier, Powell and Dayanik, "A knowledge-gradient policy for sequential information collection", SIAM J.
Control Optim. 2008.
Regimes: any batch, mix and hardware, with or without a profile; near the per-step optimum where a step's
choice has no later effect (warm draft KV, cheap switches), and blind to queues and latency targets.
Defaults: see ``Config``; margins are relative, intervals in steps; ``memory`` multiplies the time for which
the estimators' evidence counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.learnt import Learnt
from specgov.policies.rate_model import RateModel, Rates, with_probe
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, Reason, StepObservation

Floats = NDArray[np.float64]

_SUSPICIOUS = 0.3


@final
class Greedy(Learnt):
    """The tier with the largest expected output rate, by learnt acceptance and step times."""

    name: ClassVar[str] = "greedy"
    version: ClassVar[str] = "1"

    model: RateModel
    _current: NDArray[np.intp]
    _settled: int
    _choice: Choice
    _since_probe: int
    _blind_for: int

    @dataclass(frozen=True, slots=True)
    class Config:
        """Options, as in the module's docstring."""

        margin: float = 0.002
        doubt: float = 0.25
        largest_margin: float = 0.01
        horizon_steps: float = 200.0
        probe_every_steps: int = 6
        blind_cost: float = 0.0025
        blind_steps: int = 25
        largest_blind_steps: int = 200
        cold_draft_margin: float = 0.03
        memory: float = 1.0

        def __post_init__(self) -> None:
            if not 0 <= self.margin <= self.largest_margin < 1:
                raise PolicyError("margins must satisfy 0 <= margin <= largest_margin < 1")
            if not 1 <= self.blind_steps <= self.largest_blind_steps:
                raise PolicyError("blind steps must satisfy 1 <= blind_steps <= largest_blind_steps")
            if self.probe_every_steps < 1:
                raise PolicyError(f"probe_every_steps must be 1 or more, not {self.probe_every_steps}")
            if not self.blind_cost > 0:
                raise PolicyError(f"blind_cost must be above 0, not {self.blind_cost}")
            if not 0.01 <= self.memory <= 100:
                raise PolicyError(f"memory must lie in 0.01..100, not {self.memory}")
            for name in ("doubt", "horizon_steps", "cold_draft_margin"):
                if getattr(self, name) < 0:
                    raise PolicyError(f"{name} must be 0 or more, not {getattr(self, name)}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._config = config
        self._engine = context.engine
        self.model = RateModel(context, config.cold_draft_margin, config.memory)
        self._current = np.full(len(self.model.cost.batch_sizes), -1, dtype=np.intp)
        self._rows = np.arange(len(self._current))
        tiers = np.arange(len(self.model.tiers))
        self._others = [np.flatnonzero(self.model.is_probed & (tiers != current)) for current in tiers]
        self._settled = -1
        self._choice = Choice(())
        self._since_probe = self._blind_for = 0

    def observe(self, step: StepObservation) -> None:
        """Learn from a step."""
        if self.model.observe(step):
            self._restart_probes()
        self._blind_for = 0 if step.num_steps > 0 else self._blind_for + 1
        self._since_probe += 1

    def choose(self, batch: BatchView) -> Choice:
        """The best tier for every batch size, or one step of a probe for the batch's own."""
        rates = self.model.rates(batch)
        if self.model.version != self._settled:
            self._settled = self.model.version
            held = self._settle(rates)
            self._choice = self._say(rates, self._current, Reason.HOLD if held else Reason.POLICY)
        recheck = self.model.recheck()
        if recheck is not None and recheck != self._current[rates.grid]:
            return self._say(rates, with_probe(self._current, rates.grid, recheck), Reason.EXPLORATION)
        if self._since_probe >= self._config.probe_every_steps:
            self._since_probe = 0
            probe = self._probe(rates)
            if probe is not None:
                return self._say(rates, with_probe(self._current, rates.grid, probe), Reason.EXPLORATION)
        return self._choice

    def forget(self) -> None:
        """Drop what is known of acceptance; step times stay."""
        self.model.acceptance.forget()
        self._restart_probes()

    def estimates(self) -> dict[str, float]:
        """Acceptance of a typical request by position, spread between requests, noise, changes found."""
        return self.model.estimates()

    def _settle(self, rates: Rates) -> bool:
        """Move batch sizes to their best tier where that pays; True if the asked one stays with another."""
        config, grid = self._config, rates.grid
        best, rows = rates.log_rate.argmax(axis=1), self._rows
        if (best == self._current).all():
            return False
        new = self._current < 0
        gain = rates.log_rate[rows, best] - rates.log_rate[rows, self._current]
        moves = new | (gain > config.margin)
        if moves[grid] and not new[grid] and gain[grid] <= config.largest_margin:
            doubt = float(self.model.log_ratio_sd(rates)[self._current[grid], best[grid]])
            moves[grid] = gain[grid] > config.margin + config.doubt * doubt
        self._current = np.where(moves, best, self._current)
        return bool(self._current[grid] != best[grid])

    def _say(self, rates: Rates, choices: NDArray[np.intp], reason: Reason) -> Choice:
        return Choice(self.model.ranges(choices), reason, 1.0, rates.tokens, rates.ms[rates.grid])

    def _probe(self, rates: Rates) -> int | None:
        """Index of a tier worth one step, None where there is none."""
        current = int(self._current[rates.grid])
        others = self._others[current]
        if not len(others):
            return None
        log_rate = rates.log_rate[rates.grid]
        loss = np.maximum(log_rate[current] - log_rate[others], 0.0)
        spread = self.model.log_ratio_sd(rates)[current, others]
        gain = self._config.horizon_steps * self._knowledge_gradient(rates, spread, loss) - loss
        if gain.max() > 0:
            return int(others[np.argmax(gain)])
        if self.model.tiers[current] == 0 and self._is_blind(float(loss.min())):
            self._blind_for = 0
            return int(others[np.argmin(loss)])
        return None

    def _is_blind(self, loss: float) -> bool:
        """Whether tier 0 has been kept for so long that a probe that loses ``loss`` is due."""
        config = self._config
        if self.model.acceptance.suspicion > _SUSPICIOUS:
            return True
        wait = min(max(loss / config.blind_cost, config.blind_steps), config.largest_blind_steps)
        return self._blind_for >= wait * (1 if self._engine.draft_kv_stays_warm else 4)

    def _knowledge_gradient(self, rates: Rates, spread: Floats, loss: Floats) -> Floats:
        noise = self.model.cost.noise_sd**2 + 0.5 / rates.batch_size
        moved = np.maximum(spread**2 / np.sqrt(spread**2 + noise), 1e-9)
        return np.asarray(moved * _expected_excess(-loss / moved))

    def _restart_probes(self) -> None:
        self._since_probe = self._blind_for = 0


def _expected_excess(z: Floats) -> Floats:
    """``pdf(z) + z cdf(z)`` of the standard normal distribution."""
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(density + z * np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z.tolist()]))
