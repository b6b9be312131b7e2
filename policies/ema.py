"""SGLang 0.5.23's adaptive rule: a moving average of accepted drafts picks a tier in each batch-size slot.

Formula: a batch, padded to its CUDA-graph size, belongs to the slot with the largest batch size at or below
it. A slot at tier k begins with e = k - 1. With m the mean accepted drafts of a step's requests, it sets
e = (1 - ema_alpha) e + ema_alpha m where k > 0. Every ``update_interval`` results after the first
``warmup_batches`` it reviews its tier k_i among its own, k_0 < k_1 < ...:

- down while e <= k_{i-1} - 0.5 + down_hysteresis, where k_{i-1} = 0 counts as 1;
- if it did not go down, up while e > k_i - 0.5 + up_hysteresis;
- if it did not go up and ceiling_coeff > 0, down to at most max(1, ceil(e ceiling_coeff));
- from num_steps 0 always to the next tier, a probe.

Source: the behaviour of ``AdaptiveSpeculativeParams`` in sglang/srt/speculative/adaptive_spec_params.py;
tests drive both with the same results. Like it, the rule credits a result to the slot's present tier, not
to the tier that made it; after a switch the two differ for as many steps as a decision lags.
Regimes: good where acceptance differs or drifts and the table suits the model. It does not know what a step
costs, probes for ever in slots that hold 0, and a slot with one tier never changes.
Defaults: SGLang's table and figures. Tiers that the engine lacks are left out.
"""

from __future__ import annotations

import bisect
import math
from typing import ClassVar, final

from specgov.policies.ema_config import EmaConfig, SlotConfig
from specgov.policies.learnt import Learnt
from specgov.policies.tiers import require_tiers, tier_ranges
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    PolicyContext,
    Reason,
    StepObservation,
    TierRange,
)


@final
class Ema(Learnt):
    """SGLang 0.5.23's own rule: a moving average of accepted drafts by batch-size slot."""

    name: ClassVar[str] = "ema"
    version: ClassVar[str] = "1"
    Config = EmaConfig

    _slots: list[_Slot]
    _ranges: tuple[TierRange, ...]

    def __init__(self, context: PolicyContext, config: EmaConfig) -> None:
        engine = context.engine
        if config.initial_num_steps is not None:
            require_tiers(engine, [config.initial_num_steps])
        self._engine = engine
        self._configs = config.slots_for(engine)
        self._firsts = [1, *(_first_batch_size(slot.batch_size, engine) for slot in self._configs[1:])]
        union = sorted({tier for slot in self._configs for tier in slot.tiers})
        middle = union[len(union) // 2]
        self._initial = middle if config.initial_num_steps is None else config.initial_num_steps
        self._start()

    def observe(self, step: StepObservation) -> None:
        """Move the average of the slot of the step's batch, and review its tier when it is due."""
        slot = self._slot(step.batch_size)
        if len(step.accepted) and slot.update(int(step.accepted.sum()) / len(step.accepted)):
            self._ranges = self._tier_ranges()

    def choose(self, batch: BatchView) -> Choice:
        """Each slot's tier; the reason is exploration while the batch's slot probes."""
        reason = Reason.EXPLORATION if self._slot(batch.batch_size).probing else Reason.POLICY
        return Choice(self._ranges, reason, propensity=1.0)

    def forget(self) -> None:
        """Start anew in every slot."""
        self._start()

    def estimates(self) -> dict[str, float]:
        """Each slot's average of accepted drafts, by the slot's batch size."""
        return {f"accepted_drafts_from_batch_{slot.config.batch_size}": slot.average for slot in self._slots}

    def _start(self) -> None:
        self._slots = [_Slot(config, self._initial) for config in self._configs]
        self._ranges = self._tier_ranges()

    def _slot(self, batch_size: int) -> _Slot:
        return self._slots[bisect.bisect_right(self._firsts, max(1, batch_size)) - 1]

    def _tier_ranges(self) -> tuple[TierRange, ...]:
        starts = zip(self._firsts, (slot.num_steps for slot in self._slots), strict=True)
        return tier_ranges(self._engine, starts)


class _Slot(Learnt):
    """The tier of one batch-size slot."""

    num_steps: int
    average: float
    probing: bool
    _results: int

    def __init__(self, config: SlotConfig, initial_num_steps: int) -> None:
        tiers = config.tiers
        self.config = config
        self.num_steps = initial_num_steps if initial_num_steps in tiers else tiers[len(tiers) // 2]
        self.average = float(self.num_steps - 1)
        self.probing = False
        self._results = 0

    def update(self, accepted_drafts: float) -> bool:
        """Take in the mean accepted drafts of a step; True where the tier changed."""
        config = self.config
        if self.num_steps > 0:
            self.average = (1 - config.ema_alpha) * self.average + config.ema_alpha * accepted_drafts
        self._results += 1
        reviewed = self._results - config.warmup_batches
        if reviewed <= 0 or reviewed % config.update_interval:
            return False
        return self._review()

    def _review(self) -> bool:
        before, tiers = self.num_steps, self.config.tiers
        index = tiers.index(before)
        if before == 0:
            self.num_steps = tiers[min(index + 1, len(tiers) - 1)]
            if self.num_steps > 0 and self.average < 0:  # no draft was ever seen here
                self.average = float(self.num_steps - 1)
        else:
            lower = self._lower(index)
            self.num_steps = tiers[self._capped(lower if lower < index else self._higher(index), index)]
        self.probing = before == 0 and self.num_steps > 0
        return self.num_steps != before

    def _lower(self, index: int) -> int:
        tiers = self.config.tiers
        while index > 0:
            below = tiers[index - 1]
            threshold = (0.5 if below == 0 else below - 0.5) + self.config.down_hysteresis
            if self.average > threshold:
                break
            index -= 1
        return index

    def _higher(self, index: int) -> int:
        tiers = self.config.tiers
        while index < len(tiers) - 1 and self.average > tiers[index] - 0.5 + self.config.up_hysteresis:
            index += 1
        return index

    def _capped(self, index: int, index_before: int) -> int:
        """``index``, lowered to the ceiling; a rise is never capped, so that higher tiers can be explored."""
        if self.config.ceiling_coeff > 0 and index <= index_before:
            ceiling = max(1, math.ceil(self.average * self.config.ceiling_coeff))
            while index > 0 and self.config.tiers[index] > ceiling:
                index -= 1
        return index


def _first_batch_size(slot_batch_size: int, engine: EngineSpec) -> int:
    """The first batch size whose padded size reaches the slot's."""
    graphs = engine.graph_batch_sizes
    if not graphs or slot_batch_size > graphs[-1]:
        return slot_batch_size
    smaller = bisect.bisect_left(graphs, slot_batch_size)
    return graphs[smaller - 1] + 1 if smaller else 1
