"""What a rule truly loses against a baseline, step by step: the simulator knows what either would bring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specgov.env.decision_lag import DecisionLag
from specgov.env.emulated_reports import observation_of
from specgov.env.server import Server
from specgov.policies.types import BatchView, Choice, Policy

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrueLoss:
    """A run's steps, shape (steps,), all expectations by the simulator's truth for the batch that ran.

    ``loss_tokens``: what the baseline's tier would have brought in the expected time of the tier that ran,
    less what that brings; below 0 where the rule gains. ``baseline_tokens``: the former. Both tiers are
    judged on the same batch, with the same requests: nothing of the difference is chance.
    """

    loss_tokens: Floats
    baseline_tokens: Floats
    output_tokens: int
    decode_s: float

    @property
    def share(self) -> float:
        """Of the baseline's output that was lost."""
        return float(self.loss_tokens.sum() / self.baseline_tokens.sum())

    def worst_stretch_tokens(self, loss_share: float) -> float:
        """The most that was lost beyond that share of the baseline's output, over any stretch of steps."""
        beyond = np.concatenate([[0.0], np.cumsum(self.loss_tokens - loss_share * self.baseline_tokens)])
        return float((beyond - np.minimum.accumulate(beyond)).max())


def play_against(baseline: Choice, policy: Policy, server: Server, end_s: float) -> TrueLoss:
    """Play a server of one environment to a rule until ``end_s`` of simulated time or its workload's end.

    Args:
        baseline: by batch size; it decides nothing.
        policy: decides, with the engine's decision lag.
        server: one environment, fresh or reset.
        end_s: simulated time.

    """
    engine = server.config.engine
    index = {tier: place for place, tier in enumerate(engine.tiers)}
    lag: DecisionLag[Choice] = DecisionLag(engine.decision_lag_steps, policy.choose(BatchView(1)))
    losses, of_baseline, output_tokens, decode_ms = [], [], 0, 0.0
    while server.time_ns[0] < end_s * 1e9 and not server.exhausted[0]:
        batch_size = int(server.batch_size[0])
        num_steps = lag.due.num_steps_for(batch_size)
        ran, would = index[num_steps], index[baseline.num_steps_for(batch_size)]
        truth = server.truth()
        tokens, ms = truth.expected_tokens[0], truth.expected_ms[0]
        of_baseline.append(tokens[would] / ms[would] * ms[ran])
        losses.append(of_baseline[-1] - tokens[ran])
        result = server.step(np.array([num_steps]))
        output_tokens += int(result.output_tokens[0])
        decode_ms += float(result.step_ms[0])
        step = observation_of(result, engine)
        policy.observe(step)
        lag.push(policy.choose(BatchView.of(step)))
    return TrueLoss(np.array(losses), np.array(of_baseline), output_tokens, decode_ms / 1000.0)
