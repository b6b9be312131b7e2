"""The policy in the place of SGLang's own: picks the tier of each step that is about to be launched.

The members are those that SGLang's ``AdaptiveController`` calls (``AdaptiveSpecPolicy`` in
sglang/srt/speculative/adaptive_runtime_state.py from 0.5.20 on, ``AdaptiveSpeculativeParams`` before). They
run on the scheduler's thread, where an exception would end the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from specgov.policies.types import BatchView, Policy, StepObservation
from specgov.sglang_plugin.guarded import Guard
from specgov.sglang_plugin.orders import Kind, Order

# To look an enum's member up is a call, in Python 3.11, and costs some microseconds out of the caches.
_TABLE, _OWN_RULE, _ENGINES_RULE = Kind.TABLE, Kind.OWN_RULE, Kind.ENGINES_RULE
_NO_SLOTS = np.zeros(0, np.uint16)
_NO_GENERATIONS = np.zeros(0, np.uint8)
_LEARNING_RULES = ("ema",)
"""Of the fallback rules, those that learn from results."""
_MAX_LAUNCHES = 8
"""Launches whose results are awaited; SGLang has two of them at most."""


class EnginesRule(Protocol):
    """SGLang's own policy: ``AdaptiveSpeculativeParams``."""

    @property
    def candidate_steps(self) -> list[int]: ...  # noqa: D102
    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None: ...  # noqa: D102
    def get_steps_for_batch(self, batch_size: int) -> int: ...  # noqa: D102
    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None: ...  # noqa: D102
    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None: ...  # noqa: D102


class Launch(NamedTuple):
    """A step that was launched: its tier, the decision that it followed (0 = none), and what chose it."""

    num_steps: int
    decision_id: int
    kind: Kind


@final
class GovernedPolicy:
    """SGLang's policy that follows orders, else the fallback rule, else SGLang's own rule.

    Every rank of a tensor-parallel group has one, and all choose alike: what they choose by is the order in
    force, the batch, and results, which are the same on every rank.

    Args:
        engines_rule: SGLang's own policy, as SGLang would have made it. While an order says so, it is asked
            and told as if nothing else were there.
        tiers: those that may be applied, within the rule's ``candidate_steps``.
        make_fallback: makes the fallback rule, given the CUDA-graph batch sizes.
        newest_order: the order for the step that is about to be launched and the id of the decision in it.
        guard: counts exceptions.
        initial_steps: the tier that the server starts with.
        min_steps_between_switches: steps for which a tier is kept at least; not while SGLang's rule decides.
        governs: False where SGLang's rule decides for good; then also its graphs are prepared, not ours.
        after_switch: called when the tier changes.

    """

    def __init__(
        self,
        engines_rule: EnginesRule,
        tiers: Sequence[int],
        make_fallback: Callable[[Sequence[int]], Policy],
        newest_order: Callable[[], tuple[Order, int]],
        guard: Guard,
        *,
        initial_steps: int,
        min_steps_between_switches: int = 1,
        governs: bool = True,
        after_switch: Callable[[], None] = lambda: None,
    ) -> None:
        self._engines_rule = engines_rule
        self._tiers = frozenset(tiers)
        self._make_fallback = make_fallback
        self._newest_order = newest_order
        self._guard = guard
        self._min_steps = min_steps_between_switches
        self._governs = governs
        self._after_switch = after_switch
        self._fallback: Policy | None = None
        self._learner: Policy | None = None  # the fallback rule, where it is one that learns
        self._graphs: list[int] | None = None
        self._num_steps = initial_steps  # of the newest launch
        self._kept_for = min_steps_between_switches  # launches at that tier
        self._kind = Kind.OWN_RULE if governs else Kind.ENGINES_RULE
        self._launched: deque[Launch] = deque(maxlen=_MAX_LAUNCHES)
        self.finished: Launch | None = None
        """The launch whose result came last; None where that is not known."""

    @property
    def candidate_steps(self) -> list[int]:
        """Every tier that SGLang prepares: also those of its own rule, which may have to take over."""
        return self._engines_rule.candidate_steps

    @property
    def graph_batch_sizes(self) -> tuple[int, ...]:
        """The CUDA graphs' batch sizes, ascending; empty without graphs."""
        return tuple(self._graphs or ())

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Make the fallback rule; SGLang calls this once, before the first step.

        Without a fallback SGLang's rule decides for good.
        """
        self._engines_rule.set_cuda_graph_bs(cuda_graph_bs)
        try:
            self._graphs = sorted(cuda_graph_bs) if cuda_graph_bs else None
            if self._governs:
                self._fallback = self._make_fallback(self.graph_batch_sizes)
                self._learner = self._fallback if self._fallback.name in _LEARNING_RULES else None
        except Exception as error:  # noqa: BLE001 whatever it is, the scheduler must start
            self._guard.failed("fallback", error)

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Every batch size for a tier that may be applied at each; else as SGLang's rule says."""
        if self._governs and step in self._tiers:
            return None if self._graphs is None else list(self._graphs)
        return self._engines_rule.cuda_graph_bs_for_step(step)

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The tier of the step that is about to be launched."""
        try:
            launch = self._choose(batch_size)
        except Exception as error:  # noqa: BLE001 whatever it is, the scheduler must live
            self._guard.failed("decide", error)
            launch = Launch(self._engines_rule.get_steps_for_batch(batch_size), 0, _ENGINES_RULE)
        self._launched.append(launch)
        num_steps, _, self._kind = launch
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._kept_for = 0
            self._after_switch()
        self._kept_for += 1
        return num_steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        """Take a result in. Only SGLang's rule may switch at once; we do so before a launch, nowhere else."""
        self.finished = self._launched.popleft() if self._launched else None
        if self._kind is _ENGINES_RULE:
            num_steps = self._engines_rule.on_verify_complete(num_correct_drafts_per_req, batch_size)
            if num_steps is not None and num_steps != self._num_steps:
                self._num_steps = num_steps
                self._after_switch()
            return num_steps
        if self._learner is None:
            return None
        try:
            self._show_fallback(self._learner, num_correct_drafts_per_req, batch_size)
        except Exception as error:  # noqa: BLE001 whatever it is, the scheduler must live
            self._guard.failed("learn", error)
        return None

    def forget_launches(self) -> None:
        """The order of results is not that of launches any more: know nothing of those that wait."""
        self._launched.clear()
        self.finished = None

    def _choose(self, batch_size: int) -> Launch:
        order, decision_id = self._newest_order()
        if order.kind is _ENGINES_RULE or self._fallback is None:
            return Launch(self._engines_rule.get_steps_for_batch(batch_size), 0, _ENGINES_RULE)
        wanted = order.num_steps_for(batch_size) if order.kind is _TABLE else None
        kind = _TABLE
        if wanted is None or wanted not in self._tiers:
            wanted = self._fallback.choose(BatchView(batch_size)).num_steps_for(batch_size)
            kind, decision_id = _OWN_RULE, 0
        if wanted != self._num_steps and self._kept_for < self._min_steps and self._num_steps in self._tiers:
            wanted, decision_id = self._num_steps, 0
        return tuple.__new__(Launch, (wanted, decision_id, kind))  # faster than Launch(...)

    def _show_fallback(self, rule: Policy, accepted: list[int], batch_size: int) -> None:
        """Let the fallback rule learn, from results of tiers that it would have chosen too.

        What another tier accepted says little of the rule's own, above all nothing at num_steps 0.
        """
        launch = self.finished
        if launch is not None and launch.num_steps == rule.choose(BatchView(batch_size)).num_steps_for(
            batch_size
        ):
            rule.observe(_step(batch_size, launch.num_steps, accepted))


def _step(batch_size: int, num_steps: int, accepted: list[Any]) -> StepObservation:
    return StepObservation(
        0,
        batch_size,
        num_steps,
        accepted=np.array(accepted, np.uint8),
        slots=_NO_SLOTS,
        generations=_NO_GENERATIONS,
        sum_seq_len_tokens=0,
        max_seq_len_tokens=0,
    )
