"""What is known of acceptance: per request and position, with its uncertainty, from censored observations.

Model. The conditional acceptance of draft ``j`` of request ``r`` (given that the drafts before it were
accepted) is a Beta variable around ``sigmoid(b_j + t_r)``: a server-wide logit ``b_j`` by position and a tilt
``t_r ~ N(0, request_sd^2)`` of the request.

- Censoring: a step at ``k`` draft steps that accepts ``a`` drafts shows positions ``1..min(a + 1, k)`` and
  nothing of the later ones.
- Per request: discounted successes ``s`` and trials ``n`` by position; discounted by step, also where nothing
  is seen. Given the tilt, the posterior at position j is ``Beta(s + c m, n - s + c (1 - m))`` with ``c`` the
  concentration and ``m = sigmoid(b_j + t_r)``. The tilt is inferred from all positions with the Beta
  integrated out: ``n`` trials tell of it as ``n c / (n + c)`` independent ones would.
- Server: ``b`` is Gaussian, its prior correlated between positions, filtered with the residuals (extended
  Kalman steps in information form) under a random walk: what is not seen grows uncertain. New requests start
  from it.
- Empirical Bayes: ``request_sd^2`` follows the mean of ``t_r^2 + var(t_r)`` over live requests (the EM step
  of a random-effects model).
- Each step is counted; inference, which takes longer, comes every ``infer_every_steps`` steps, sooner at the
  start.

Engines that do not tell requests apart have one entry for the whole batch. Sources: Beta-binomial shrinkage
and the EM step, Gelman et al., "Bayesian Data Analysis", 3rd ed., chapters 5 and 13; the mean of a sigmoid,
MacKay, "The evidence framework applied to classification networks", Neural Computation 1992; the rest
follows from the decision model of ``model.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specgov.policies.acceptance_math import (
    accept_length,
    accept_length_gradient,
    censored_counts,
    mean_sigmoid,
    sigmoid,
)
from specgov.policies.change import ChangeConfig, ChangeDetector
from specgov.policies.learnt import Learnt
from specgov.policies.request_rows import RequestRows
from specgov.policies.types import StepObservation

Floats = NDArray[np.float64]

_sum = np.add.reduce
_ONE_SLOT, _ONE_GENERATION = np.zeros(1, np.uint16), np.zeros(1, np.uint8)
_STEPS_KNOWN_PER_NEW = 8
_FEW_OF = 16
"""Fewer new requests than this part of the batch change the estimates from the next inference on."""
_LARGEST_LOGIT = 7.0
_LARGEST_TILT_STEP = 2.0
_LEAST_ACCEPTANCE = 1e-4
_NEWCOMER_NODES = np.sqrt(3.0) * np.array([-1.0, 0.0, 1.0])
_NEWCOMER_WEIGHTS = np.array([1.0, 4.0, 1.0]) / 6.0


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Parameters of the estimator.

    ``prior_acceptance``: server mean before any step, all positions. ``level_sd``, ``position_sd``: its
    uncertainty in logits, common to all positions and from one position to the next. ``request_sd``: the
    first guess at the spread between requests, in logits. ``concentration``: how many trials the server's and
    the request's tilt are worth against a position's own. ``request_memory_steps``,
    ``anonymous_memory_steps``, ``server_memory_steps``: how long evidence counts. ``infer_every_steps``:
    steps that are counted before they are taken in. ``free_after_steps``: a request not seen for so long is
    forgotten. ``change``: the detector, which hears of inferences, not steps; ``kept_after_change``: share of
    the evidence that survives its alarm.
    """

    prior_acceptance: float = 0.7
    level_sd: float = 1.0
    position_sd: float = 0.3
    request_sd: float = 0.7
    concentration: float = 30.0
    request_memory_steps: float = 150.0
    anonymous_memory_steps: float = 40.0
    server_memory_steps: float = 2_000.0
    infer_every_steps: int = 4
    free_after_steps: int = 1_000
    change: ChangeConfig = field(default_factory=lambda: ChangeConfig(12_500, drift=1.0, clip=6.0))
    kept_after_change: float = 0.1


class AcceptanceEstimator(Learnt):
    """Acceptance of the requests in the newest report, and expected tokens of a batch by num_steps.

    Args:
        num_positions: largest num_steps of the engine, at least 1.
        config: parameters.

    Attributes: version: another one whenever what is known or a fair part of the requests has changed.

    """

    version: int
    _logits: Floats
    _covariance: Floats
    _request_variance: float
    _requests: RequestRows
    _detector: ChangeDetector
    _step_id: int
    _steps_known: int
    _steps_new: int
    _live_requests: int
    _rows_known: int
    _anonymous: bool
    _has_new: bool
    _was_blind: bool

    def __init__(self, num_positions: int, config: AcceptanceConfig | None = None) -> None:
        self.config = config or AcceptanceConfig()
        self.num_positions = num_positions
        self.version = 0
        self._identity = np.eye(num_positions)
        self._counts = [censored_counts(num_positions, num_steps) for num_steps in range(num_positions + 1)]
        self._prior_covariance = _prior_covariance(num_positions, self.config)
        self._detector = ChangeDetector(self.config.change)
        self._allocate()
        self.forget()

    def _allocate(self) -> None:
        """A request's numbers: successes, trials, mean; tilt, its variance; what is not yet taken in."""
        count = self.num_positions
        self._s, self._n, self._m = (slice(i * count, (i + 1) * count) for i in range(3))
        self._evidence, self._new = slice(0, 2 * count), slice(3 * count + 2, 5 * count + 2)
        self._tilt, self._tilt_variance = 3 * count, 3 * count + 1
        self._requests = RequestRows(5 * count + 2, self.config.free_after_steps)

    def forget(self) -> None:
        """Return to the prior: nothing that was seen holds any more."""
        prior = self.config.prior_acceptance
        self._logits = np.full(self.num_positions, np.log(prior / (1 - prior)))
        self._covariance = self._prior_covariance.copy()
        self._request_variance = self.config.request_sd**2
        self._requests.clear()
        self._step_id, self._steps_known, self._steps_new = -1, 0, 0
        self._live_requests, self._anonymous, self._rows_known = 0, False, 0
        self._has_new, self._was_blind = False, True
        self._detector.restart()
        self.version += 1

    @property
    def changes(self) -> int:
        """Changes found so far."""
        return self._detector.alarms

    @property
    def suspicion(self) -> float:
        """How near the change detector is to an alarm, 0 to 1."""
        return self._detector.suspicion

    @property
    def server_acceptance(self) -> Floats:
        """Acceptance by position of a typical request, shape (num_positions,)."""
        return sigmoid(self._logits)

    @property
    def request_sd(self) -> float:
        """Spread between requests, in logits."""
        return float(np.sqrt(self._request_variance))

    def observe(self, step: StepObservation) -> bool:
        """Count a step; True if an inference revealed a change, after which memory is short."""
        self._anonymous = len(step.slots) != len(step.accepted)
        self._live_requests = len(step.accepted)
        self._follow(step)
        num_steps = min(step.num_steps, self.num_positions)
        if num_steps > 0 and self._live_requests:
            counts = self._counts[num_steps].take(step.accepted, axis=1, mode="clip")
            self._requests.values[self._new] += counts.sum(1, keepdims=True) if self._anonymous else counts
            self._has_new = True
        self._steps_new += 1
        return self._steps_new >= self._patience_steps() and self._infer(step.step_id)

    def request_acceptance(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each live request's acceptance, both (live, num_positions)."""
        rows = self._requests.values
        own, slope, taken = self._deviations()
        pulled = self._covariance @ taken
        server = np.diag(self._covariance)[:, None] - 2 * pulled + _sum(taken * pulled, 0)
        variance = own**2 + slope**2 * (rows[self._tilt_variance] + np.maximum(server, 0.0))
        return rows[self._m].T, np.sqrt(variance).T

    def tokens(self, batch_size: int) -> Floats:
        """Expected output tokens of a batch in one step at num_steps 0 and up, shape (num_positions + 1,).

        The live requests of the newest report are in the batch as far as it has room; what is more are
        newcomers, of whom only the server's mean is known.
        """
        known, newcomers = self._split(batch_size)
        tokens = np.zeros(self.num_positions + 1)
        if known:
            survival = self._survival()
            tokens += known * accept_length(_sum(survival, 1) / survival.shape[1])
        if newcomers:
            logits = self._logits[:, None] + self.request_sd * _NEWCOMER_NODES
            by_tilt = np.multiply.accumulate(sigmoid(logits), 0)
            tokens += newcomers * accept_length(by_tilt @ _NEWCOMER_WEIGHTS)
        return tokens

    def covariance(self, batch_size: int) -> Floats:
        """Covariance of ``tokens(batch_size)``, shape (num_positions + 1, num_positions + 1)."""
        known, newcomers = self._split(batch_size)
        size = self.num_positions + 1
        server, total = np.zeros((size, self.num_positions)), np.zeros((size, size))
        if known:
            rows, (own, slope, taken) = self._requests.values, self._deviations()
            gradient = accept_length_gradient(rows[self._m])
            scale = known / own.shape[1]
            by_position = (gradient * own).reshape(size, -1)
            by_shift = gradient * slope
            by_request = _sum(by_shift, 1)
            server += scale * (_sum(by_shift, 2) - by_request @ taken.T)
            by_request *= np.sqrt(rows[self._tilt_variance])
            total += scale**2 * (by_position @ by_position.T + by_request @ by_request.T)
        if newcomers:
            mean = sigmoid(self._logits)
            slope = accept_length_gradient(mean[:, None])[:, :, 0] * mean * (1 - mean)
            server += newcomers * slope
            shift = _sum(slope, 1)
            total += newcomers * self._request_variance * np.outer(shift, shift)
        return total + server @ self._covariance @ server.T

    def sample_tokens(self, batch_size: int, rng: np.random.Generator, temperature: float = 1.0) -> Floats:
        """One draw from the posterior of ``tokens(batch_size)``; ``temperature`` scales its deviations."""
        covariance = self.covariance(batch_size)
        values, vectors = np.linalg.eigh(covariance)
        deviation = vectors @ (np.sqrt(np.maximum(values, 0.0)) * rng.standard_normal(len(values)))
        drawn = self.tokens(batch_size) + temperature * deviation
        increments = np.clip(np.diff(drawn), 0.0, batch_size)
        return np.concatenate([[batch_size], batch_size + np.cumsum(increments)])

    # -- learning --------------------------------------------------------------------------------

    def _patience_steps(self) -> int:
        """Steps to count before inferring: few while little is known, one after a blind stretch."""
        if self._has_new and self._was_blind:
            return 1
        return min(1 + self._steps_known // _STEPS_KNOWN_PER_NEW, self.config.infer_every_steps)

    @property
    def _memory_steps(self) -> float:
        return self.config.anonymous_memory_steps if self._anonymous else self.config.request_memory_steps

    def _follow(self, step: StepObservation) -> None:
        """Bring the rows into the report's order; new requests are as the server's mean has them."""
        names = (_ONE_SLOT, _ONE_GENERATION) if self._anonymous else (step.slots, step.generations)
        changes = self._requests.follow(*names, step.step_id)
        if changes is None:
            return
        before, rows = self._rows_known, self._requests.values
        self._rows_known = rows.shape[1]
        if len(changes.new):
            rows[self._m, changes.new] = mean_sigmoid(self._logits, self._request_variance)[:, None]
            rows[self._tilt_variance, changes.new] = self._request_variance
        if len(changes.back):
            rows[self._evidence, changes.back] *= np.exp(-changes.away_steps / self._memory_steps)
        joined = len(changes.new) + len(changes.back)
        if self._rows_known != before or joined * _FEW_OF >= self._rows_known:
            self.version += 1

    def _infer(self, step_id: int) -> bool:
        """Take in what was counted since the last time; True if it revealed a change."""
        elapsed = max(step_id - self._step_id, 0) if self._step_id >= 0 else 0
        steps, self._steps_new = self._steps_new, 0
        self._steps_known += steps
        self._step_id = step_id
        growth = min(elapsed / self.config.server_memory_steps, 1.0)
        self._covariance += growth * (self._prior_covariance - self._covariance)
        rows, changed = self._requests.values, False
        rows[self._evidence] *= math.exp(-elapsed / self._memory_steps)
        learns = self._has_new and rows.shape[1] > 0
        if learns:
            new = rows[self._new]
            surprise = self._learn_server(rows, new[: self.num_positions], new[self.num_positions :])
            changed = self._detector.update(surprise)
            if changed:
                self._shorten_memory()
            rows[self._evidence] += new
            new[:] = 0.0
        if rows.shape[1]:
            self._infer_requests(rows)
        if learns and not self._anonymous:
            self._learn_request_variance(rows, steps)
        self._has_new, self._was_blind = False, not self._has_new
        self.version += 1
        return changed

    def _learn_server(self, rows: Floats, successes: Floats, trials: Floats) -> float:
        """Filter the server's logits with the new residuals; returns their standardised innovation.

        A request's mean depends on the server's logits by ``weight variance``, less what its tilt gives way
        when they move (``taken``). Its residuals vary by chance, by each position's Beta, and together by its
        tilt: the inverse of their covariance is a diagonal less one product (Sherman and Morrison).
        """
        mean, known, tilt_variance = rows[self._m], rows[self._n], rows[self._tilt_variance]
        total = known + self.config.concentration
        weight, variance = self.config.concentration / total, mean * (1 - mean)
        slope = trials * variance
        residual = successes - trials * mean
        excess = (total + trials) / (total + 1.0)
        spread = slope * excess
        trust = weight / excess
        slope *= weight
        told, score = slope * trust, residual * trust
        taken = known * weight * variance * tilt_variance
        told_by_request, score_by_request = _sum(told, 0), _sum(score, 0)
        free = 1.0 / (1.0 + tilt_variance * told_by_request)
        tied = tilt_variance * free
        cross = told @ (taken * free).T
        precision = (taken * (told_by_request * free)) @ taken.T - (told * tied) @ told.T - cross - cross.T
        precision.ravel()[:: len(precision) + 1] += _sum(told, 1)
        slope_by_request = _sum(slope, 0)
        shift = _sum(slope, 1) - taken @ slope_by_request
        expected = _sum(spread, None) + slope_by_request**2 @ tilt_variance + shift @ self._covariance @ shift
        gain = np.linalg.solve(self._identity + self._covariance @ precision, self._covariance)
        self._covariance = (gain + gain.T) / 2
        pull = _sum(score, 1) - told @ (tied * score_by_request) - taken @ (free * score_by_request)
        logits = self._logits + self._covariance @ pull
        self._logits = np.minimum(np.maximum(logits, -_LARGEST_LOGIT), _LARGEST_LOGIT)
        return float(_sum(residual, None)) / math.sqrt(expected) if expected > 0 else 0.0

    def _learn_request_variance(self, rows: Floats, steps: int) -> None:
        live = rows.shape[1]
        rate = live * steps / (live * steps + 20.0 * self.config.request_memory_steps)
        target = float((rows[self._tilt] ** 2 + rows[self._tilt_variance]).sum()) / live
        self._request_variance += rate * (min(max(target, 0.02), 4.0) - self._request_variance)

    def _shorten_memory(self) -> None:
        kept = self.config.kept_after_change
        self._requests.scale(self._evidence, kept)
        self._covariance = kept * self._covariance + (1 - kept) * self._prior_covariance
        self._steps_known = 0

    def _infer_requests(self, rows: Floats) -> None:
        """Posteriors of rows, which take them in: a Newton step for the tilts, then each position's Beta."""
        successes, trials, tilt = rows[self._s], rows[self._n], rows[self._tilt]
        logits, precision = self._logits[:, None], 1.0 / self._request_variance
        strength = self.config.concentration
        total = trials + strength
        weight = strength / total
        told = trials * weight
        prior = sigmoid(logits + tilt)
        information = _sum(told * prior * (1 - prior), 0) + precision
        step = (_sum(weight * successes - told * prior, 0) - tilt * precision) / information
        tilt = tilt + np.minimum(np.maximum(step, -_LARGEST_TILT_STEP), _LARGEST_TILT_STEP)
        prior = sigmoid(logits + tilt)
        variance = 1.0 / (_sum(told * prior * (1 - prior), 0) + precision)
        prior = mean_sigmoid(logits + tilt, variance)
        mean = (successes + strength * prior) / total
        rows[self._m] = np.minimum(np.maximum(mean, _LEAST_ACCEPTANCE), 1 - _LEAST_ACCEPTANCE)
        rows[self._tilt], rows[self._tilt_variance] = tilt, variance

    def _deviations(self) -> tuple[Floats, Floats, Floats]:
        """How each live acceptance may deviate, all (num_positions, live).

        Its standard deviation given the tilt; its derivative by the logit of ``m``; how far its request's
        tilt gives way, the other way, when the server's logit moves.
        """
        rows, strength = self._requests.values, self.config.concentration
        mean, trials = rows[self._m], rows[self._n]
        total = trials + strength
        variance = mean * (1 - mean)
        prior = (mean * total - rows[self._s]) / strength
        slope = np.maximum(strength / total * prior * (1 - prior), 0.0)
        return (
            np.sqrt(variance / (total + 1)),
            slope,
            trials * strength / total * variance * rows[self._tilt_variance],
        )

    def _survival(self) -> Floats:
        """Probability that each draft of each live request is accepted, (num_positions, live).

        An uncertain tilt moves all positions together, so that the mean of their product is larger than the
        product of their means: by its second-order term.
        """
        rows, strength = self._requests.values, self.config.concentration
        mean = rows[self._m]
        survival = np.multiply.accumulate(mean, 0)
        moves = (1 - mean) * (strength / (rows[self._n] + strength))
        pairs = np.add.accumulate(moves, 0) ** 2 - np.add.accumulate(moves**2, 0)
        survival *= 1.0 + (0.5 * rows[self._tilt_variance]) * pairs
        return np.minimum.accumulate(survival, 0)

    def _split(self, batch_size: int) -> tuple[int, int]:
        known = min(batch_size, self._live_requests)
        return known, batch_size - known


def _prior_covariance(num_positions: int, config: AcceptanceConfig) -> Floats:
    """Common level, and a random walk from one position to the next."""
    index = np.arange(1.0, num_positions + 1)
    walk: Floats = np.minimum(index[:, None], index[None, :]) * config.position_sd**2
    return config.level_sd**2 + walk
