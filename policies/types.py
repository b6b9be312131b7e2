"""What decision rules see and say.

Words (see the protocol file): a step is one decode iteration over the running batch; ``num_steps`` is the
number of draft steps in it (0 = no speculation); a tier is a value of ``num_steps`` that the engine has
prepared; accepted drafts count drafts only, 0..num_steps; accept length is accepted drafts + 1.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from specgov.policies.bundle import Bundle

MAX_BATCH_SIZE = 65_535
"""Upper end of the last batch-size range of a choice when the engine names no largest batch."""
_SUMMED_IN_PYTHON = 128
"""So many numbers are summed faster without numpy, whose code has left the caches since the last step."""


class Reason(enum.IntEnum):
    """Why a tier was chosen; the values are the wire protocol's."""

    POLICY = 1
    EXPLORATION = 2
    FALLBACK = 3
    GUARD = 4
    HOLD = 5
    FROZEN = 6
    SHADOW = 7


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a rule knows of the engine before its first step.

    ``tiers`` ascend and are distinct; ``graph_batch_sizes`` ascend and may be empty (no CUDA graphs);
    ``max_running_requests`` 0 means not known; ``decision_lag_steps`` is the number of steps between the
    newest result that a decision knows and the step that it applies to, transport included where known.
    """

    tiers: tuple[int, ...]
    graph_batch_sizes: tuple[int, ...] = ()
    max_running_requests: int = 0
    decision_lag_steps: int = 2
    draft_kv_stays_warm: bool = True
    kv_capacity_tokens: int = 0

    @property
    def largest_batch_size(self) -> int:
        """The largest batch size that can occur: the engine's limit, else ``MAX_BATCH_SIZE``."""
        return self.max_running_requests or MAX_BATCH_SIZE


@dataclass(slots=True)
class StepObservation:
    """The result of one decode step, validated. Nobody changes one; freezing it would cost a step 2 µs.

    ``accepted``, ``slots`` and ``generations`` have one entry for each request that was still live when the
    result was processed, so at most ``batch_size``; where requests cannot be told apart ``slots`` and
    ``generations`` are empty. ``padded_batch_size`` is 0 where not known, ``step_ms`` None where the step's
    time is not valid (only consecutive decode steps have one), ``kv_use_ratio`` None where not known.
    """

    step_id: int
    batch_size: int
    num_steps: int
    accepted: NDArray[np.uint8]
    slots: NDArray[np.uint16]
    generations: NDArray[np.uint8]
    sum_seq_len_tokens: int
    max_seq_len_tokens: int
    padded_batch_size: int = 0
    cuda_graph_ran: bool | None = None
    waiting_requests: int = 0
    kv_use_ratio: float | None = None
    step_ms: float | None = None
    after_prefill: bool = False
    after_idle: bool = False
    has_grammar: bool = False
    warm_up: bool = False
    _accepted_drafts: int = field(default=-1, init=False, repr=False, compare=False)

    @property
    def accepted_drafts(self) -> int:
        """Drafts accepted by all live requests together, summed up once."""
        if self._accepted_drafts < 0:
            few = len(self.accepted) <= _SUMMED_IN_PYTHON
            self._accepted_drafts = sum(self.accepted.tolist()) if few else int(self.accepted.sum())
        return self._accepted_drafts

    @property
    def output_tokens(self) -> int:
        """Tokens that the step produced for live requests: accepted drafts and one bonus token each."""
        return self.accepted_drafts + len(self.accepted)


@dataclass(slots=True)
class BatchView:
    """The batch to decide for, as far as it is known: that of the newest report, else a caller's guess.

    Nobody changes one, as ``StepObservation``.
    """

    batch_size: int
    sum_seq_len_tokens: int = 0
    max_seq_len_tokens: int = 0
    waiting_requests: int = 0
    kv_use_ratio: float | None = None
    step_id: int = 0

    @classmethod
    def of(cls, step: StepObservation) -> BatchView:
        """The batch as the step ``step`` left it."""
        return cls(
            step.batch_size,
            step.sum_seq_len_tokens,
            step.max_seq_len_tokens,
            step.waiting_requests,
            step.kv_use_ratio,
            step.step_id,
        )


@dataclass(frozen=True, slots=True)
class TierRange:
    """A tier for the batch sizes ``batch_size_min`` to ``batch_size_max``, both included."""

    batch_size_min: int
    batch_size_max: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule's answer: a tier for every batch size, since the batch may change before it applies.

    ``ranges`` ascend, do not overlap, and cover 1 to the engine's largest batch size. ``expected_tokens``
    (output tokens of the whole batch in one step) and ``expected_ms`` have one entry a tier, in the order of
    the engine's tiers, for the batch that was asked for, or are None where the rule has no such model.
    ``propensity`` is the probability of this tier under the rule where it is known (1 for a deterministic
    rule).
    """

    ranges: tuple[TierRange, ...]
    reason: Reason = Reason.POLICY
    propensity: float | None = None
    expected_tokens: NDArray[np.float64] | None = None
    expected_ms: NDArray[np.float64] | None = None

    def num_steps_for(self, batch_size: int) -> int:
        """The tier for ``batch_size``; that of the last range for anything larger."""
        for tier_range in self.ranges:
            if batch_size <= tier_range.batch_size_max:
                return tier_range.num_steps
        return self.ranges[-1].num_steps


class StepTime(Protocol):
    """What a step costs. Implementations: a measured table, a parametric model, the two together."""

    def step_ms(
        self,
        batch_size: NDArray[np.int64] | int,
        num_steps: NDArray[np.int64] | int,
        sum_seq_len_tokens: NDArray[np.int64] | NDArray[np.float64] | float,
    ) -> NDArray[np.float64]:
        """Expected duration of a step in ms; the arguments broadcast against each other."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a rule is made with.

    ``step_time`` is None where no profile is known; ``rng`` and ``clock`` (seconds, monotonic) are the only
    sources of randomness and time that a rule may use. ``load_bundle`` gives a bundle by its name or folder;
    None is ``bundle.load_bundle``.
    """

    engine: EngineSpec
    rng: np.random.Generator
    clock: Callable[[], float]
    step_time: StepTime | None = None
    load_bundle: Callable[[str], Bundle] | None = None


class Policy(Protocol):
    """A decision rule: observes steps, chooses a tier, owns its hysteresis. Not thread-safe; one each."""

    name: ClassVar[str]
    version: ClassVar[str]

    def observe(self, step: StepObservation) -> None:
        """Learn from a step. Steps come in the engine's order, possibly with gaps; never warm-up steps."""
        ...

    def choose(self, batch: BatchView) -> Choice:
        """The tiers to use from the next decision on. May be called with no step observed yet."""
        ...

    def forget(self) -> None:
        """The weights changed or the engine restarted: what is known of acceptance no longer holds."""
        ...

    def estimates(self) -> dict[str, float]:
        """What the rule believes now, by name, for people; may be empty."""
        ...


class PolicyError(ValueError):
    """A rule cannot be made as asked; the message says what is wrong and what to do."""
