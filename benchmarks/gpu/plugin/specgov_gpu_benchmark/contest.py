"""The state of one scheduler process: the run that its requests belong to, their texts, who decides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specgov.policies.types import EngineSpec
from specgov.sglang_plugin.orders import Kind
from specgov.sglang_plugin.policy import GovernedPolicy, Launch
from specgov.sglang_plugin.versions import draft_kv_stays_warm

from .rid import Run, parse
from .rules import CYCLE, ORACLE, SGLANG, SPECGOV, BySize, Cycle, Oracle, Rule, sglang_policy
from .texts import Texts

if TYPE_CHECKING:
    from .record import Recorder

LARGEST_BATCH_SIZE = 4096
STEPS_BETWEEN_COUNTS = 16


class BenchmarkError(RuntimeError):
    """The contest cannot go on; raised where SGLang catches nothing, so that the server ends with it."""


class Contest:
    """One for each scheduler process."""

    def __init__(self) -> None:
        self.texts = Texts(drafts_go_cold=not draft_kv_stays_warm(os.environ))
        self.run: Run | None = None
        self.recorder: Recorder | None = None
        self.context_tokens = -1
        self.make_sglang_policy: Any = None
        self.own_config: str | None = None
        self._initial_steps = 0
        self._policy: GovernedPolicy | None = None
        self._own_engines_rule: Any = None
        self._rule: Rule | None = None
        self._asks_sglang = False
        self._ids: list[str] = []
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self._launch: Launch | None = None
        self._since_count = 0

    @property
    def follows_specgov(self) -> bool:
        """Whether Specgov's plugin works as in service; it is silent otherwise."""
        return self._rule is None and not self._asks_sglang

    @property
    def finished(self) -> Launch | None:
        """The launch whose result was processed last."""
        return self._policy.finished if self._policy is not None else None

    def govern(self, policy: GovernedPolicy, initial_steps: int) -> None:
        """Take note of the policy in whose place the contest chooses."""
        if self._policy is not None:
            raise BenchmarkError("SGLang asks for a second policy")
        self._policy, self._initial_steps = policy, initial_steps
        self._own_engines_rule = policy._engines_rule

    def begin_step(self, requests: Sequence[Any]) -> None:
        """A decode step of these requests is about to be launched: find their run, choose its tier."""
        ids = [request.rid for request in requests]
        if ids != self._ids:
            self._ids = ids
            run = run_of(ids)
            if run is not None and run != self.run:
                self._begin_run(run)
        self._rows = self.texts.rows(ids, [len(request.origin_input_ids) for request in requests])
        self._launch = self._choose(len(ids))

    @property
    def chosen(self) -> Launch | None:
        """What was chosen for the step that is being launched; None where Specgov is to choose."""
        return self._launch

    def write(self, batch_size: int, num_steps: int) -> NDArray[np.uint8]:
        """Accepted drafts of the step that is being launched, one for each request of its batch."""
        if batch_size != len(self._rows):
            raise BenchmarkError(f"{batch_size} requests are verified, {len(self._rows)} were launched")
        if self._launch is not None and self._launch.num_steps != num_steps:
            raise BenchmarkError(f"num_steps {self._launch.num_steps} was chosen, {num_steps} is verified")
        accepted = self.texts.write(self._rows, num_steps)
        self.context_tokens = self.texts.context_tokens(self._rows)
        return accepted

    def count_context(self, requests: Sequence[Any]) -> None:
        """Count the tokens of a step's requests where nothing is drawn; seldom anew, since it takes time."""
        ids = [request.rid for request in requests]
        self._since_count += 1
        if ids != self._ids or self._since_count >= STEPS_BETWEEN_COUNTS:
            self._ids, self._since_count = ids, 0
            self.context_tokens = sum(len(r.origin_input_ids) + len(r.output_ids) for r in requests)
        else:
            self.context_tokens += len(ids)

    def _choose(self, batch_size: int) -> Launch | None:
        if self._policy is None:
            return None
        if self._asks_sglang:
            tier = self._policy._engines_rule.get_steps_for_batch(batch_size)
            return Launch(tier, 0, Kind.ENGINES_RULE)
        if self._rule is None:
            return None
        return Launch(self._rule.num_steps(batch_size, self._rows), 0, Kind.OWN_RULE)

    def _begin_run(self, run: Run) -> None:
        self.run = run
        self.texts.clear()
        self._rule, self._asks_sglang = None, False
        if self._policy is None:
            return
        policy = self._policy
        policy._engines_rule = self._own_engines_rule
        if run.rule == SPECGOV:
            return
        engine = EngineSpec(
            tiers=tuple(sorted(policy._tiers)),
            graph_batch_sizes=policy.graph_batch_sizes,
            max_running_requests=LARGEST_BATCH_SIZE,
        )
        if run.rule.startswith(SGLANG):
            chosen = sglang_policy(
                run.rule,
                self.make_sglang_policy,
                self._initial_steps,
                self.own_config,
                engine.graph_batch_sizes,
            )
            if outside := set(chosen.candidate_steps) - set(engine.tiers):
                raise BenchmarkError(f"{run.rule} wants the tiers {sorted(outside)}, which are not prepared")
            policy._engines_rule = chosen
            self._asks_sglang = True
        elif run.rule.startswith(ORACLE):
            self._rule = Oracle(run.rule.removeprefix(ORACLE), engine, self.texts)
        elif run.rule.startswith(CYCLE):
            self._rule = Cycle(run.rule.removeprefix(CYCLE), engine)
        else:
            self._rule = BySize(run.rule, engine)


def run_of(ids: Sequence[str]) -> Run | None:
    """The run of a batch's newest request; None where none is the benchmark's.

    A step or two may still hold requests of the run before, which were aborted while the step was launched.
    """
    return next((request.run for request in map(parse, reversed(ids)) if request is not None), None)


def folder() -> str:
    """Where to record; "" turns the plugin off."""
    return os.environ.get("SPECGOV_BENCHMARK_RECORD", "")
