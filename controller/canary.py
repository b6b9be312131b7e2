"""A canary: a candidate decides some blocks of an engine's steps, drawn at random, to be compared.

Each block of steps is the candidate's with probability ``share``, whatever came before. Both policies see
every step and choose at every decision; the block's own choice is sent. Its propensity is the probability
of the chosen tier over the draw and both policies' own randomness:

    P(k) = share P(candidate chooses k) + (1 - share) P(policy chooses k)

where a policy's P is what it says of its choice; unknown where that is, or where a randomised policy chose
another tier. Within a block the draw is shared, so that the blocks, not the steps, are independent.

The comparison. Loads differ far more between blocks than policies do within one, so each block is set against
what was known of the load before its draw: with y the log of a block's output rate (tokens by ms over the
timed steps that followed its decisions) and x = (1, log rate of the block before, log batch size at the
draw), each arm has its own least squares y = x b + e, and the two are compared at the mean x of all blocks
(Lin, "Agnostic notes on regression adjustments to experimental data", Annals of Applied Statistics 2013). The
difference is exp of that, less 1: that of a typical block, not of the totals. Its interval is Student's.
Since arms are drawn independently of all that came before, it does not matter that blocks follow one another.

What it does not see: a slower arm leaves its queue to the next block, so that large differences are
understated; and what the guard did to an arm's choices is counted to the arm.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specgov.controller.decision import DecisionBuilder
from specgov.policies.types import BatchView, Choice, Policy, StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

DEFAULT_BLOCK_STEPS = 64
LEAST_BLOCKS = 10
"""Of each arm, below which no interval is given."""

_REMEMBERED_DECISIONS = 256
_NORMAL_975 = 1.959964


@dataclass(slots=True)
class Block:
    """What a block's decisions brought so far, and what was known before its draw (None: not all of it).

    ``before``: log output rate of the block before, in tokens/ms, and log batch size.
    """

    by_candidate: bool
    before: tuple[float, float] | None
    tokens: float = 0.0
    ms: float = 0.0


class Arm:
    """Sums over an arm's blocks: all that the comparison needs.

    ``moments`` holds the sum of z z^T over z = (1, rate before, batch before, log rate), as in ``Block``.
    """

    def __init__(self) -> None:
        self.blocks, self.tokens, self.ms = 0, 0.0, 0.0
        self.moments = np.zeros((4, 4))

    def add(self, block: Block) -> None:
        """Count a block, if it had a timed step."""
        if block.ms > 0:
            self.blocks += 1
            self.tokens += block.tokens
            self.ms += block.ms
            if block.before is not None:
                z = np.array([1.0, *block.before, math.log(block.tokens / block.ms)])
                self.moments += np.outer(z, z)

    def copy(self) -> Arm:
        """The same sums."""
        made = Arm()
        made.blocks, made.tokens, made.ms = self.blocks, self.tokens, self.ms
        made.moments = self.moments.copy()
        return made

    @property
    def tokens_per_s(self) -> float:
        """The output rate; of an arm with a block."""
        return 1000 * self.tokens / self.ms

    @property
    def freedom(self) -> int:
        """Degrees of freedom of its least squares."""
        return int(self.moments[0, 0]) - 3

    def predict(self, x: NDArray[np.float64]) -> tuple[float, float]:
        """Mean log rate of blocks at ``x``, and the variance of that mean."""
        inverse = np.linalg.pinv(self.moments[:3, :3], hermitian=True)
        slope = inverse @ self.moments[:3, 3]
        residual = max(float(self.moments[3, 3] - self.moments[:3, 3] @ slope), 0.0) / self.freedom
        return float(x @ slope), residual * float(x @ inverse @ x)


@dataclass(frozen=True, slots=True)
class Difference:
    """The candidate's output rate over the policy's, less 1, with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Canary:
    """Two policies as one; implements ``policies.types.Policy``.

    A candidate that raises, or chooses what cannot be, ends the canary; ``ended`` says why.

    Args:
        text: names the candidate.
        candidate, policy: the two, for the same engine.
        builder: builds the candidate's decisions.
        share: probability that a block is the candidate's.
        block_steps: steps of a block.
        rng: draws the blocks.

    """

    name: ClassVar[str] = "canary"
    version: ClassVar[str] = "1"

    def __init__(
        self,
        text: str,
        candidate: Policy,
        policy: Policy,
        builder: DecisionBuilder,
        share: float,
        block_steps: int,
        rng: np.random.Generator,
    ) -> None:
        self.text, self.candidate, self.builder = text, candidate, builder
        self.ended = ""
        self._policy = policy
        self._share, self._block_steps, self._rng = share, block_steps, rng
        self._open: deque[Block] = deque()
        self._arms = {True: Arm(), False: Arm()}
        self._of_decision: dict[int, Block] = {}
        self._draw()

    @property
    def by_candidate(self) -> bool:
        """Whether the present block is the candidate's."""
        return self._open[-1].by_candidate

    def observe(self, step: StepObservation) -> None:
        """Both learn."""
        self._policy.observe(step)
        try:
            self.candidate.observe(step)
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises, the engine's policy goes on
            self._failed(error)

    def choose(self, batch: BatchView) -> Choice:
        """The choice of the policy whose block it is, with its propensity."""
        chosen = self._policy.choose(batch)
        try:
            other = self.candidate.choose(batch)
            self.builder.check(other)
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises, the engine's policy goes on
            self._failed(error)
            return chosen
        share = 1 - self._share
        if self.by_candidate:
            chosen, other, share = other, chosen, self._share
        return replace(chosen, propensity=_propensity(chosen, other, share, batch.batch_size))

    def forget(self) -> None:
        """Both drop what is known of acceptance."""
        self._policy.forget()
        try:
            self.candidate.forget()
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises, the engine's policy goes on
            self._failed(error)

    def estimates(self) -> dict[str, float]:
        """Those of the engine's policy."""
        return self._policy.estimates()

    def decided(self, decision_id: int) -> None:
        """The present block made this decision."""
        self._of_decision[decision_id] = self._open[-1]
        if len(self._of_decision) > _REMEMBERED_DECISIONS:
            del self._of_decision[next(iter(self._of_decision))]

    def is_candidates(self, decision_id: int) -> bool:
        """Whether the candidate made that decision."""
        block = self._of_decision.get(decision_id)
        return block is not None and block.by_candidate

    def measure(self, step: StepObservation, followed_decision_id: int) -> None:
        """Credit a step to the block whose decision it followed, and draw the next block when it is time."""
        block = self._of_decision.get(followed_decision_id)
        if block is not None and step.step_ms is not None and len(step.accepted):
            block.tokens += step.output_tokens
            block.ms += step.step_ms
        self._steps += 1
        if self._steps >= self._block_steps:
            self._draw(step.batch_size)

    def end(self, why: str) -> None:
        """Let the engine's policy decide alone; what was found stays."""
        self.ended = self.ended or why

    def stream_began(self) -> None:
        """Decisions are counted anew."""
        self._of_decision.clear()

    def state(self) -> pb.CanaryState:
        """The canary as the admin service shows it."""
        arms = {by_candidate: arm.copy() for by_candidate, arm in self._arms.items()}
        for block in self._open:
            arms[block.by_candidate].add(block)
        mine, others = arms[True], arms[False]
        state = pb.CanaryState(
            policy=self.text,
            share=self._share,
            block_steps=self._block_steps,
            candidate_blocks=mine.blocks,
            active_blocks=others.blocks,
            ended=self.ended,
        )
        if mine.blocks:
            state.candidate_tokens_per_s = mine.tokens_per_s
        if others.blocks:
            state.active_tokens_per_s = others.tokens_per_s
        found = difference(mine, others)
        if found is not None:
            state.difference, state.difference_low, state.difference_high = found.value, found.low, found.high
        return state

    def _draw(self, batch_size: int | None = None) -> None:
        """Begin a block; one whose decisions are no longer followed is counted for good."""
        before = None
        if self._open and self._open[-1].ms > 0 and batch_size:
            rate = self._open[-1].tokens / self._open[-1].ms
            before = math.log(rate), math.log(batch_size)
        self._steps = 0
        self._open.append(Block(bool(self._rng.random() < self._share), before))
        while len(self._open) > 2 + _REMEMBERED_DECISIONS // self._block_steps:
            block = self._open.popleft()
            self._arms[block.by_candidate].add(block)

    def _failed(self, error: Exception) -> None:
        self.end(f"the candidate failed: {type(error).__name__}: {error}"[:500])


def difference(candidate: Arm, policy: Arm) -> Difference | None:
    """The two arms compared; None while one has fewer than ``LEAST_BLOCKS`` blocks."""
    freedom = min(candidate.freedom, policy.freedom)
    if freedom < LEAST_BLOCKS - 3:
        return None
    total = candidate.moments[0, :3] + policy.moments[0, :3]
    x = np.asarray(total / total[0])
    (mine, my_variance), (other, other_variance) = candidate.predict(x), policy.predict(x)
    half = student_975(freedom) * math.sqrt(my_variance + other_variance)
    return Difference(*(math.expm1(mine - other + shift) for shift in (0.0, -half, half)))


def student_975(freedom: int) -> float:
    """The 97.5 % quantile of Student's t by Abramowitz and Stegun 26.7.5, within 0.1 % from 7 on."""
    z, v = _NORMAL_975, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _propensity(chosen: Choice, other: Choice, share: float, batch_size: int) -> float | None:
    """Probability of the chosen tier, by the formula above; ``share`` is that of the chosen one's arm."""
    if chosen.propensity is None:
        return None
    same = chosen.num_steps_for(batch_size) == other.num_steps_for(batch_size)
    if not same and other.propensity == 1.0:
        return share * chosen.propensity
    if not same or other.propensity is None:
        return None
    return share * chosen.propensity + (1 - share) * other.propensity
