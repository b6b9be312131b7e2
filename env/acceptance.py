"""Which drafts of a request are accepted: a proportional-hazards model.

A class of requests has a cumulative hazard ``H_1 <= H_2 <= ...`` over draft positions, and a request at a
place in its text a factor g, so that ``P(drafts 1..i all accepted) = exp(-g H_i)`` and the conditional
acceptance at position i is ``p_i ** g``: the larger g, the worse the drafts. (D. R. Cox, "Regression
models and life-tables", JRSS B 34, 1972; with a random g it is a frailty model.) Sampling takes one
uniform U for each request and step: with ``E = -log U``, draft i is accepted when ``E > g H_i``.

    log g = spread x (sqrt(w) u + sqrt(1 - w) z)        u: of the request; z: AR(1) along its text
          + context_hazard x context / 1000 tokens      up to `MAX_CONTEXT_TOKENS`
          + cold_log_hazard                             while the draft's KV is cold (see `AcceptanceModel`)
          + the server's drift and regime               (see `Drift`)

z moves once in `BLOCK_TOKENS` output tokens and is keyed by the block, and U by the output position: what
a text is like does not depend on how fast it is written, so two policies meet the same text. H is solved
for so that survival averaged over u and z is the class's published curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.acceptance_classes import AcceptanceClass
from specgov.env.rng import Keys, Stream, draw, normal, stream_keys, to_normal_pair, to_uniform_f32

BLOCK_TOKENS = 16
"""Output tokens after which the moving part of a request's hazard moves; a power of two."""

MAX_CONTEXT_TOKENS = 32_768
"""Context beyond which acceptance gets no worse; an assumption."""

_BLOCK_DRAWS = 1 << 40  # draws of a request's key from here on are its blocks', those below its positions'
_FIRST_DRAW = 1 << 50  # and this one is for its u and first z

Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shift:
    """A change of the server's log hazard by ``log_hazard`` at ``at_s``, spread evenly over ``ramp_s``.

    With a ramp it is a drift; without, a change of regime, as after a weight update. ln 2 squares every
    conditional acceptance: 0.8 becomes 0.64.
    """

    at_s: float
    log_hazard: float
    ramp_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Drift:
    """How acceptance of the whole server changes in time.

    Besides the stated ``shifts``, a level drawn anew every ``regime_s`` seconds from a normal
    distribution of the standard deviation ``regime_spread`` adds to the log hazard.
    """

    shifts: tuple[Shift, ...] = ()
    regime_spread: float = 0.0
    regime_s: float = 60.0

    @property
    def is_none(self) -> bool:
        """Whether nothing ever changes."""
        return not self.shifts and self.regime_spread == 0.0

    def gain(self, keys: Keys, time_s: NDArray[np.float64]) -> Float32s:
        """The factor on every hazard of each environment, shape (N,); ``keys`` are the environments'."""
        log_gain = np.zeros(len(time_s))
        for shift in self.shifts:
            since = time_s - shift.at_s
            part = np.clip(since / shift.ramp_s, 0.0, 1.0) if shift.ramp_s > 0 else since >= 0
            log_gain += shift.log_hazard * part
        if self.regime_spread:
            regime = np.floor(time_s / self.regime_s).astype(np.int64)
            log_gain += self.regime_spread * normal(stream_keys(keys, Stream.REGIME), regime)
        return np.exp(log_gain).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AcceptanceModel:
    """Classes of requests, the server's drift, and what a cold draft costs.

    ``cold_log_hazard`` is for engines that skip draft-extend at num_steps 0: requests that lived through
    such a step have it added to their log hazard until they end. Its size is an assumption (0.7 turns 0.8
    into 0.64); that there is such a loss: https://github.com/NVIDIA/TensorRT-LLM/issues/16888 and
    https://github.com/vllm-project/vllm/issues/53426.
    """

    classes: tuple[AcceptanceClass, ...]
    drift: Drift = Drift()
    cold_log_hazard: float = 0.7


class AcceptanceTables:
    """A model's classes as arrays, and the arithmetic on flat arrays of requests.

    Attributes:
        hazard: shape (positions, classes); inf where nothing is ever accepted.
        positions: the largest num_steps.

    """

    def __init__(self, model: AcceptanceModel, positions: int) -> None:
        self.positions = positions
        self.hazard: Float32s = np.stack(
            [marginal_hazard(c.hazard(positions), c.spread) for c in model.classes], axis=1
        ).astype(np.float32)
        shares = np.array([c.between_requests for c in model.classes])
        spreads = np.array([c.spread for c in model.classes])
        self._request_scale = spreads * np.sqrt(shares)
        self._text_scale = spreads * np.sqrt(1.0 - shares)
        self._correlation = np.array([c.block_correlation for c in model.classes])
        self._innovation = np.sqrt(1.0 - self._correlation**2)
        self._context = np.array([c.context_hazard for c in model.classes]) / 1000.0
        self._context_matters = bool(self._context.any())
        self._cold = model.cold_log_hazard

    def first_state(self, keys: Keys) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """u and z of new requests, standard normal; ``keys`` are the requests', shape (m,)."""
        return to_normal_pair(draw(keys, _FIRST_DRAW))

    def next_block(
        self,
        keys: Keys,
        class_index: NDArray[Any],
        text: NDArray[np.float64],
        generated_before: NDArray[Any],
        generated: NDArray[Any],
    ) -> NDArray[np.float64]:
        """z of requests that entered a new block, shape (m,).

        A step of more tokens than a block passes several: the correlation is that of the distance.
        """
        blocks = generated.astype(np.int64) // BLOCK_TOKENS
        passed = blocks - generated_before // BLOCK_TOKENS
        correlation, innovation = self._correlation[class_index], self._innovation[class_index]
        if (passed > 1).any():
            correlation **= passed
            innovation = np.sqrt(1.0 - correlation**2)
        return np.asarray(correlation * text + innovation * normal(keys, blocks + _BLOCK_DRAWS))

    def factor(
        self,
        class_index: NDArray[Any],
        request: NDArray[np.float64],
        text: NDArray[np.float64],
        context_tokens: NDArray[Any],
        cold: NDArray[np.bool_],
    ) -> Float32s:
        """g of each request without the server's drift, shape (m,)."""
        log_factor = self._request_scale[class_index] * request + self._text_scale[class_index] * text
        if self._context_matters:
            log_factor += self._context[class_index] * np.minimum(context_tokens, MAX_CONTEXT_TOKENS)
        if cold.any():
            log_factor += self._cold * cold
        return np.asarray(np.exp(log_factor), np.float32)

    def accepted(
        self,
        keys: Keys,
        generated: NDArray[Any],
        class_index: NDArray[Any],
        factor: Float32s,
        num_steps: NDArray[np.uint8],
    ) -> NDArray[np.uint8]:
        """Accepted drafts of each request, 0..num_steps.

        Args:
            keys: of the requests, shape (n,).
            generated: output tokens so far.
            class_index: into the model's classes.
            factor: g, drift included.
            num_steps: of the step that each request is in, at most ``positions``.

        """
        largest = int(num_steps.max(initial=0))
        if largest == 0:
            return np.zeros(len(keys), np.uint8)
        exponential = np.log(to_uniform_f32(draw(keys, generated)))
        np.negative(exponential, out=exponential)
        exponential /= factor
        if len(self.hazard[0]) == 1:
            accepted = np.searchsorted(self.hazard[:largest, 0], exponential).astype(np.uint8)
        else:
            accepted = np.zeros(len(keys), np.uint8)
            for hazard in self.hazard[:largest]:
                accepted += exponential > hazard.take(class_index)
        return np.minimum(accepted, num_steps, out=accepted)

    def survival(self, class_index: NDArray[Any], factor: Float32s) -> NDArray[np.float64]:
        """P(drafts 1..i all accepted) of each request, shape (n, positions)."""
        hazard = self.hazard.T[class_index].astype(np.float64)
        return np.asarray(np.exp(-factor.astype(np.float64)[:, None] * hazard))


def marginal_hazard(hazard: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """The hazards H with ``E[exp(-g H)] = exp(-hazard)`` for a lognormal g with log g ~ N(0, spread^2).

    By bisection with 40-point Gauss-Hermite quadrature. Infinite hazards stay infinite.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    factors = np.exp(spread * nodes)
    weights = weights / weights.sum()
    target = np.exp(-hazard)
    low, high = np.zeros_like(hazard), np.full_like(hazard, 1e3)
    for _ in range(80):
        middle = (low + high) / 2
        too_small = np.exp(-middle[:, None] * factors) @ weights > target
        low, high = np.where(too_small, middle, low), np.where(too_small, high, middle)
    return np.where(np.isinf(hazard), np.inf, (low + high) / 2)
