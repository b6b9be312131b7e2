"""Stand-ins for what SGLang passes to the plugin; tests/sglang has the real things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from specgov.client import Decision, Report, TierRange


@dataclass
class Request:
    """A request with a prompt of ``prompt`` tokens and ``output`` tokens so far."""

    rid: str
    prompt: int = 4
    output: int = 1
    finished_reason: object | None = None
    is_retracted: bool = False

    @property
    def origin_input_ids(self) -> list[int]:
        return [0] * self.prompt

    @property
    def output_ids(self) -> list[int]:
        return [0] * self.output


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend(self) -> bool:
        return self.name == "extend"


@dataclass
class Batch:
    reqs: list[Request]
    forward_iter: int
    mode: str = "decode"
    has_grammar: bool = False

    @property
    def forward_mode(self) -> Mode:
        return Mode(self.mode)


@dataclass
class Result:
    speculative_num_draft_tokens: int | None
    num_correct_drafts_per_req_cpu: list[int] | None
    can_run_cuda_graph: bool = False


@dataclass
class Scheduler:
    waiting_queue: list[object] = field(default_factory=list)
    forward_ct: int = 0
    result_queue: list[tuple[Batch, object]] = field(default_factory=list)


class EnginesRule:
    """SGLang's policy: answers with what a test gives it, and keeps what it is told."""

    def __init__(self, steps: int = 1, candidates: tuple[int, ...] = (0, 1, 3, 5)) -> None:
        self.steps = steps
        self.candidate_steps = list(candidates)
        self.switch_to: int | None = None
        self.results: list[tuple[list[int], int]] = []
        self.graphs: list[int] | None = None

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self.graphs = cuda_graph_bs

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self.steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        self.results.append((num_correct_drafts_per_req, batch_size))
        return self.switch_to

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        return [step] if self.graphs else None


class FakeClient:
    """A ``StreamClient`` that holds what a test gives it."""

    def __init__(self) -> None:
        self.decision: Decision | None = None  # the one that holds
        self.last: Decision | None = None  # the one that came last
        self.asked: list[int] = []
        self.reports: list[Report] = []
        self.events: list[tuple[int, int]] = []
        self.closed = False

    def start(self) -> None:
        pass

    def current(self, step_id: int) -> Decision | None:
        self.asked.append(step_id)
        return self.decision

    def newest(self) -> Decision | None:
        return self.decision or self.last

    def submit(self, report: Report) -> None:
        self.reports.append(report)

    def event(self, kind: int, step_id: int) -> None:
        self.events.append((kind, step_id))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="session")
def fakes() -> Any:
    """The stand-in classes, by name."""

    class Fakes:
        pass

    for kind in (Request, Batch, Result, Scheduler, EnginesRule, FakeClient):
        setattr(Fakes, kind.__name__, kind)
    return Fakes


@pytest.fixture
def decide() -> Callable[..., Decision]:
    """A decision: ``decide(id, num_steps, (low, high), *neighbours, reason=1)``."""

    def make(
        decision_id: int,
        num_steps: int,
        sizes: tuple[int, int],
        *others: tuple[int, int, int],
        reason: int = 1,
    ) -> Decision:
        neighbours = tuple(TierRange(*other) for other in others)
        return Decision(
            decision_id, 1, num_steps, *sizes, neighbours, 50, 1000, reason, "test", "1", None, 0.0
        )

    return make
