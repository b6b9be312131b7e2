"""What is known of acceptance: per request and position, with its uncertainty, from censored observations.

Model. The conditional acceptance of draft ``j`` of request ``r`` (given that the drafts before it were
accepted) is a Beta variable around ``sigmoid(b_j + t_r)``: a server-wide logit ``b_j`` by position and a tilt
``t_r ~ N(0, request_sd^2)`` of the request.

- Censoring: a step at ``k`` draft steps that accepts ``a`` drafts shows positions ``1..min(a + 1, k)`` and
  nothing of the later ones.
- Per request: discounted successes ``s`` and trials ``n`` by position; discounted by step, also where nothing
  is seen. Its Beta posterior at position j is ``Beta(s + c m, n - s + c (1 - m))`` with ``c`` the
  concentration and ``m`` its prior mean, in which the tilt comes from the request's other positions only, so
  that no observation counts twice.
- Server: ``b`` is Gaussian, its prior correlated between positions, filtered with each step's residuals (one
  extended Kalman step in information form) under a random walk: what is not seen grows uncertain. New
  requests start from it.
- Empirical Bayes: ``request_sd^2`` follows the mean of ``t_r^2 + var(t_r)`` over live requests (the EM step
  of a random-effects model).

Engines that do not tell requests apart have one entry for the whole batch. Sources: Beta-binomial shrinkage
and the EM step, Gelman et al., "Bayesian Data Analysis", 3rd ed., chapters 5 and 13; the rest follows from
the decision model of ``model.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specgov.policies.change import ChangeConfig, ChangeDetector
from specgov.policies.types import StepObservation

Floats = NDArray[np.float64]

_ANONYMOUS_SLOT = 0
_LARGEST_LOGIT = 7.0
_NEWCOMER_NODES = np.sqrt(3.0) * np.array([-1.0, 0.0, 1.0])
_NEWCOMER_WEIGHTS = np.array([1.0, 4.0, 1.0]) / 6.0


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """Parameters of the estimator.

    ``prior_acceptance``: server mean before any step, all positions. ``level_sd``, ``position_sd``: its
    uncertainty in logits, common to all positions and from one position to the next. ``request_sd``: the
    first guess at the spread between requests, in logits. ``concentration``: how many trials the server's and
    the request's tilt are worth against a position's own. ``request_memory_steps``,
    ``anonymous_memory_steps``, ``server_memory_steps``: how long evidence counts. ``free_after_steps``: a
    request not seen for so long is forgotten. ``change``: the detector; ``kept_after_change``: share of the
    evidence that survives its alarm.
    """

    prior_acceptance: float = 0.7
    level_sd: float = 1.0
    position_sd: float = 0.3
    request_sd: float = 0.7
    concentration: float = 30.0
    request_memory_steps: float = 150.0
    anonymous_memory_steps: float = 40.0
    server_memory_steps: float = 2_000.0
    free_after_steps: int = 1_000
    change: ChangeConfig = field(default_factory=ChangeConfig)
    kept_after_change: float = 0.1


class AcceptanceEstimator:
    """Acceptance of the requests in the newest report, and expected tokens of a batch by num_steps.

    Args:
        num_positions: largest num_steps of the engine, at least 1.
        config: parameters.

    """

    def __init__(self, num_positions: int, config: AcceptanceConfig | None = None) -> None:
        self.config = config or AcceptanceConfig()
        self.num_positions = num_positions
        self._positions = np.arange(num_positions)
        self._prior_covariance = _prior_covariance(num_positions, self.config)
        self._detector = ChangeDetector(self.config.change)
        self._allocate(256)
        self.forget()

    def forget(self) -> None:
        """Return to the prior: nothing that was seen holds any more."""
        prior = self.config.prior_acceptance
        self._logits = np.full(self.num_positions, np.log(prior / (1 - prior)))
        self._covariance = self._prior_covariance.copy()
        self._request_variance = self.config.request_sd**2
        self._last_step[:] = -1
        self._step_id = -1
        self._live_requests = 0
        self._live = np.empty(0, dtype=np.intp)
        self._detector.restart()
        self._posterior: _Posterior | None = None

    @property
    def changes(self) -> int:
        """Changes found so far."""
        return self._detector.alarms

    @property
    def server_acceptance(self) -> Floats:
        """Acceptance by position of a typical request, shape (num_positions,)."""
        return _sigmoid(self._logits)

    @property
    def request_sd(self) -> float:
        """Spread between requests, in logits."""
        return float(np.sqrt(self._request_variance))

    def observe(self, step: StepObservation) -> bool:
        """Learn from a step; True if it revealed a change, after which memory is short."""
        slots, generations, anonymous = self._rows_of(step)
        self._age(slots, generations, step.step_id, anonymous)
        self._live, self._live_requests, self._step_id = slots, len(step.accepted), step.step_id
        self._posterior = None
        num_steps = min(step.num_steps, self.num_positions)
        if num_steps == 0 or len(step.accepted) == 0:
            return False
        accepted = np.minimum(step.accepted, num_steps)[:, None]
        successes = (self._positions < accepted).astype(np.float64)
        trials = (self._positions < np.minimum(accepted + 1, num_steps)).astype(np.float64)
        if anonymous:
            successes, trials = successes.sum(0, keepdims=True), trials.sum(0, keepdims=True)
        changed = self._detector.update(self._learn_server(slots, successes, trials))
        if changed:
            self._shorten_memory()
        self._successes[slots] += successes
        self._trials[slots] += trials
        self._posterior = self._infer()
        self._mean[slots] = self._posterior.mean
        self._tilt_variance[slots] = self._posterior.tilt_variance
        if not anonymous:
            self._learn_request_variance(self._posterior)
        return changed

    def request_acceptance(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each live request's acceptance, both (live, num_positions)."""
        posterior = self._current()
        server = np.diag(self._covariance) * posterior.server_gain**2
        tilt = posterior.tilt_gain**2 * posterior.tilt_variance[:, None]
        return posterior.mean, np.sqrt(posterior.own_variance + tilt + server)

    def tokens(self, batch_size: int) -> Floats:
        """Expected output tokens of a batch in one step at num_steps 0 and up, shape (num_positions + 1,).

        The live requests of the newest report are in the batch as far as it has room; what is more are
        newcomers, of whom only the server's mean is known.
        """
        known, newcomers = self._split(batch_size)
        tokens = np.zeros(self.num_positions + 1)
        if known:
            tokens += known * _accept_lengths(self._current().mean).mean(0)
        if newcomers:
            tokens += newcomers * self._newcomer_accept_length(self._logits)
        return tokens

    def covariance(self, batch_size: int) -> Floats:
        """Covariance of ``tokens(batch_size)``, shape (num_positions + 1, num_positions + 1)."""
        known, newcomers = self._split(batch_size)
        size = self.num_positions + 1
        server = np.zeros((size, self.num_positions))
        total = np.zeros((size, size))
        if known:
            posterior = self._current()
            gradient = _gradient(posterior.mean)
            scale = known / len(posterior.mean)
            server += scale * np.einsum("rkj,rj->kj", gradient, posterior.server_gain)
            own = gradient * np.sqrt(posterior.own_variance)[:, None, :]
            tilt = np.matmul(gradient, posterior.tilt_gain[:, :, None])[:, :, 0]
            tilt *= np.sqrt(posterior.tilt_variance)[:, None]
            own = own.transpose(1, 0, 2).reshape(size, -1)
            total += scale**2 * (own @ own.T + tilt.T @ tilt)
        if newcomers:
            mean = _sigmoid(self._logits)[None, :]
            slope = _gradient(mean)[0] * mean * (1 - mean)
            server += newcomers * slope
            tilt = slope.sum(1)
            total += newcomers * self._request_variance * np.outer(tilt, tilt)
        return total + server @ self._covariance @ server.T

    def sample_tokens(self, batch_size: int, rng: np.random.Generator, temperature: float = 1.0) -> Floats:
        """One draw from the posterior of ``tokens(batch_size)``; ``temperature`` scales its deviations."""
        covariance = self.covariance(batch_size)
        values, vectors = np.linalg.eigh(covariance)
        deviation = vectors @ (np.sqrt(np.maximum(values, 0.0)) * rng.standard_normal(len(values)))
        drawn = self.tokens(batch_size) + temperature * deviation
        increments = np.clip(np.diff(drawn), 0.0, batch_size)
        return np.concatenate([[batch_size], batch_size + np.cumsum(increments)])

    # -- rows: one a slot ------------------------------------------------------------------------

    def _allocate(self, slots: int) -> None:
        shape = (slots, self.num_positions)
        self._successes = np.zeros(shape)
        self._trials = np.zeros(shape)
        self._mean = np.zeros(shape)
        self._tilt_variance = np.zeros(slots)
        self._generation = np.zeros(slots, dtype=np.int64)
        self._last_step = np.full(slots, -1, dtype=np.int64)

    def _rows_of(self, step: StepObservation) -> tuple[NDArray[np.intp], NDArray[np.uint8], bool]:
        anonymous = len(step.slots) != len(step.accepted)
        if anonymous:
            return np.array([_ANONYMOUS_SLOT]), np.zeros(1, np.uint8), True
        slots = step.slots.astype(np.intp)
        largest = int(slots.max(initial=0))
        if largest >= len(self._last_step):
            self._grow(largest + 1)
        return slots, step.generations, False

    def _grow(self, slots: int) -> None:
        old = (
            self._successes,
            self._trials,
            self._mean,
            self._tilt_variance,
            self._generation,
            self._last_step,
        )
        self._allocate(max(slots, 2 * len(self._last_step)))
        new = (
            self._successes,
            self._trials,
            self._mean,
            self._tilt_variance,
            self._generation,
            self._last_step,
        )
        for source, target in zip(old, new, strict=True):
            target[: len(source)] = source

    def _age(
        self, slots: NDArray[np.intp], generations: NDArray[np.uint8], step_id: int, anonymous: bool
    ) -> None:
        """Discount the rows by the steps since they were last seen; empty those of new requests."""
        memory = self.config.anonymous_memory_steps if anonymous else self.config.request_memory_steps
        gap = step_id - self._last_step[slots]
        fresh = (self._last_step[slots] < 0) | (gap < 0) | (gap > self.config.free_after_steps)
        fresh |= self._generation[slots] != generations
        kept = np.where(fresh, 0.0, np.exp(-np.maximum(gap, 0) / memory))[:, None]
        self._successes[slots] *= kept
        self._trials[slots] *= kept
        self._generation[slots] = generations
        self._last_step[slots] = step_id
        new = slots[fresh]
        if len(new):
            self._mean[new] = _sigmoid(self._logits)
            self._tilt_variance[new] = self._request_variance
        elapsed = min(max(step_id - self._step_id, 0), 10_000) if self._step_id >= 0 else 0
        growth = min(elapsed / self.config.server_memory_steps, 1.0)
        self._covariance += growth * (self._prior_covariance - self._covariance)

    # -- learning --------------------------------------------------------------------------------

    def _learn_server(self, slots: NDArray[np.intp], successes: Floats, trials: Floats) -> float:
        """Filter the server's logits with a step's residuals; returns the step's standardised innovation."""
        mean = self._mean[slots]
        residual = successes - trials * mean
        variance = mean * (1 - mean)
        information = trials * variance
        tilt_variance = self._tilt_variance[slots][:, None]
        trust = 1.0 / (1.0 + variance * tilt_variance)
        total_residual = (residual * trust).sum(0)
        total_information = (information * trust).sum(0)
        by_request = information.sum(1)
        spread = by_request.sum() + (by_request**2 * tilt_variance[:, 0]).sum()
        sums = information.sum(0)
        spread += float(sums @ self._covariance @ sums)
        eye = np.eye(self.num_positions)
        self._covariance = np.linalg.solve(eye + self._covariance * total_information, self._covariance)
        self._covariance = (self._covariance + self._covariance.T) / 2
        self._logits = np.clip(
            self._logits + self._covariance @ total_residual, -_LARGEST_LOGIT, _LARGEST_LOGIT
        )
        return float(residual.sum() / np.sqrt(spread)) if spread > 0 else 0.0

    def _learn_request_variance(self, posterior: _Posterior) -> None:
        live = len(posterior.tilt)
        rate = live / (live + 20.0 * self.config.request_memory_steps)
        target = float(np.mean(posterior.tilt**2 + posterior.tilt_variance))
        self._request_variance += rate * (min(max(target, 0.02), 4.0) - self._request_variance)

    def _shorten_memory(self) -> None:
        kept = self.config.kept_after_change
        self._successes *= kept
        self._trials *= kept
        self._covariance = kept * self._covariance + (1 - kept) * self._prior_covariance

    # -- inference -------------------------------------------------------------------------------

    def _current(self) -> _Posterior:
        if self._posterior is None:
            self._posterior = self._infer()
            self._mean[self._live] = self._posterior.mean
            self._tilt_variance[self._live] = self._posterior.tilt_variance
        return self._posterior

    def _infer(self) -> _Posterior:
        """Posteriors of the live rows: two Newton steps for the tilts, then each position's Beta."""
        successes, trials = self._successes[self._live], self._trials[self._live]
        precision = 1.0 / self._request_variance
        tilt = np.zeros(len(successes))
        for _ in range(2):
            prior = _sigmoid(self._logits + tilt[:, None])
            residual = successes - trials * prior
            information = trials * prior * (1 - prior)
            total = information.sum(1) + precision
            tilt = tilt + np.clip((residual.sum(1) - tilt * precision) / total, -2.0, 2.0)
        others = total[:, None] - information
        prior = _sigmoid(self._logits + tilt[:, None] - residual / others)
        strength = self.config.concentration
        weight = strength / (trials + strength)
        mean = weight * prior + (1 - weight) * successes / np.maximum(trials, 1e-9)
        mean = np.clip(mean, 1e-4, 1 - 1e-4)
        gain = weight * prior * (1 - prior)
        return _Posterior(
            mean=mean,
            own_variance=mean * (1 - mean) / (trials + strength + 1),
            tilt=tilt,
            tilt_variance=1.0 / total,
            tilt_gain=gain,
            server_gain=gain * (precision / total)[:, None],
        )

    def _split(self, batch_size: int) -> tuple[int, int]:
        known = min(batch_size, self._live_requests)
        return known, batch_size - known

    def _newcomer_accept_length(self, logits: Floats) -> Floats:
        tilts = np.sqrt(self._request_variance) * _NEWCOMER_NODES
        return _NEWCOMER_WEIGHTS @ _accept_lengths(_sigmoid(logits + tilts[:, None]))


@dataclass(frozen=True, slots=True)
class _Posterior:
    """Posteriors of the live rows; gains are derivatives of the mean by a common logit shift."""

    mean: Floats
    own_variance: Floats
    tilt: Floats
    tilt_variance: Floats
    tilt_gain: Floats
    server_gain: Floats


def _prior_covariance(num_positions: int, config: AcceptanceConfig) -> Floats:
    """Common level, and a random walk from one position to the next."""
    index = np.arange(1, num_positions + 1)
    walk: Floats = np.minimum(index[:, None], index[None, :]) * config.position_sd**2
    return config.level_sd**2 + walk


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-x))


def _accept_lengths(acceptance: Floats) -> Floats:
    """As ``model.expected_accept_length``, for rows, in fewer temporaries."""
    lengths = np.ones((len(acceptance), acceptance.shape[1] + 1))
    np.cumsum(np.cumprod(acceptance, axis=1), axis=1, out=lengths[:, 1:])
    lengths[:, 1:] += 1.0
    return lengths


def _gradient(acceptance: Floats) -> Floats:
    """Derivative of each row's accept length at k by its acceptance at j, shape (rows, K + 1, K)."""
    lengths = _accept_lengths(acceptance)
    tail = lengths[:, :, None] - lengths[:, None, :-1]
    return np.maximum(tail, 0.0) / acceptance[:, None, :]
