"""Conservative exploration: what may be lost against the baseline, by estimate, doubt and chance included.

A step at tier c in place of the baseline's tier b takes T(c) and brings E(c) tokens; in that time the
baseline would have brought ``T(c) E(b) / T(b)``. The difference is the step's loss (a gain where negative).
Before a step all of that is expected; once it was made, its tokens are measured, and what the baseline would
have brought remains an estimate: an upper one is what counts. The budget is a bucket of
``allowance_tokens``: a share of the baseline's output and all gains flow in, losses flow out, and a choice
that it cannot pay is refused. So over any stretch of steps, from the first one or from any other, the loss
is at most the allowance plus the share of the baseline's output over that stretch; gains of long ago are no
licence to lose now.

Two things are held back from what a choice may spend, so that the bucket is not overdrawn:

- What decisions lose that are on their way: at least what steps of such a tier were measured to lose of late
  (``losses.py``), whatever the policy expects of them.
- ``CHANCES`` standard deviations of the sum of all steps since the bucket was last full: tokens of single
  steps scatter, and a policy that was lucky has lost more than was measured.

Source: conservative bandits (Wu, Shariff, Lattimore and Szepesvári, "Conservative Bandits", ICML 2016), whose
budget also counts from the start, with upper confidence bounds on what is lost; the bucket's rim is ours.
"""

from __future__ import annotations

import math
from collections import deque

from specgov.controller.guard.losses import Loss

CHANCES = 2.0
_MEMORY_STEPS = 4096


class Budget:
    """The bucket, in output tokens.

    Args:
        allowance_tokens: what it holds at most, and at the start.
        loss_share: share of the baseline's output that flows in.
        lag_steps: the engine's decision lag: decisions whose steps are not known yet are paid in advance.

    Attributes: tokens: what is left. gain_tokens, baseline_tokens: the output beyond the baseline's so far,
        below 0 where it was less, and the baseline's in the same time. doubt_tokens: what was charged for
        doubt since the bucket was last full.

    """

    def __init__(self, allowance_tokens: float, loss_share: float, lag_steps: int) -> None:
        self.allowance_tokens = allowance_tokens
        self.tokens = allowance_tokens
        self.gain_tokens = 0.0
        self.baseline_tokens = 0.0
        self.doubt_tokens = 0.0
        self._loss_share = loss_share
        self._under_way: deque[Loss] = deque(maxlen=max(lag_steps - 1, 0))
        self._variance = 0.0

    def affords(self, loss: Loss) -> bool:
        """Whether a step with that loss can be paid, beside what is under way."""
        net = self._net(loss)
        if net <= 0:
            return self.tokens >= 0 or loss.is_none
        reserve = 0.0
        for other in self._under_way:
            held_back = net if other is loss else self._net(other)
            if held_back > 0.0:
                reserve += held_back
        return net + reserve + CHANCES * math.sqrt(self._variance) <= self.tokens

    def decided(self, loss: Loss) -> None:
        """A step with that loss was decided; it is under way until its lag has passed."""
        self._under_way.append(loss)

    def made(
        self,
        loss_tokens: float,
        baseline_tokens: float,
        doubt_tokens: float = 0.0,
        chance_tokens: float = 0.0,
    ) -> None:
        """A step was made.

        Args:
            loss_tokens: what it lost, by measure and estimate.
            baseline_tokens: what the baseline would have brought.
            doubt_tokens: what that may be more.
            chance_tokens: by how much the loss was another than such steps have on average.

        """
        self.gain_tokens -= loss_tokens
        self.baseline_tokens += baseline_tokens
        left = self.tokens + self._loss_share * baseline_tokens - loss_tokens - doubt_tokens
        if left >= self.allowance_tokens:
            self.tokens, self.doubt_tokens, self._variance = self.allowance_tokens, 0.0, 0.0
            return
        self.tokens = left
        self.doubt_tokens += doubt_tokens
        self._variance += chance_tokens * chance_tokens - self._variance / _MEMORY_STEPS

    def _net(self, loss: Loss) -> float:
        """What it may lose beyond the share."""
        return loss.most_tokens() - self._loss_share * loss.baseline_tokens
