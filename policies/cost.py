"""What a step costs: a profile, corrected online, with its uncertainty.

``T(b, k, c) = base(b, k) * exp(f(log2 b, k)) + attention(b, k, c) * exp(a)``: ``base`` is the profile's step
time without context and ``attention`` what context adds to it; without a profile both come from
``GenericStepTime``. The log-ratio ``f`` is a Gaussian process with a smooth prior over batch size and tier,
held on a grid (half octaves by tiers, linear between) together with ``a``, and filtered
recursively from the timed decode steps (extended Kalman filter; Särkkä, "Bayesian Filtering and Smoothing",
2013).

- Prior of ``f``: a common scale, a smooth curve over batch size, a random walk over ``log2(1 + k)`` from tier
  0 on whose weight is partly common to all batch sizes and partly local, and a little of each cell's own.
- Robust: an innovation counts with the weight of a Student-t error, and with no more than the one before
  it, since the host's hiccups last for some steps; so they move nothing, yet a lasting change does.
- Forgetting: covariance flows back to the prior's over ``memory_steps``; at once, for the most part, when the
  change detector (``change.py``, on standardised innovations) raises an alarm. The alarm is tried
  (``alarm_trial.py``): where it proves false, what was believed before it holds again.
- The noise of single steps is estimated along.
- Steps at one cell are pooled before the filter takes them in, until they would halve the cell's variance and
  for at most ``pooled_steps`` steps: one observation of their weighted mean innovation, which leaves the same
  estimates at a fraction of the time.

Predictions are made monotone in k, which moves the less certain of two estimates that disagree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specgov.policies.alarm_trial import AlarmTrial, Belief
from specgov.policies.change import ChangeConfig, ChangeDetector
from specgov.policies.cost_prior import NODES_PER_OCTAVE, GenericStepTime, batch_grid, prior_covariance
from specgov.policies.isotonic import isotonic
from specgov.policies.learnt import Learnt
from specgov.policies.types import EngineSpec, StepObservation, StepTime

Floats = NDArray[np.float64]

_FORGET_EVERY_STEPS = 16
_PREDICTION_RESOLUTION = 0.006
_JITTER = 1e-6
_CONTEXT_RESOLUTION = 0.05
_PROBE_CONTEXT_TOKENS = 1.0


@dataclass(frozen=True, slots=True)
class CostConfig:
    """Parameters of the estimator; standard deviations are of log step time.

    ``scale_sd``: common to all cells. ``batch_sd``: by batch size, smooth over ``batch_octaves``.
    ``depth_sd``: of the ratio of tier 1 to tier 0, growing with the root of ``log2(1 + k)``; half of its
    variance is common to all batch sizes. ``cell_sd``: each cell's own. ``attention_sd``: of the cost of
    context. ``profile_variance``: the share of these variances that holds where there is a profile, until it
    proves wrong; ``prior_evidence``: how many surprises that first guess is worth. ``noise_sd``: of single
    steps, a first guess; ``least_noise_sd`` bounds the estimate. ``student_df``: degrees of freedom of the
    error. ``pooled_steps``: most steps that are taken in at once. ``memory_steps``: how long evidence counts.
    ``kept_after_change``: share of the evidence that survives an alarm of ``change``.
    """

    scale_sd: float = 1.0
    batch_sd: float = 0.35
    batch_octaves: float = 2.0
    depth_sd: float = 0.4
    cell_sd: float = 0.02
    attention_sd: float = 0.7
    profile_variance: float = 0.25
    prior_evidence: float = 2.0
    noise_sd: float = 0.05
    least_noise_sd: float = 0.01
    student_df: float = 4.0
    pooled_steps: int = 8
    memory_steps: float = 50_000.0
    kept_after_change: float = 0.3
    change: ChangeConfig = field(default_factory=lambda: ChangeConfig(clip=2.0))


class CostEstimator(Learnt):
    """Step time by batch size and tier, learnt from timed steps.

    Args:
        engine: its tiers, graph batch sizes and largest batch give the grid.
        step_time: the profile, None for ``GenericStepTime``.
        config: parameters.

    Attributes: batch_sizes: the grid of batch sizes, ascending, shape (G,): the engine's graph sizes, and
        more where it has none or its batches can be larger. A batch size costs what the next larger one of
        them costs. version: another one whenever what ``predict`` returns is.

    """

    version: int
    _mean: Floats
    _covariance: Floats
    _noise: float
    _evidence: float
    _surprise: float
    _met_step: bool
    _since_forgetting: int
    _detector: ChangeDetector
    _pool: _Pool | None
    _trial: AlarmTrial | None
    _context: float
    _attention_ms: Floats
    _predicted_ms: Floats | None
    _moved: float
    _last_trust: float

    def __init__(
        self, engine: EngineSpec, step_time: StepTime | None = None, config: CostConfig | None = None
    ) -> None:
        self.config = config or CostConfig()
        self._has_profile = step_time is not None
        self._step_time: StepTime = step_time or GenericStepTime()
        self._graph_batch_sizes = engine.graph_batch_sizes
        self._tiers = np.asarray(engine.tiers)
        self._tier_index = {tier: index for index, tier in enumerate(engine.tiers)}
        self.batch_sizes = batch_grid(engine)
        self._sizes: list[int] = self.batch_sizes.tolist()
        octave = np.log2(self.batch_sizes) * NODES_PER_OCTAVE
        count = int(np.ceil(octave[-1])) + 1
        self._node = np.minimum(octave.astype(np.intp), max(count - 2, 0))
        self._share = octave - self._node
        self._nodes = max(count, 2)
        self._prior_covariance = prior_covariance(self._nodes, self._tiers, self.config)
        self._detector = ChangeDetector(self.config.change)
        self._free_ms = self._profile_ms(_PROBE_CONTEXT_TOKENS)
        self._attention_ms = np.zeros_like(self._free_ms)
        self._context = -1.0
        self._scratch = np.zeros_like(self._prior_covariance)
        self.version = 0
        self.forget()

    def forget(self) -> None:
        """Return to the profile."""
        size = len(self._prior_covariance)
        self._mean = np.zeros(size)
        self._noise = self.config.noise_sd**2
        self._since_forgetting = 0
        self._evidence = self.config.prior_evidence
        self._surprise = self._evidence * (self.config.profile_variance if self._has_profile else 1.0)
        self._covariance = self._scaled_prior()
        self._met_step = False
        self._detector.restart()
        self._predicted_ms = None
        self._moved = 0.0
        self._pool = None
        self._trial = None
        self._last_trust = 1.0

    @property
    def changes(self) -> int:
        """Changes found so far."""
        return self._detector.alarms

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the log of single steps' times."""
        return float(np.sqrt(self._noise))

    def recheck(self) -> int | None:
        """Index of the tier that an alarm's trial wants to see in the coming step; None mostly.

        To be asked once a decision.
        """
        return self._trial.tier if self._trial is not None and self._trial.asks() else None

    def grid_index(self, batch_size: int) -> int:
        """Index in ``batch_sizes`` of what ``batch_size`` is padded to; the last for anything larger."""
        return min(bisect_left(self._sizes, batch_size), len(self._sizes) - 1)

    def observe(self, step: StepObservation) -> bool:
        """Learn from a timed step; True if it revealed a change, or that one before it was none.

        Steps without a valid time are left out.
        """
        if self._trial is not None and not self._trial.pass_step():
            self._trial = None
        tier = self._tier_index.get(step.num_steps)
        if tier is None or step.step_ms is None or not 0 < step.step_ms < np.inf or step.batch_size < 1:
            return False
        if step.cuda_graph_ran is False and step.batch_size <= max(self._graph_batch_sizes, default=0):
            return False
        self._forget_a_little()
        self._refresh(step.sum_seq_len_tokens / step.batch_size)
        grid = self.grid_index(max(step.batch_size, step.padded_batch_size))
        return self._add(grid, tier, math.log(step.step_ms))

    def predict(self, mean_context_tokens: float) -> Floats:
        """Expected step time in ms by grid batch size and tier, shape (G, number of tiers).

        Made again once the estimates have moved by ``_PREDICTION_RESOLUTION``; not to be written to.
        """
        self._refresh(mean_context_tokens)
        if self._predicted_ms is None or self._moved > _PREDICTION_RESOLUTION:
            self._predicted_ms = self._monotone(self._ms(self._mean))
            self._moved = 0.0
            self.version += 1
        return self._predicted_ms

    def log_covariance(self, grid_index: int) -> Floats:
        """Covariance of the log step time between tiers at a grid batch size, shape (tiers, tiers)."""
        tiers, share = len(self._tiers), float(self._share[grid_index])
        low = int(self._node[grid_index]) * tiers
        middle, high = low + tiers, low + 2 * tiers
        part, cov = self._free_part(grid_index), self._covariance
        near = (1 - share) ** 2 * cov[low:middle, low:middle] + share**2 * cov[middle:high, middle:high]
        across = share * (1 - share) * cov[low:middle, middle:high]
        context = part * ((1 - share) * cov[low:middle, -1] + share * cov[middle:high, -1])
        mixed = context[:, None] * (1 - part)
        return np.asarray(
            (part[:, None] * part) * (near + across + across.T)
            + (mixed + mixed.T)
            + (cov[-1, -1] * (1 - part))[:, None] * (1 - part)
        )

    def sample(
        self, mean_context_tokens: float, rng: np.random.Generator, temperature: float = 1.0
    ) -> Floats:
        """One draw from the posterior of ``predict``; ``temperature`` scales its deviations."""
        self._refresh(mean_context_tokens)
        root = np.linalg.cholesky(self._covariance + _JITTER * np.eye(len(self._mean)))
        deviation = root @ rng.standard_normal(len(self._mean))
        return self._monotone(self._ms(self._mean + temperature * deviation))

    # -- learning --------------------------------------------------------------------------------

    def _add(self, grid: int, tier: int, log_ms: float) -> bool:
        """Judge one step by its prediction and pool it; True if it revealed a change."""
        pool = self._pool
        if pool is None or pool.cell != (grid, tier):
            self._take_in()
            pool = self._pool = self._new_pool(grid, tier)
        innovation = log_ms - pool.predicted
        total = pool.variance + self._noise
        own_trust = min(1.0, (self.config.student_df + 1) / (self.config.student_df + innovation**2 / total))
        trust, self._last_trust = min(own_trust, self._last_trust), own_trust
        pool.steps, pool.trust, pool.pull = pool.steps + 1, pool.trust + trust, pool.pull + trust * innovation
        if self._is_acquitted(grid, tier, log_ms):
            return True
        changed = self._detector.update(innovation / math.sqrt(total))
        if changed and self._trial is None:
            self._trial = AlarmTrial(tier, self._belief())
        if changed or pool.trust * pool.variance >= self._noise or pool.steps >= self.config.pooled_steps:
            self._take_in()
        self._judge_profile(min(innovation**2 / total, 9.0), max(pool.variance - self._noise, 0.0) / total)
        self._learn_noise(min(innovation**2, 9 * total), pool.variance)
        if changed:
            kept = self.config.kept_after_change
            self._covariance = kept * self._covariance + (1 - kept) * self._scaled_prior()
            self._predicted_ms = None
            self._last_trust = 1.0
        return changed

    def _is_acquitted(self, grid: int, tier: int, log_ms: float) -> bool:
        """Whether the step shows that the alarm on trial was no change; then what was believed is again."""
        trial = self._trial
        if trial is None or not trial.hears(tier):
            return False
        now, before = self._log_ms_of(self._mean, grid, tier), self._log_ms_of(trial.before.mean, grid, tier)
        if not trial.hear(speaks_for_before=abs(log_ms - before) < abs(log_ms - now)):
            return False
        was = trial.before
        self._mean, self._covariance = was.mean, was.covariance
        self._noise, self._evidence, self._surprise = was.noise, was.evidence, was.surprise
        self._trial = self._pool = self._predicted_ms = None
        self._detector.restart()
        return True

    def _belief(self) -> Belief:
        return Belief(self._mean.copy(), self._covariance.copy(), self._noise, self._evidence, self._surprise)

    def _take_in(self) -> None:
        """One Kalman step with the pooled steps' mean innovation, as sure as they are together."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        total = pool.variance + self._noise / pool.trust
        gain, innovation = pool.spread / total, pool.pull / pool.trust
        self._mean += gain * innovation
        self._covariance -= np.multiply(gain[:, None], pool.spread, out=self._scratch)
        self._moved += abs(innovation) * pool.variance / total

    def _new_pool(self, grid: int, tier: int) -> _Pool:
        """An empty pool: the cell's predicted log time, linear in the states that it depends on."""
        log_ms = self._log_ms_of(self._mean, grid, tier)
        node, share, tiers = int(self._node[grid]), float(self._share[grid]), len(self._tiers)
        context_ms = float(self._attention_ms[grid, tier]) * math.exp(float(self._mean[-1]))
        part = 1 - context_ms / math.exp(log_ms)
        states = [node * tiers + tier, (node + 1) * tiers + tier, len(self._mean) - 1]
        weights = np.array([part * (1 - share), part * share, 1 - part])
        spread = weights @ self._covariance[states]
        return _Pool((grid, tier), log_ms, spread, float(weights @ spread[states]))

    def _log_ms_of(self, mean: Floats, grid: int, tier: int) -> float:
        """The cell's log time if the state were ``mean``."""
        node, share, tiers = int(self._node[grid]), float(self._share[grid]), len(self._tiers)
        low, high = float(mean[node * tiers + tier]), float(mean[(node + 1) * tiers + tier])
        free = float(self._free_ms[grid, tier]) * math.exp((1 - share) * low + share * high)
        return math.log(free + float(self._attention_ms[grid, tier]) * math.exp(float(mean[-1])))

    def _learn_noise(self, squared: float, variance: float) -> None:
        """Move the noise towards a squared innovation, where that is noise more than ignorance."""
        if variance < self._noise:
            self._noise += 0.02 * (squared - variance - self._noise)
        self._noise = max(self._noise, self.config.least_noise_sd**2)

    def _judge_profile(self, surprise: float, weight: float) -> None:
        """Scale the prior's covariance by how far off the profile has proved (inverse-gamma posterior).

        Only cells that are not yet known tell; the very first tells of the machine's speed alone.
        """
        if self._met_step and weight > 0:
            before = self._surprise / self._evidence
            self._surprise += weight * surprise
            self._evidence += weight
            ratio = self._surprise / self._evidence / before
            self._covariance *= ratio
            if self._pool is not None:
                self._pool.spread *= ratio
                self._pool.variance *= ratio
        self._met_step = True

    def _forget_a_little(self) -> None:
        self._since_forgetting += 1
        if self._since_forgetting == _FORGET_EVERY_STEPS:
            self._take_in()
            self._since_forgetting = 0
            share = min(_FORGET_EVERY_STEPS / self.config.memory_steps, 1.0)
            self._covariance += share * (self._scaled_prior() - self._covariance)

    def _scaled_prior(self) -> Floats:
        return self._prior_covariance * (self._surprise / self._evidence)

    # -- predicting ------------------------------------------------------------------------------

    def _refresh(self, mean_context_tokens: float) -> None:
        """The context's share of the profile, made again when the mean context has moved by a twentieth."""
        if abs(mean_context_tokens - self._context) <= _CONTEXT_RESOLUTION * self._context:
            return
        self._take_in()
        self._context = max(mean_context_tokens, 0.0)
        self._attention_ms = np.maximum(self._profile_ms(self._context) - self._free_ms, 0.0)
        self._predicted_ms = None

    def _profile_ms(self, mean_context_tokens: float) -> Floats:
        batch = self.batch_sizes[:, None]
        return np.asarray(
            self._step_time.step_ms(batch, self._tiers[None, :], np.float64(mean_context_tokens) * batch)
        )

    def _ms(self, state: Floats) -> Floats:
        correction = state[:-1].reshape(self._nodes, len(self._tiers))
        share = self._share[:, None]
        log_ratio = (1 - share) * correction[self._node] + share * correction[self._node + 1]
        return np.asarray(self._free_ms * np.exp(log_ratio) + self._attention_ms * np.exp(state[-1]))

    def _monotone(self, ms: Floats) -> Floats:
        for grid in np.nonzero((ms[:, 1:] < ms[:, :-1]).any(axis=1))[0].tolist():
            variance = np.maximum(self.log_covariance(grid).diagonal(), 1e-12)
            ms[grid] = isotonic(ms[grid], 1.0 / variance)
        return ms

    def _free_part(self, grid: int) -> Floats:
        """Share of the step time, by tier, that does not depend on context."""
        node, share = int(self._node[grid]), float(self._share[grid])
        correction = self._mean[:-1].reshape(self._nodes, len(self._tiers))
        free = self._free_ms[grid] * np.exp((1 - share) * correction[node] + share * correction[node + 1])
        return np.asarray(free / (free + self._attention_ms[grid] * np.exp(self._mean[-1])))


@dataclass(slots=True)
class _Pool:
    """Steps at one cell that the filter has not taken in: their weights and weighted innovations, summed."""

    cell: tuple[int, int]
    predicted: float
    spread: Floats
    variance: float
    steps: int = 0
    trust: float = 0.0
    pull: float = 0.0
