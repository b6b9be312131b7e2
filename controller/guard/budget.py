"""Conservative exploration: what may be lost against the baseline, by estimate.

A step at tier c in place of the baseline's tier b takes T(c) and brings E(c) tokens; in that time the
baseline would have brought ``T(c) E(b) / T(b)``. The difference is the step's loss (a gain where negative).
Before a step all of that is expected; once it was made, its tokens and its time are measured, and what the
baseline would have brought remains an estimate. The budget is a bucket of ``allowance_tokens``: a share of
the baseline's output and all gains flow in, losses flow out, and a choice that it cannot pay is refused. So
over any stretch of steps, from the first one or from any other, the loss is at most the allowance plus the
share of the baseline's output over that stretch; gains of long ago are no licence to lose now. It is more by
what steps on their way turn out to lose beyond what was expected: then the bucket is overdrawn, and until it
is filled again nothing passes but the baseline's own tier, whatever the policy promises.

Source: conservative bandits (Wu, Shariff, Lattimore and Szepesvári, "Conservative Bandits", ICML 2016), whose
budget also counts from the start; the bucket's rim is ours.
"""

from __future__ import annotations

from collections import deque


class Budget:
    """The bucket, in output tokens.

    Args:
        allowance_tokens: what it holds at most, and at the start.
        loss_share: share of the baseline's output that flows in.
        lag_steps: the engine's decision lag: decisions whose steps are not known yet are paid in advance.

    Attributes: tokens: what is left. gain_tokens, baseline_tokens: the output beyond the baseline's so far,
        below 0 where it was less, and the baseline's in the same time.

    """

    def __init__(self, allowance_tokens: float, loss_share: float, lag_steps: int) -> None:
        self.allowance_tokens = allowance_tokens
        self.tokens = allowance_tokens
        self.gain_tokens = 0.0
        self.baseline_tokens = 0.0
        self._loss_share = loss_share
        self._under_way: deque[float] = deque(maxlen=max(lag_steps - 1, 0))

    def affords(self, loss_tokens: float, baseline_tokens: float) -> bool:
        """Whether a step with that loss can be paid, beside what is under way."""
        net = loss_tokens - self._loss_share * baseline_tokens
        if net <= 0:
            return self.tokens >= 0 or loss_tokens == 0
        return net + sum(self._under_way) <= self.tokens

    def decided(self, loss_tokens: float, baseline_tokens: float) -> None:
        """A step with that loss was decided; it is under way until its lag has passed."""
        self._under_way.append(max(loss_tokens - self._loss_share * baseline_tokens, 0.0))

    def made(self, loss_tokens: float, baseline_tokens: float) -> None:
        """A step with that loss was made."""
        self.gain_tokens -= loss_tokens
        self.baseline_tokens += baseline_tokens
        left = self.tokens + self._loss_share * baseline_tokens - loss_tokens
        self.tokens = min(left, self.allowance_tokens)
