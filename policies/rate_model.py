"""Expected output rate by batch size and tier: the two estimators, as the learning rules use them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specgov.policies.acceptance import AcceptanceConfig, AcceptanceEstimator
from specgov.policies.cost import CostConfig, CostEstimator
from specgov.policies.learnt import Learnt
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, PolicyContext, StepObservation, TierRange

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """Estimates for one batch: its size, its row in the grid of batch sizes, and what each tier would bring.

    ``tokens`` (output tokens of the whole batch) has shape (tiers,), ``ms`` and ``log_rate`` (log of tokens
    per request and ms, less what the rule charges to a tier) have shape (grid, tiers). Other batch sizes than
    the batch's own are given its mean acceptance per request.
    """

    batch_size: int
    grid: int
    tokens: Floats
    ms: Floats
    log_rate: Floats


class RateModel(Learnt):
    """Learns acceptance and step times from steps; predicts output rates.

    Args: context: the engine and its profile. cold_draft_margin: what tier 0 is charged, in log rate, on
        engines whose draft KV cache goes cold there: acceptance of the running requests then suffers until
        they end. memory: how long evidence counts, as a multiple of the estimators' own memories.

    Attributes: tiers: of the engine, shape (tiers,). is_probed: which of them may be tried for the sake of
        learning: not tier 0 where one step there costs every running request acceptance. version: another
        one whenever ``rates`` returns other rates.

    """

    version: int
    acceptance: AcceptanceEstimator
    cost: CostEstimator
    _asked: tuple[int, int, int] | None
    _rates: Rates | None

    def __init__(self, context: PolicyContext, cold_draft_margin: float, memory: float = 1.0) -> None:
        self._engine = context.engine
        self.tiers = np.asarray(context.engine.tiers)
        acceptance, cost = AcceptanceConfig(), CostConfig()
        self.acceptance = AcceptanceEstimator(
            max(int(self.tiers[-1]), 1),
            replace(
                acceptance,
                request_memory_steps=acceptance.request_memory_steps * memory,
                anonymous_memory_steps=acceptance.anonymous_memory_steps * memory,
                server_memory_steps=acceptance.server_memory_steps * memory,
            ),
        )
        self.cost = CostEstimator(
            context.engine, context.step_time, replace(cost, memory_steps=cost.memory_steps * memory)
        )
        self.is_probed = (self.tiers > 0) | context.engine.draft_kv_stays_warm
        self._of_tiers = np.ix_(self.tiers, self.tiers)
        self._charge = np.where(
            (self.tiers == 0) & (not context.engine.draft_kv_stays_warm), cold_draft_margin, 0.0
        )
        self.version = 0
        self._asked = None
        self._rates = None
        self._log_ms_version = -1
        self._charged_log_ms: Floats
        self._choices = b""
        self._ranges: tuple[TierRange, ...] = ()
        self._starts = np.concatenate([[1], self.cost.batch_sizes[:-1] + 1]).tolist()

    def observe(self, step: StepObservation) -> bool:
        """Learn from a step; True if it revealed a change."""
        acceptance_changed = self.acceptance.observe(step)
        return self.cost.observe(step) or acceptance_changed

    def rates(self, batch: BatchView) -> Rates:
        """Expected rates, by posterior means; the same object until they or the batch size change."""
        size = max(batch.batch_size, 1)
        ms = self.cost.predict(batch.sum_seq_len_tokens / size)
        asked = (size, self.acceptance.version, self.cost.version)
        if self._rates is None or asked != self._asked:
            if self._log_ms_version != self.cost.version:
                self._charged_log_ms = np.log(ms) + self._charge
                self._log_ms_version = self.cost.version
            tokens = self.acceptance.tokens(size)[self.tiers]
            log_rate = np.log(tokens / size) - self._charged_log_ms
            self._asked = asked
            self._rates = Rates(size, self.cost.grid_index(size), tokens, ms, log_rate)
            self.version += 1
        return self._rates

    def sample_rates(
        self,
        batch: BatchView,
        rng: np.random.Generator,
        acceptance_temperature: float,
        cost_temperature: float,
    ) -> Rates:
        """Rates of one draw from the posteriors; a temperature scales its deviations from the mean."""
        size = max(batch.batch_size, 1)
        ms = self.cost.sample(batch.sum_seq_len_tokens / size, rng, cost_temperature)
        tokens = self.acceptance.sample_tokens(size, rng, acceptance_temperature)[self.tiers]
        log_rate = np.log(tokens / size) - np.log(ms) - self._charge
        return Rates(size, self.cost.grid_index(size), tokens, ms, log_rate)

    def log_ratio_sd(self, rates: Rates) -> Floats:
        """Standard deviation of the log ratio of two tiers' rates for the batch, shape (tiers, tiers)."""
        covariance = self.acceptance.covariance(rates.batch_size)[self._of_tiers]
        covariance /= rates.tokens[:, None] * rates.tokens
        covariance += self.cost.log_covariance(rates.grid)
        variance = covariance.diagonal()
        return np.asarray(np.sqrt(np.maximum(variance[:, None] + variance - 2 * covariance, 0.0)))

    def recheck(self) -> int | None:
        """Index of a tier that an alarm's trial wants to see in the coming step; None mostly."""
        tier = self.cost.recheck()
        return tier if tier is not None and self.is_probed[tier] else None

    def ranges(self, choices: NDArray[np.intp]) -> tuple[TierRange, ...]:
        """Ranges of batch sizes from a tier's index for each row of the grid."""
        key = choices.tobytes()
        if key != self._choices:
            self._choices = key
            starts = zip(self._starts, self.tiers[choices].tolist(), strict=True)
            self._ranges = tier_ranges(self._engine, starts)
        return self._ranges

    def estimates(self) -> dict[str, float]:
        """Acceptance of a typical request by position, spread between requests, noise, changes found."""
        values = {f"acceptance_{j + 1}": float(p) for j, p in enumerate(self.acceptance.server_acceptance)}
        values["request_sd_logit"] = self.acceptance.request_sd
        values["step_noise_sd"] = self.cost.noise_sd
        values["acceptance_changes"] = float(self.acceptance.changes)
        values["cost_changes"] = float(self.cost.changes)
        return values


def with_probe(choices: NDArray[np.intp], grid: int, probe: int) -> NDArray[np.intp]:
    """``choices`` (G,) with ``probe`` for the batch size ``grid`` and those around it that share its tier."""
    choices = choices.copy()
    other = np.flatnonzero(choices != choices[grid])
    first = int(other[other < grid].max(initial=-1)) + 1
    last = int(other[other > grid].min(initial=len(choices)))
    choices[first:last] = probe
    return choices
