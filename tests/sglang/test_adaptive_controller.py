"""Our policy and a rule of ours, driven by SGLang's own AdaptiveController over a worker that takes notes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specgov.policies.registry import make_policy
from specgov.policies.types import EngineSpec, Policy, PolicyContext
from specgov.sglang_plugin.guarded import Guard
from specgov.sglang_plugin.orders import OWN_RULE
from specgov.sglang_plugin.policy import GovernedPolicy

pytestmark = pytest.mark.sglang


class Worker:
    """SGLang's AdaptiveSpecWorker, without a model."""

    def __init__(self, num_steps: int) -> None:
        self.speculative_num_steps = num_steps
        self.built: dict[int, tuple[int, list[int] | None]] = {}
        self.applied: list[int] = []

    def build_adaptive_runtime_state(
        self,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> object:
        from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState

        self.built[speculative_num_steps] = (speculative_num_draft_tokens, cuda_graph_bs)
        return SpecRuntimeState(speculative_num_steps, speculative_num_draft_tokens, *[None] * 6)

    def apply_runtime_state(self, state: object) -> None:
        self.speculative_num_steps = state.speculative_num_steps
        self.applied.append(state.speculative_num_steps)


def start(text: str, tiers: list[int], initial: int, graphs: list[int] | None = None):
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController

    def make(graph_batch_sizes: Sequence[int]) -> Policy:
        engine = EngineSpec(tuple(tiers), tuple(graph_batch_sizes))
        return make_policy(text, PolicyContext(engine, np.random.default_rng(0), lambda: 0.0))

    class Prepared:
        """SGLang's own rule, which only says here what is prepared."""

        candidate_steps = tiers

        def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
            pass

    worker = Worker(initial)
    policy = GovernedPolicy(Prepared(), tiers, make, lambda: (OWN_RULE, 0), Guard(1), initial_steps=initial)
    controller = AdaptiveController(worker, policy)
    controller.init_states(graphs)
    return controller, worker


def step(controller, worker: Worker, batch_size: int, acceptance: int) -> int:
    """One decode step that accepts ``acceptance`` drafts of each request, or all; returns its tier."""
    controller.activate_step_by_batch(batch_size)
    num_steps = worker.speculative_num_steps
    controller.on_verify_complete([min(acceptance, num_steps)] * batch_size, batch_size)
    assert worker.speculative_num_steps == num_steps, "a result never switches at once"
    return num_steps


def test_every_tier_is_prepared_for_every_graph() -> None:
    _, worker = start("static:3", [0, 1, 3], 3, graphs=[4, 1, 2])
    graphs = [1, 2, 4]
    assert worker.built == {0: (1, graphs), 1: (2, graphs), 3: (4, graphs)}
    assert worker.applied == [3]


def test_a_threshold_follows_the_batch() -> None:
    controller, worker = start("threshold:4:3", [0, 1, 3], 1)
    tiers = [step(controller, worker, batch_size, 9) for batch_size in (1, 3, 4, 64, 3, 3)]
    assert tiers == [3, 3, 0, 0, 3, 3]
    assert worker.applied == [1, 3, 0, 3]  # the start, then changes only


def test_ema_walks_down_and_up_as_sglangs_own_demonstration_does() -> None:
    # Slot 1 of SGLang's table from 3: 15 results to the first review, at average 2 * 0.8^15 = 0.07 down to 1;
    # with all accepted, 1 - (1 - 0.07) * 0.8^5 = 0.695 > 0.5 up to 3 after 5 more.
    controller, worker = start("ema", [0, 1, 3, 5, 7], 3)
    assert [step(controller, worker, 1, 0) for _ in range(15)] == [3] * 15
    assert [step(controller, worker, 1, 9) for _ in range(5)] == [1] * 5
    assert step(controller, worker, 1, 9) == 3


@pytest.mark.parametrize("seed", range(3))
def test_ema_switches_the_worker_where_sglangs_own_rule_does(seed: int) -> None:
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    ours, our_worker = start("ema", [0, 1, 3, 5, 7], 3, graphs=[1, 2, 4, 8, 16, 32])
    their_worker = Worker(3)
    theirs = AdaptiveController(their_worker, AdaptiveSpeculativeParams(3))
    theirs.init_states([1, 2, 4, 8, 16, 32])
    rng = np.random.default_rng(seed)
    for step_number in range(2000):
        batch_size = int(rng.integers(1, 80))
        ours.activate_step_by_batch(batch_size)
        theirs.activate_step_by_batch(batch_size)
        num_steps = their_worker.speculative_num_steps
        assert our_worker.speculative_num_steps == num_steps
        high = num_steps + 1 if step_number // 200 % 2 else 1  # by turns some accepted and none
        accepted = rng.integers(0, high, batch_size).tolist()
        ours.on_verify_complete(accepted, batch_size)
        theirs.on_verify_complete(accepted, batch_size)
