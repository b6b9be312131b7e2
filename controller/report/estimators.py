"""What another rule would have given, from steps whose tier was drawn by chance.

Steps i = 1..n of one engine in their order. At step i tier ``k_i`` was drawn with probability ``p_i > 0`` and
brought ``r_i`` (output tokens, or milliseconds); the rule in question would have used tier ``t_i``. With the
importance weight ``w_i = 1[k_i = t_i] / p_i`` and a model's prediction ``q_i(k)`` made before the step:

- inverse propensity (IPS): ``mean(w_i r_i)``. Horvitz and Thompson, "A generalization of sampling without
  replacement from a finite universe", JASA 1952.
- self-normalised (SNIPS): ``sum(w_i r_i) / sum(w_i)``. Hajek's estimator (1971); for rules, Swaminathan and
  Joachims, "The self-normalized estimator for counterfactual learning", NIPS 2015.
- doubly robust (DR): ``mean(q_i(t_i) + w_i (r_i - q_i(k_i)))``. Dudik, Langford and Li, "Doubly robust policy
  evaluation and learning", ICML 2011. Right if either the propensities or the model are.
- weighted doubly robust (WDR): ``mean(q_i(t_i)) + sum(w_i (r_i - q_i(k_i))) / sum(w_i)``, which a model that
  is off by a constant factor does not disturb. Thomas and Brunskill, "Data-efficient off-policy policy
  evaluation for reinforcement learning", ICML 2016.
- direct: ``mean(q_i(t_i))``, as right as the model.

The output rate is a ratio, tokens over time: an estimator is used for both and the two are divided. In the
ratio of two IPS means the weights' sum cancels, so IPS and SNIPS give the same rate; with the model it is
WDR's means that are divided. The load comes by the clock: a rule that makes more tokens in a step makes fewer
steps, not a longer day. So the ratio is taken in strata of like batch sizes, ``R_s``, and the rate is
``sum(T_s R_s) / sum(T_s)``, where ``T_s`` is the time that the server did spend in stratum s (a separate
ratio estimator: Cochran, "Sampling Techniques", 1977, section 6.10).

How much the weights leave of the data is Kish's effective sample size ``(sum w)^2 / sum w^2`` (Kish, "Survey
Sampling", 1965). Where every tier that the rule would have used could be drawn, ``w`` has the mean 1.

Intervals: percentiles of the bootstrap by blocks of consecutive steps (Carlstein, "The use of subseries
values for estimating the variance of a general statistic from a stationary sequence", Annals of Statistics
1986), since steps that follow each other are alike, and a canary draws for a block of steps at a time.

All of them take the steps' batches as given: that a faster server would have had other batches is outside.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK_STEPS = 256
LEAST_BLOCKS = 20
"""Fewer blocks than this give no interval."""
LEAST_RAN_BLOCKS = 12
"""Blocks in which the rule's tier must have run for a stratum of its own: else too many resamples miss it."""
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Steps, each of shape (n,), in the engine's order: the tier's propensity, output tokens, duration."""

    num_steps: Ints
    propensity: Floats
    tokens: Floats
    ms: Floats


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model expected, shape (n,): at the tier that ran, and at the one that would have."""

    tokens_ran: Floats
    ms_ran: Floats
    tokens_target: Floats
    ms_target: Floats


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval; the ends are NaN where there are too few blocks for one."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether ``value`` is inside."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Estimate:
    """Output tokens per second, and the gain over what ran on the same steps (0.1 = a tenth more)."""

    rate: Interval
    gain: Interval


def weights(outcomes: Outcomes, target: Ints) -> Floats:
    """Importance weights of a rule that would have used ``target``, shape (n,)."""
    return np.where(outcomes.num_steps == target, 1.0 / outcomes.propensity, 0.0)


def effective_sample_size(weight: Floats) -> float:
    """Kish's; 0 where every weight is 0."""
    squares = float(np.sum(weight**2))
    return float(np.sum(weight)) ** 2 / squares if squares else 0.0


def ips(weight: Floats, outcome: Floats) -> float:
    """The inverse-propensity estimate of the mean outcome."""
    return float(np.mean(weight * outcome))


def snips(weight: Floats, outcome: Floats) -> float:
    """The self-normalised estimate of the mean outcome; NaN where every weight is 0."""
    total = float(np.sum(weight))
    return float(np.sum(weight * outcome)) / total if total else float("nan")


def doubly_robust(weight: Floats, outcome: Floats, predicted_ran: Floats, predicted_target: Floats) -> float:
    """The doubly-robust estimate of the mean outcome."""
    return float(np.mean(predicted_target + weight * (outcome - predicted_ran)))


def strata_of(batch_size: Ints, weight: Floats, least_blocks: int = LEAST_RAN_BLOCKS) -> Ints:
    """Strata, shape (n,) from 0: octaves of the batch size.

    One where the rule's tier ran in too few blocks is joined with the next smaller, the smallest with the
    one above it.
    """
    octave = np.floor(np.log2(np.maximum(batch_size, 1))).astype(np.int64)
    block = np.arange(len(weight)) // _block_steps(len(weight))
    joined = np.zeros(int(octave.max(initial=0)) + 1, dtype=np.int64)
    stratum = 0
    open_octaves: list[int] = []
    for power in range(len(joined) - 1, -1, -1):
        open_octaves.append(power)
        if len(np.unique(block[np.isin(octave, open_octaves) & (weight > 0)])) >= least_blocks:
            joined[open_octaves] = stratum
            stratum, open_octaves = stratum + 1, []
    joined[open_octaves] = max(stratum - 1, 0)
    return joined[octave]


def _block_steps(n: int) -> int:
    return max(1, min(BLOCK_STEPS, n // LEAST_BLOCKS))


@dataclass(frozen=True, slots=True)
class Terms:
    """What a rule's estimate is summed of, (n,): the model's part (0 without), what is weighted, weights."""

    modelled_tokens: Floats
    modelled_ms: Floats
    weighted_tokens: Floats
    weighted_ms: Floats
    weight: Floats


def ips_terms(outcomes: Outcomes, weight: Floats) -> Terms:
    """Of the estimate by inverse propensities."""
    nothing = np.zeros(len(weight))
    return Terms(nothing, nothing, weight * outcomes.tokens, weight * outcomes.ms, weight)


def dr_terms(outcomes: Outcomes, weight: Floats, predictions: Predictions) -> Terms:
    """Of the weighted doubly-robust estimate."""
    return Terms(
        predictions.tokens_target,
        predictions.ms_target,
        weight * (outcomes.tokens - predictions.tokens_ran),
        weight * (outcomes.ms - predictions.ms_ran),
        weight,
    )


def estimate(
    terms: Terms,
    outcomes: Outcomes,
    stratum: Ints,
    rng: np.random.Generator,
) -> Estimate:
    """The output rate from ``terms``, and its gain over what ran on the same steps.

    Blocks are shorter than ``BLOCK_STEPS`` where there would be fewer than ``LEAST_BLOCKS`` of them. The
    strata's times are held: what is uncertain is how fast the rule is in each, not how often each occurs.
    """
    n, strata = len(stratum), int(stratum.max(initial=0)) + 1
    block = _block_steps(n)
    blocks = -(-n // block)
    cell = np.arange(n) // block * strata + stratum
    columns = (*astuple(terms), np.ones(n), outcomes.tokens, outcomes.ms)
    sums = np.stack([np.bincount(cell, each, blocks * strata).reshape(blocks, strata) for each in columns])
    time_ms = sums[-1].sum(axis=0)
    rate, gain = _rate_and_gain(sums.sum(axis=1)[:, None, :], time_ms)
    if blocks < LEAST_BLOCKS:
        return Estimate(_point(float(rate[0])), _point(float(gain[0])))
    drawn = rng.multinomial(blocks, np.full(blocks, 1.0 / blocks), size=RESAMPLES).astype(np.float64)
    rates, gains = _rate_and_gain(np.stack([drawn @ each for each in sums]), time_ms)
    return Estimate(_interval(float(rate[0]), rates), _interval(float(gain[0]), gains))


def weighted_doubly_robust(
    weight: Floats, outcome: Floats, predicted_ran: Floats, predicted_target: Floats
) -> float:
    """The weighted doubly-robust estimate of the mean outcome; NaN where every weight is 0."""
    return float(np.mean(predicted_target)) + snips(weight, outcome - predicted_ran)


def mean_weight(weight: Floats, rng: np.random.Generator) -> Interval:
    """The weights' mean, which is 1 where the rule's every tier could have been drawn."""
    n = len(weight)
    starts = np.arange(0, n, _block_steps(n))
    if len(starts) < LEAST_BLOCKS:
        return _point(float(np.mean(weight)) if n else float("nan"))
    sums, sizes = np.add.reduceat(weight, starts), np.diff([*starts, n])
    drawn = rng.multinomial(len(starts), np.full(len(starts), 1.0 / len(starts)), size=RESAMPLES)
    return _interval(float(np.mean(weight)), (drawn @ sums) / (drawn @ sizes))


def _rate_and_gain(sums: Floats, time_ms: Floats) -> tuple[Floats, Floats]:
    """From sums of the terms, of steps, and of what ran, (8, draws, strata); NaN where not defined."""
    used = time_ms > 0
    share = time_ms[used] / time_ms.sum()
    q_tokens, q_ms, w_tokens, w_ms, weight, steps, ran_tokens, ran_ms = sums[:, :, used]
    with np.errstate(invalid="ignore", divide="ignore"):
        tokens, ms = q_tokens / steps + w_tokens / weight, q_ms / steps + w_ms / weight
        rate = np.where(ms > 0, 1000.0 * tokens / ms, np.nan) @ share
        return rate, rate / ((1000.0 * ran_tokens / ran_ms) @ share) - 1.0


def _interval(value: float, draws: Floats) -> Interval:
    """No interval where more than a few draws have no value."""
    finite = draws[np.isfinite(draws)]
    if len(finite) < 0.98 * len(draws):
        return _point(value)
    low, high = np.quantile(finite, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def _point(value: float) -> Interval:
    return Interval(value, float("nan"), float("nan"))
