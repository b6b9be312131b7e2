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
    change: ChangeConfig = field(default_factory=lambda: ChangeConfig(clip=6.0))
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
        self._identity = np.eye(num_positions)
        self._upto = np.tri(num_positions + 1, num_positions, -1).T.copy()
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
        self._posterior = self._infer(np.zeros((len(self._table), 0)))
        self._detector.restart()

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
        return _sigmoid(self._logits)

    @property
    def request_sd(self) -> float:
        """Spread between requests, in logits."""
        return float(np.sqrt(self._request_variance))

    def observe(self, step: StepObservation) -> bool:
        """Learn from a step; True if it revealed a change, after which memory is short."""
        slots, generations, anonymous = self._slots_of(step)
        rows = self._aged_rows(slots, generations, step.step_id, anonymous)
        self._live_requests, self._step_id = len(step.accepted), step.step_id
        num_steps = min(step.num_steps, self.num_positions)
        seen, changed = num_steps > 0 and len(step.accepted) > 0, False
        if seen:
            successes, trials = self._censored(step.accepted, num_steps, pooled=anonymous)
            changed = self._detector.update(self._learn_server(rows, successes, trials))
            if changed:
                self._shorten_memory(rows)
            rows[self._s] += successes
            rows[self._n] += trials
        self._posterior = self._infer(rows)
        self._table[:, slots] = rows
        if seen and not anonymous:
            self._learn_request_variance(self._posterior)
        return changed

    def request_acceptance(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each live request's acceptance, both (live, num_positions)."""
        own, slope = self._deviations()
        taken = self._posterior.taken
        pulled = self._covariance @ taken
        server = np.diag(self._covariance)[:, None] - 2 * pulled + (taken * pulled).sum(0)
        variance = own**2 + slope**2 * (self._posterior.tilt_variance + np.maximum(server, 0.0))
        return self._posterior.mean.T, np.sqrt(variance).T

    def tokens(self, batch_size: int) -> Floats:
        """Expected output tokens of a batch in one step at num_steps 0 and up, shape (num_positions + 1,).

        The live requests of the newest report are in the batch as far as it has room; what is more are
        newcomers, of whom only the server's mean is known.
        """
        known, newcomers = self._split(batch_size)
        tokens = np.zeros(self.num_positions + 1)
        if known:
            tokens += known * _accept_lengths(self._posterior.mean).mean(1)
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
            own, slope = self._deviations()
            gradient = _gradient(self._posterior.mean)
            scale = known / own.shape[1]
            by_position = (gradient * own).reshape(size, -1)
            by_shift = gradient * slope
            by_request = by_shift.sum(1)
            server += scale * (by_shift.sum(2) - by_request @ self._posterior.taken.T)
            by_request = by_request * np.sqrt(self._posterior.tilt_variance)
            total += scale**2 * (by_position @ by_position.T + by_request @ by_request.T)
        if newcomers:
            mean = _sigmoid(self._logits)
            slope = _gradient(mean[:, None])[:, :, 0] * mean * (1 - mean)
            server += newcomers * slope
            shift = slope.sum(1)
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

    # -- rows: one a slot ------------------------------------------------------------------------

    def _allocate(self, slots: int) -> None:
        """A slot's column holds successes, trials and mean by position, then the tilt and its variance."""
        count = self.num_positions
        self._s, self._n, self._m = (slice(i * count, (i + 1) * count) for i in range(3))
        self._table = np.zeros((3 * count + 2, slots))
        self._generation = np.zeros(slots, dtype=np.int64)
        self._last_step = np.full(slots, -1, dtype=np.int64)

    def _slots_of(self, step: StepObservation) -> tuple[NDArray[np.intp], NDArray[np.uint8], bool]:
        if len(step.slots) != len(step.accepted):
            return np.array([_ANONYMOUS_SLOT]), np.zeros(1, np.uint8), True
        slots = step.slots.astype(np.intp)
        largest = int(slots.max(initial=0))
        if largest >= len(self._last_step):
            self._grow(largest + 1)
        return slots, step.generations, False

    def _grow(self, slots: int) -> None:
        old = self._table, self._generation, self._last_step
        self._allocate(max(slots, 2 * len(self._last_step)))
        for source, target in zip(old, (self._table, self._generation, self._last_step), strict=True):
            target[..., : source.shape[-1]] = source

    def _aged_rows(
        self, slots: NDArray[np.intp], generations: NDArray[np.uint8], step_id: int, anonymous: bool
    ) -> Floats:
        """The rows, discounted by the steps since they were last seen, those of new requests empty."""
        memory = self.config.anonymous_memory_steps if anonymous else self.config.request_memory_steps
        rows, last = self._table[:, slots], self._last_step[slots]
        gap = step_id - last
        fresh = (last < 0) | (gap < 0) | (gap > self.config.free_after_steps)
        fresh |= self._generation[slots] != generations
        rows[: 2 * self.num_positions] *= np.exp(np.minimum(-gap, 0) / memory)
        if fresh.any():
            rows[:, fresh] = 0.0
            rows[self._m, fresh] = _sigmoid(self._logits)[:, None]
            rows[-1, fresh] = self._request_variance
            self._generation[slots] = generations
        self._last_step[slots] = step_id
        elapsed = max(step_id - self._step_id, 0) if self._step_id >= 0 else 0
        growth = min(elapsed / self.config.server_memory_steps, 1.0)
        self._covariance += growth * (self._prior_covariance - self._covariance)
        return rows

    # -- learning --------------------------------------------------------------------------------

    def _censored(self, accepted: NDArray[np.uint8], num_steps: int, pooled: bool) -> tuple[Floats, Floats]:
        """Successes and trials of a step by row and position: nothing is seen after the first rejection."""
        count = np.minimum(accepted, num_steps).astype(np.intp)
        successes = self._upto[:, count]
        trials = self._upto[:, np.minimum(count + 1, num_steps)]
        if pooled:
            return successes.sum(1, keepdims=True), trials.sum(1, keepdims=True)
        return successes, trials

    def _learn_server(self, rows: Floats, successes: Floats, trials: Floats) -> float:
        """Filter the server's logits with a step's residuals; returns the step's standardised innovation.

        A request's residuals tell of the server only as far as its prediction still depends on the server:
        not through what its own counts say of the position (``weight``) or have moved its tilt by
        (``taken``).
        """
        mean, known, tilt_variance = rows[self._m], rows[self._n], rows[-1]
        variance = mean * (1 - mean)
        weight = self.config.concentration / (known + self.config.concentration)
        taken = known * variance * tilt_variance
        residual, information = successes - trials * mean, trials * variance
        trust = weight / (1.0 + variance * tilt_variance)
        score, told, moved = residual * trust, information * trust * weight, information * weight
        cross = told @ taken.T
        precision = np.diag(told.sum(1)) - cross - cross.T + (taken * told.sum(0)) @ taken.T
        shift = moved.sum(1) - taken @ moved.sum(0)
        spread = (
            information.sum() + information.sum(0) ** 2 @ tilt_variance + shift @ self._covariance @ shift
        )
        gain = np.linalg.solve(self._identity + self._covariance @ precision, self._covariance)
        self._covariance = (gain + gain.T) / 2
        logits = self._logits + self._covariance @ (score.sum(1) - taken @ score.sum(0))
        self._logits = np.minimum(np.maximum(logits, -_LARGEST_LOGIT), _LARGEST_LOGIT)
        return float(residual.sum() / np.sqrt(spread)) if spread > 0 else 0.0

    def _learn_request_variance(self, posterior: _Posterior) -> None:
        live = len(posterior.tilt)
        rate = live / (live + 20.0 * self.config.request_memory_steps)
        target = float((posterior.tilt**2 + posterior.tilt_variance).sum()) / live
        self._request_variance += rate * (min(max(target, 0.02), 4.0) - self._request_variance)

    def _shorten_memory(self, rows: Floats) -> None:
        kept, counts = self.config.kept_after_change, slice(0, 2 * self.num_positions)
        rows[counts] *= kept
        self._table[counts] *= kept
        self._covariance = kept * self._covariance + (1 - kept) * self._prior_covariance

    def _infer(self, rows: Floats) -> _Posterior:
        """Posteriors of rows, which take them in: a Newton step for the tilts, then each position's Beta."""
        successes, trials, tilt = rows[self._s], rows[self._n], rows[-2]
        logits, precision = self._logits[:, None], 1.0 / self._request_variance
        prior = _sigmoid(logits + tilt)
        expected = trials * prior
        total = (expected * (1 - prior)).sum(0) + precision
        step = ((successes - expected).sum(0) - tilt * precision) / total
        tilt = tilt + np.minimum(np.maximum(step, -_LARGEST_TILT_STEP), _LARGEST_TILT_STEP)
        prior = _sigmoid(logits + tilt)
        expected = trials * prior
        information = expected * (1 - prior)
        total = information.sum(0) + precision
        prior = _sigmoid(logits + tilt - (successes - expected) / (total - information))
        strength = self.config.concentration
        mean = (successes + strength * prior) / (trials + strength)
        mean = np.minimum(np.maximum(mean, _LEAST_ACCEPTANCE), 1 - _LEAST_ACCEPTANCE)
        rows[self._m], rows[-2], rows[-1] = mean, tilt, 1.0 / total
        return _Posterior(mean, prior, trials, tilt, 1.0 / total, information / total)

    def _deviations(self) -> tuple[Floats, Floats]:
        """How each live acceptance may deviate, both (num_positions, live).

        Its standard deviation by its position's own counts, and its derivative by a shift of its prior's logit.
        """
        posterior, strength = self._posterior, self.config.concentration
        own = np.sqrt(posterior.mean * (1 - posterior.mean) / (posterior.trials + strength + 1))
        return own, strength / (posterior.trials + strength) * posterior.prior * (1 - posterior.prior)

    def _split(self, batch_size: int) -> tuple[int, int]:
        known = min(batch_size, self._live_requests)
        return known, batch_size - known

    def _newcomer_accept_length(self, logits: Floats) -> Floats:
        tilts = np.sqrt(self._request_variance) * _NEWCOMER_NODES
        return _accept_lengths(_sigmoid(logits[:, None] + tilts)) @ _NEWCOMER_WEIGHTS


@dataclass(frozen=True, slots=True)
class _Posterior:
    """Posteriors of the live requests, (num_positions, live) and (live,).

    ``prior`` is a position's mean by all but its own counts; ``taken`` is how far the tilt gives way, the
    other way, when the server's logit of a position moves.
    """

    mean: Floats
    prior: Floats
    trials: Floats
    tilt: Floats
    tilt_variance: Floats
    taken: Floats


def _prior_covariance(num_positions: int, config: AcceptanceConfig) -> Floats:
    """Common level, and a random walk from one position to the next."""
    index = np.arange(1.0, num_positions + 1)
    walk: Floats = np.minimum(index[:, None], index[None, :]) * config.position_sd**2
    return config.level_sd**2 + walk


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-x))


def _accept_lengths(acceptance: Floats) -> Floats:
    """As ``model.expected_accept_length``, for columns: (K, requests) to (K + 1, requests)."""
    lengths = np.ones((len(acceptance) + 1, acceptance.shape[1]))
    survival = lengths[0].copy()
    for position, column in enumerate(acceptance):
        survival *= column
        np.add(lengths[position], survival, out=lengths[position + 1])
    return lengths


def _gradient(acceptance: Floats) -> Floats:
    """Derivative of each column's accept length at k by its acceptance at j, shape (K + 1, K, requests)."""
    lengths = _accept_lengths(acceptance)
    return np.maximum(lengths[:, None, :] - lengths[None, :-1, :], 0.0) / acceptance
