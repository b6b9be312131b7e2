"""Nightjar's ADA-BINGREEDY: epsilon-greedy by bins of steps, per batch size, with a cost for switching on.

Formula: each batch size keeps the mean goodput g_k (output tokens of the batch in a ms) of each tier. Time
in a batch size is cut into blocks, block j of H_j = 2^(j-1) bins, a bin of ``bin_steps`` steps that all have
one tier. Bin b of a block (b = 1, 2, ...) explores with probability 1 / b, a tier drawn uniformly; otherwise
it takes

    argmin over k of  1 / g_k + [tier before was 0 and k > 0] switch_ms / k

- the latency of a token and, where speculation is switched on again, the cost of bringing the draft model's
KV cache up to date, spread over the k drafts.

Source: Li et al., "Nightjar: Dynamic Adaptive Speculative Decoding for Large Language Models Serving",
arXiv:2512.22420 (equations 2, 4, 5 and the planner's blocks and bins); the bins go back to Ada-BinGreedy in
Luo, Wei, Agarwal and Langford, "Efficient contextual bandits in non-stationary worlds", COLT 2018,
arXiv:1708.01799, without its tests for change. Titles, authors and numbers were checked; the formula, H_j,
1 / b and the switching costs against others' notes on version 3, the paper's own text not being at hand.
Regimes: loads that stay in a few batch sizes for long. Acceptance is no input, old goodput is never
forgotten, and every block begins with exploration, ever less often.
Defaults: ``switch_ms`` is 0 where the engine keeps the draft's KV cache warm at tier 0 (SGLang does: there is
nothing to bring up to date), else 17.87, the smallest that the paper measured.
What was chosen here: octaves instead of single batch sizes; block j has H_j bins of ``bin_steps`` steps. Two
public programs that follow the paper take H_j for the block's steps, in bins of about sqrt(H_j) steps; which
is the paper's could not be settled, and theirs would explore more. A tier without goodput is taken by
exploration only; of two equal tiers the smaller; the paper's table of switching costs by skipped tokens and
batch size is one number; offloading the draft model to the CPU is left out, which no tier can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.bandit import Octaves
from specgov.policies.learnt import Learnt
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, Reason, StepObservation

Floats = NDArray[np.float64]

MEASURED_SWITCH_MS = 17.87
"""Bringing the draft's KV cache up to date, 128 tokens, batch 32, RTX 4090: Nightjar's table."""


@final
class Nightjar(Learnt):
    """ADA-BINGREEDY: by batch size, the tier with the best mean goodput, explored in bins ever less often."""

    name: ClassVar[str] = "nightjar"
    version: ClassVar[str] = "1"

    _rng: np.random.Generator
    _counts: NDArray[np.int64]
    _goodput: Floats
    _bins: list[_Bin]

    @dataclass(frozen=True, slots=True)
    class Config:
        """``bin_steps``: steps of a bin; ``switch_ms``: None is what suits the engine."""

        bin_steps: int = 4
        switch_ms: float | None = None

        def __post_init__(self) -> None:
            if self.bin_steps < 1:
                raise PolicyError(f"bin_steps must be 1 or more, not {self.bin_steps}")
            if self.switch_ms is not None and self.switch_ms < 0:
                raise PolicyError(f"switch_ms must be 0 or more, not {self.switch_ms}")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._tiers = context.engine.tiers
        self._octaves = Octaves(context.engine)
        self._bin_steps = config.bin_steps
        warm = context.engine.draft_kv_stays_warm
        default_ms = 0.0 if warm else MEASURED_SWITCH_MS
        self._switch_ms = default_ms if config.switch_ms is None else config.switch_ms
        self._rng = context.rng
        self.forget()

    def observe(self, step: StepObservation) -> None:
        """Add the step's goodput to its tier's mean; a step ends its octave's bin when that is full."""
        octave = self._octaves.index(step.batch_size)
        if (
            step.num_steps in self._tiers
            and step.step_ms
            and len(step.accepted)
            and np.isfinite(step.step_ms)
        ):
            arm = self._tiers.index(step.num_steps)
            self._counts[octave, arm] += 1
            goodput = step.output_tokens / step.step_ms
            self._goodput[octave, arm] += (goodput - self._goodput[octave, arm]) / self._counts[octave, arm]
        self._bins[octave].steps += 1
        if self._bins[octave].steps >= self._bin_steps:
            self._next_bin(octave, step.num_steps)

    def choose(self, batch: BatchView) -> Choice:
        """Each octave's tier of its present bin."""
        here = self._bins[self._octaves.index(batch.batch_size)]
        reason = Reason.EXPLORATION if here.explores else Reason.POLICY
        return Choice(
            self._octaves.ranges([found.num_steps for found in self._bins]), reason, here.propensity
        )

    def forget(self) -> None:
        """Begin with block 1 of every octave: its one bin explores."""
        self._counts = np.zeros((len(self._octaves), len(self._tiers)), np.int64)
        self._goodput = np.zeros(self._counts.shape)
        self._bins = [_Bin() for _ in range(len(self._octaves))]
        for octave in range(len(self._octaves)):
            self._draw(octave, self._tiers[0])

    def estimates(self) -> dict[str, float]:
        """Mean goodput in tokens a ms by octave and tier, where something was seen."""
        return {
            f"goodput_from_batch_{self._octaves.firsts[octave]}_k{self._tiers[arm]}": float(
                self._goodput[octave, arm]
            )
            for octave, arm in np.argwhere(self._counts > 0).tolist()
        }

    def _next_bin(self, octave: int, num_steps_before: int) -> None:
        found = self._bins[octave]
        found.steps = 0
        found.number += 1
        if found.number > 2 ** (found.block - 1):
            found.block, found.number = found.block + 1, 1
        self._draw(octave, num_steps_before)

    def _draw(self, octave: int, num_steps_before: int) -> None:
        """Explore with probability 1 / number of the bin in its block, else take the best tier."""
        found, share = self._bins[octave], 1.0 / self._bins[octave].number
        best = self._best(octave, num_steps_before)
        found.explores = best is None or bool(self._rng.random() < share)
        uniform = 1.0 / len(self._tiers)
        if best is None or found.explores:
            found.num_steps = self._tiers[int(self._rng.integers(len(self._tiers)))]
        else:
            found.num_steps = best
        explored = uniform * (1.0 if best is None else share)
        found.propensity = explored + (1 - share if found.num_steps == best else 0.0)

    def _best(self, octave: int, num_steps_before: int) -> int | None:
        """The tier with the least latency of a token, None where nothing was seen."""
        losses = {
            tier: 1.0 / float(self._goodput[octave, arm])
            + (self._switch_ms / tier if num_steps_before == 0 and tier > 0 else 0.0)
            for arm, tier in enumerate(self._tiers)
            if self._counts[octave, arm]
        }
        return min(losses, key=lambda tier: losses[tier], default=None)


@dataclass(slots=True)
class _Bin:
    """The present bin of an octave: its block, its number in it, the steps that it has had, its tier."""

    block: int = 1
    number: int = 1
    steps: int = 0
    num_steps: int = 0
    explores: bool = True
    propensity: float = 1.0
