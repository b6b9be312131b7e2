"""Step time from what a step reads and computes.

``T(b, k, S)`` with ``n = b (k + 1)`` verified tokens and S the sum of sequence lengths:

- verify: ``(weights^p + arithmetic^p)^(1/p)`` where ``weights`` is the time to read the weights once (of a
  mixture of experts only the experts that n tokens touch) and ``arithmetic`` is ``2 active_params n'`` FLOPs,
  n' being n rounded up to whole tiles; p says how well the two overlap. Tensor parallelism divides both.
- attention: the cache of S tokens is read once, and the draft's once a pass.
- draft: k passes, each a fixed latency, the draft's weights and its arithmetic for b tokens.
- draft-extend: on a server that can speculate, one pass over all n tokens, at k = 0 too: the tier-0 tax.
- all-reduce: two a layer where the model is spread over several devices.
- fixed time a step, a request and a verified token: launch, sampling, the scheduler.

Experts touched by m tokens out of E with e used by each are ``E (1 - (1 - e/E)^m)``. Drafts of one request
are alike, so that k of them touch as many experts as ``k^novelty`` unlike tokens would.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from specgov.policies.step_time.lookup import Padding
from specgov.policies.step_time.specs import HardwareSpec, ModelSpec

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What data sheets do not say. The defaults are rounded guesses, chosen before any fit.

    The efficiencies are shares of the data sheet's figures that are reached.
    """

    fixed_ms: float = 1.0
    request_us: float = 2.0
    token_us: float = 1.0
    memory_efficiency: float = 0.85
    compute_efficiency: float = 0.6
    attention_efficiency: float = 0.9
    draft_pass_ms: float = 0.2
    draft_extend_ms: float = 0.4
    overlap: float = 3.0
    novelty: float = 0.5
    all_reduce_latency_us: float = 10.0
    tile_tokens: float = 64.0

    def as_dict(self) -> dict[str, float]:
        """Name and value of each."""
        return {item.name: float(getattr(self, item.name)) for item in fields(self)}


@dataclass(frozen=True)
class ParametricStepTime:
    """Step times of ``model`` with ``draft`` on ``hardware``; implements ``policies.types.StepTime``.

    ``can_speculate`` False is a server that was started without speculation: no draft-extend, and only
    num_steps 0 means anything.
    """

    model: ModelSpec
    draft: ModelSpec
    hardware: HardwareSpec
    tensor_parallel_size: int = 1
    coefficients: Coefficients = field(default_factory=Coefficients)
    can_speculate: bool = True
    graph_batch_sizes: tuple[int, ...] = ()

    def without_speculation(self) -> ParametricStepTime:
        """The same server started without speculation."""
        return replace(self, can_speculate=False)

    def with_graph_batch_sizes(self, graph_batch_sizes: tuple[int, ...]) -> ParametricStepTime:
        """The same server with other CUDA-graph sizes."""
        return replace(self, graph_batch_sizes=graph_batch_sizes)

    def step_ms(
        self,
        batch_size: NDArray[np.int64] | int,
        num_steps: NDArray[np.int64] | int,
        sum_seq_len_tokens: NDArray[np.int64] | NDArray[np.float64] | float,
    ) -> Array:
        """Expected duration of a step in ms; the arguments broadcast against each other."""
        batch, tier, context = np.broadcast_arrays(
            Padding(self.graph_batch_sizes, 1).running_size(batch_size).astype(np.float64),
            np.asarray(num_steps, dtype=np.float64),
            np.asarray(sum_seq_len_tokens, dtype=np.float64),
        )
        c = self.coefficients
        total = c.fixed_ms + c.request_us * batch / 1e3 + self.verify_ms(batch, tier, context)
        if self.can_speculate:
            total = total + self.draft_ms(batch, tier, context) + self.draft_extend_ms(batch, tier, context)
        return np.asarray(total)

    def verify_ms(self, batch: Array, tier: Array, context: Array) -> Array:
        """The target's pass over the batch's ``batch * (tier + 1)`` tokens, all-reduce included."""
        c = self.coefficients
        tokens = batch * (tier + 1)
        # Where tier is 0, 0 ** novelty would count a draft that is not there.
        distinct = batch * (1 + np.where(tier > 0, np.maximum(tier, 1) ** c.novelty, 0))
        gemm = self._gemm_ms(self.model, tokens, distinct)
        attention = self._cache_ms(self.model, context)
        return np.asarray(gemm + attention + c.token_us * tokens / 1e3 + self._all_reduce_ms(tokens))

    def draft_ms(self, batch: Array, tier: Array, context: Array) -> Array:
        """All draft passes of a step."""
        one = self.coefficients.draft_pass_ms + self._gemm_ms(self.draft, batch, batch)
        return np.asarray(tier * (one + self._cache_ms(self.draft, context)))

    def draft_extend_ms(self, batch: Array, tier: Array, context: Array) -> Array:
        """The draft's pass over what was verified, which keeps its cache warm."""
        tokens = batch * (tier + 1)
        gemm = self._gemm_ms(self.draft, tokens, tokens)
        return np.asarray(self.coefficients.draft_extend_ms + gemm + self._cache_ms(self.draft, context))

    def prefill_ms(self, tokens: NDArray[np.int64] | int) -> Array:
        """A prefill chunk of ``tokens`` prompt tokens, attention among them neglected."""
        count = np.asarray(tokens, dtype=np.float64)
        c = self.coefficients
        total = c.fixed_ms + self._gemm_ms(self.model, count, count) + self._all_reduce_ms(count)
        if self.can_speculate:
            total = total + c.draft_extend_ms + self._gemm_ms(self.draft, count, count)
        return np.asarray(np.where(count > 0, total, 0.0))

    def _gemm_ms(self, model: ModelSpec, tokens: Array, distinct: Array) -> Array:
        c, machine, tp = self.coefficients, self.hardware, self.tensor_parallel_size
        params = np.full_like(tokens, model.dense_params)
        if model.num_experts:
            missed = (1 - model.experts_per_token / model.num_experts) ** distinct
            params = params + model.expert_params * model.num_experts * (1 - missed)
        memory = params * model.weight_bytes / (machine.memory_bytes_per_s * c.memory_efficiency * tp)
        tiled = np.ceil(tokens / c.tile_tokens) * c.tile_tokens
        compute = 2 * model.active_params * tiled / (machine.flops_per_s * c.compute_efficiency * tp)
        return np.asarray(1e3 * (memory**c.overlap + compute**c.overlap) ** (1 / c.overlap))

    def _cache_ms(self, model: ModelSpec, context: Array) -> Array:
        rate = (
            self.hardware.memory_bytes_per_s
            * self.coefficients.attention_efficiency
            * self.tensor_parallel_size
        )
        return np.asarray(1e3 * model.kv_bytes_per_token * context / rate)

    def _all_reduce_ms(self, tokens: Array) -> Array:
        tp = self.tensor_parallel_size
        if tp == 1:
            return np.zeros_like(tokens)
        volume = 2 * (tp - 1) / tp * tokens * self.model.hidden * 2 / self.hardware.link_bytes_per_s
        return np.asarray(
            2 * self.model.layers * (self.coefficients.all_reduce_latency_us / 1e3 + 1e3 * volume)
        )


def roofline_prior(
    model: ModelSpec, draft: ModelSpec, hardware: HardwareSpec, tensor_parallel_size: int = 1
) -> ParametricStepTime:
    """A step time for a machine that was never measured: data-sheet figures and the default coefficients."""
    return ParametricStepTime(model, draft, hardware, tensor_parallel_size)
