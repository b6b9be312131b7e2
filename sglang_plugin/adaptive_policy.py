"""A decision rule in the place of SGLang's own: the members that SGLang's ``AdaptiveController`` calls.

The members are those of ``AdaptiveSpecPolicy`` (sglang/srt/speculative/adaptive_runtime_state.py, from
SGLang 0.5.20 on). They are called on the scheduler's thread, where an exception would end the server: a rule
that fails is left, logged once, and the server goes on at the tier that it started with.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from specgov.policies.types import BatchView, EngineSpec, Policy, StepObservation

_LOG = logging.getLogger(__name__)
_NO_SLOTS = np.zeros(0, np.uint16)
_NO_GENERATIONS = np.zeros(0, np.uint8)


@final
class AdaptivePolicy:
    """SGLang's ``AdaptiveSpecPolicy`` on top of a rule.

    SGLang passes little to a policy: accepted drafts by request and the batch size. So the rule sees steps
    without sequence lengths, step times and slots. The tier that made a result is not passed either; results
    come in the order of the launches, so it is the oldest launch that waits, among ``decision_lag_steps``.

    Args:
        initial_steps: the tier that the server starts with, one of ``tiers``.
        tiers: every tier that the server prepares. They must be within the union of the server's
            ``--speculative-adaptive-config``, which sizes its buffers.
        make_rule: makes the rule once the engine is known, CUDA-graph batch sizes included.
        decision_lag_steps: 2 in SGLang's overlap loop, 1 without overlap.
        max_running_requests: the server's; 0 where not known.

    """

    def __init__(
        self,
        initial_steps: int,
        tiers: Sequence[int],
        make_rule: Callable[[EngineSpec], Policy],
        *,
        decision_lag_steps: int = 2,
        max_running_requests: int = 0,
    ) -> None:
        if initial_steps not in tiers:
            raise ValueError(
                f"the server starts with num_steps {initial_steps}, which is not among {list(tiers)}"
            )
        self._initial = initial_steps
        self._tiers = tuple(sorted(set(tiers)))
        self._make_rule = make_rule
        self._lag = decision_lag_steps
        self._max_running_requests = max_running_requests
        self._rule: Policy | None = None
        self._graphs: list[int] | None = None
        self._launched: deque[int] = deque(maxlen=decision_lag_steps)
        self._results = 0

    @property
    def candidate_steps(self) -> list[int]:
        """Every tier that the server prepares, ascending."""
        return list(self._tiers)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Make the rule; SGLang calls this once, before the first step.

        Raises:
            PolicyError: the rule cannot be had on this engine. The server does not start.

        """
        self._graphs = sorted(cuda_graph_bs) if cuda_graph_bs else None
        engine = EngineSpec(
            self._tiers, tuple(self._graphs or ()), self._max_running_requests, decision_lag_steps=self._lag
        )
        self._rule = self._make_rule(engine)

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:  # noqa: ARG002 SGLang's signature
        """Every captured batch size, since a rule may use any tier at each; None without CUDA graphs."""
        return self._graphs

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The tier of the step that is about to be launched."""
        num_steps = self._choose(batch_size)
        self._launched.append(num_steps)
        return num_steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        """Learn from a result. Never a switch at once: a tier is chosen before a launch, only there."""
        num_steps = self._launched.popleft() if self._launched else self._initial
        self._results += 1
        if self._rule is None:
            return
        try:
            self._rule.observe(_step(self._results, batch_size, num_steps, num_correct_drafts_per_req))
        except Exception:  # noqa: BLE001 whatever it is, the scheduler must live
            self._leave_rule()

    def _choose(self, batch_size: int) -> int:
        if self._rule is None:
            return self._initial
        try:
            num_steps = self._rule.choose(BatchView(batch_size)).num_steps_for(batch_size)
        except Exception:  # noqa: BLE001 whatever it is, the scheduler must live
            self._leave_rule()
            return self._initial
        return num_steps if num_steps in self._tiers else self._initial

    def _leave_rule(self) -> None:
        _LOG.exception("The rule failed; from now on num_steps stays at %d.", self._initial)
        self._rule = None


def _step(step_id: int, batch_size: int, num_steps: int, accepted: list[int]) -> StepObservation:
    return StepObservation(
        step_id,
        batch_size,
        num_steps,
        accepted=np.array(accepted, np.uint8),
        slots=_NO_SLOTS,
        generations=_NO_GENERATIONS,
        sum_seq_len_tokens=0,
        max_seq_len_tokens=0,
    )
