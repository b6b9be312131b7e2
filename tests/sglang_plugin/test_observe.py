"""Reports of decode steps: which requests, which times, which flags."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgov.client import Report
from specgov.client.messages import report_to_proto
from specgov.sglang_plugin.observe import Observer
from specgov.sglang_plugin.orders import Kind
from specgov.sglang_plugin.policy import Launch
from specgov.sglang_plugin.slots import MAX_AWAY


class World:
    """An observer with a clock, and a scheduler's round in one call."""

    def __init__(self, fakes: Any, graphs: tuple[int, ...] = (), warm_up_comes: bool = False) -> None:
        self.fakes = fakes
        self.now_s = 100.0
        self.kv_reads = 0
        self.scheduler = fakes.Scheduler(waiting_queue=[1, 2])
        self.observer = Observer(lambda: self.now_s, graphs, self._kv, warm_up_comes=warm_up_comes)
        self.iteration = 0

    def _kv(self) -> float:
        self.kv_reads += 1
        return 0.25

    def round(
        self,
        reqs: list[Any],
        accepted: list[int] | None,
        *,
        width: int | None = 4,
        mode: str = "decode",
        during: Callable[[], None] = lambda: None,
        launch: Launch | None = None,
        seconds: float = 0.01,
        graph: bool = False,
        grammar: bool = False,
    ) -> Report | None:
        self.iteration += 1
        self.observer.round_begins()
        batch = self.fakes.Batch(reqs, self.iteration, mode, grammar)
        result = self.fakes.Result(width, accepted, graph)
        before = self.observer.before(batch)
        during()
        self.now_s += seconds
        report = self.observer.after(self.scheduler, batch, result, before, launch)
        return report and report._replace(
            slots=np.frombuffer(report.slots, "<u2"), generations=np.frombuffer(report.generations, np.uint8)
        )


@pytest.fixture
def world(fakes: Any) -> World:
    return World(fakes)


def test_what_a_report_says(world: World, fakes: Any) -> None:
    reqs = [fakes.Request("a", prompt=10, output=5), fakes.Request("b", prompt=1, output=2)]
    world.round(reqs, [1, 1])
    report = world.round(reqs, [3, 0], launch=Launch(3, 17, Kind.TABLE), seconds=0.0125)
    assert report.step_id == 2
    assert (report.batch_size, report.num_steps, report.decision_id) == (2, 3, 17)
    assert list(report.accepted) == [3, 0]
    assert report.slots.tolist() == [0, 1]
    assert report.generations.tolist() == [1, 1]
    assert (report.sum_seq_len_tokens, report.max_seq_len_tokens) == (18, 15)
    assert (report.waiting_requests, report.kv_use_ratio) == (2, 0.25)
    assert (report.step_time_valid, report.step_time_us) == (True, pytest.approx(12_500, abs=1))
    flags = report.after_prefill, report.after_idle, report.has_grammar, report.warm_up
    assert flags == (False,) * 4
    assert (report.cuda_graph_ran, report.padded_batch_size) == (False, 0)
    assert report.engine_rule_num_steps is None
    message = report_to_proto(report, 0)
    assert message.accepted_drafts == b"\x03\x00"


def test_requests_that_had_ended_before_are_left_out(world: World, fakes: Any) -> None:
    reqs = [fakes.Request(name) for name in "abcd"]
    reqs[1].finished_reason = "length"  # finished in the step before, after this one was launched
    reqs[2].is_retracted = True
    report = world.round(reqs, [3, 2, 1, 0])
    assert report.batch_size == 4
    assert list(report.accepted) == [3, 0]
    assert report.slots.tolist() == [0, 1]
    assert report.sum_seq_len_tokens == 10


def test_a_request_that_ends_by_this_result_is_told_and_its_slot_is_free(world: World, fakes: Any) -> None:
    reqs = [fakes.Request("a"), fakes.Request("b")]

    def finish() -> None:
        reqs[0].finished_reason = "stop"

    report = world.round(reqs, [3, 1], during=finish)
    assert list(report.accepted) == [3, 1]
    report = world.round([fakes.Request("c"), reqs[1]], [0, 1])
    assert report.slots.tolist() == [0, 1]
    assert report.generations.tolist() == [2, 1]
    # Nobody is live any more: the step is told all the same, with no entries.
    reqs[1].finished_reason = "stop"
    report = world.round([reqs[1]], [1])
    assert (report.batch_size, len(report.accepted), len(report.slots)) == (1, 0, 0)


def test_a_request_that_ends_in_the_step_in_which_another_comes_is_still_itself(
    world: World, fakes: Any
) -> None:
    a, b, c = (fakes.Request(name) for name in "abc")

    def finish() -> None:
        a.finished_reason = "stop"

    world.round([a, b], [0, 0])
    report = world.round([a, b, c], [0, 0, 0], during=finish)
    assert (report.slots.tolist(), report.generations.tolist()) == ([0, 1, 2], [1, 1, 1])
    report = world.round([b, c, fakes.Request("d")], [0, 0, 0])
    assert (report.slots.tolist(), report.generations.tolist()) == ([1, 2, 0], [1, 1, 2])


FATES = st.sampled_from(["stays"] * 6 + ["ends by the result", "ends after it", "is retracted", "comes back"])


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.lists(FATES, max_size=8), st.booleans()), max_size=30))
def test_a_slot_and_generation_is_one_request_whatever_happens_to_it(fakes: Any, steps: Any) -> None:
    """In each step some come, and each that is there meets a fate; those that ended stay a step longer."""
    world, reqs, ended = World(fakes), [], []
    names: dict[str, tuple[int, int]] = {}
    for number, (new, fates, idle) in enumerate(steps):
        reqs = [r for r in reqs if r not in ended] + [fakes.Request(f"{number}-{i}") for i in range(new)]
        batch = [*reqs, *ended]
        met = list(zip(reqs, fates, strict=False))
        live = [r.rid for r in batch if r.finished_reason is None and not r.is_retracted]

        def happens(met: Any = met) -> None:
            for request, fate in met:
                if fate == "ends by the result" and not request.is_retracted:
                    request.finished_reason = "stop"

        report = world.round(batch, [0] * len(batch), during=happens)
        for rid, *name in zip(live, report.slots.tolist(), report.generations.tolist(), strict=True):
            assert names.setdefault(rid, tuple(name)) == tuple(name)
        for request, fate in met:
            if fate == "ends after it":
                request.finished_reason = "abort"
            elif fate in ("is retracted", "comes back"):
                request.is_retracted = fate == "is retracted"
        ended = [r for r in reqs if r.finished_reason is not None]
        for _ in range(3 * idle):
            world.observer.round_begins()
    assert len(set(names.values())) == len(names)


def test_the_slot_of_a_request_that_ends_between_results_is_free(world: World, fakes: Any) -> None:
    a, b = fakes.Request("a"), fakes.Request("b")
    world.round([a, b], [0, 0])
    a.finished_reason = "abort"
    report = world.round([a, b, fakes.Request("c")], [0, 0, 0])
    assert (report.slots.tolist(), report.generations.tolist()) == ([1, 0], [1, 2])


def test_requests_are_let_go_when_none_runs_and_those_that_live_keep_their_slots(
    world: World, fakes: Any
) -> None:
    reqs = [fakes.Request(name) for name in "abc"]
    world.round(reqs, [0, 0, 0])
    reqs[0].finished_reason = "stop"
    references = [weakref.ref(r) for r in reqs]
    del reqs
    assert any(r() for r in references)
    for _ in range(2):  # the next result might come in the first of these rounds
        world.observer.round_begins()
    assert not any(r() for r in references)
    report = world.round([fakes.Request(name) for name in "cdb"], [0, 0, 0])
    assert (report.slots.tolist(), report.generations.tolist()) == ([2, 0, 1], [1, 2, 1])


def test_many_requests_keep_their_slots_when_one_of_them_ends(world: World, fakes: Any) -> None:
    reqs = [fakes.Request(str(number)) for number in range(MAX_AWAY + 10)]
    before = world.round(reqs, [0] * len(reqs))
    reqs[0].finished_reason = "stop"
    after = world.round(reqs[1:], [0] * (len(reqs) - 1))
    assert after.slots.tolist() == before.slots.tolist()[1:]
    assert after.generations.tolist() == before.generations.tolist()[1:]


def test_a_retracted_request_comes_back_as_the_same(world: World, fakes: Any) -> None:
    a, b = fakes.Request("a"), fakes.Request("b")
    world.round([a, b], [0, 0])
    b.is_retracted = True
    world.round([a], [0])
    b.is_retracted = False
    report = world.round([b, a], [0, 0])
    assert report.slots.tolist() == [1, 0]
    assert report.generations.tolist() == [1, 1]


def test_a_step_before_a_prefill_has_no_time_of_its_own(world: World, fakes: Any) -> None:
    """The overlapping loop launches an iteration before it processes the result of the one before."""
    reqs = [fakes.Request("a")]

    def round_with(launched: str | None) -> Report:
        batch = fakes.Batch([], world.iteration + 2, launched)
        world.scheduler.result_queue = [] if launched is None else [(batch, object())]
        report = world.round(reqs, [0], seconds=0.03 if launched == "extend" else 0.01)
        assert report is not None
        return report

    round_with("decode")
    assert round_with("decode").step_time_us == pytest.approx(10_000, abs=1)
    held_up = round_with("extend")
    assert (held_up.step_time_valid, held_up.step_time_us, held_up.after_prefill) == (False, 0, False)
    assert round_with(None).step_time_valid  # nothing was launched: the batch has ended
    del world.scheduler.result_queue  # the loop without overlap has none in some releases
    assert world.round(reqs, [0]).step_time_valid


def test_times_only_between_decode_steps_that_follow_each_other(world: World, fakes: Any) -> None:
    reqs = [fakes.Request("a")]

    def valid(**rest: Any) -> bool:
        report = world.round(reqs, [0], **rest)
        assert (report.step_time_us > 0) == report.step_time_valid
        return report.step_time_valid

    assert not valid()  # the first
    assert valid()
    assert world.round(reqs, None, width=None, mode="extend") is None
    report = world.round(reqs, [0])
    assert report.after_prefill
    assert not report.step_time_valid
    assert valid()
    world.observer.round_begins()  # a round without a result: nothing ran
    report = world.round(reqs, [0])
    assert report.after_idle
    assert not report.step_time_valid
    assert valid()
    world.observer.break_interval()
    assert not valid()
    assert valid()
    world.iteration += 1  # an iteration whose result was not seen
    assert not valid()


def test_other_results_are_no_reports_and_break_the_interval(world: World, fakes: Any) -> None:
    reqs = [fakes.Request("a")]
    world.round(reqs, [0])
    assert world.round(reqs, None, mode="prebuilt") is None
    assert not world.round(reqs, [0]).step_time_valid
    assert world.round(reqs, None) is None  # no speculation in it
    assert world.round(reqs, [0, 0]) is None  # a list that does not fit the batch
    assert not world.round(reqs, [0]).step_time_valid


def test_an_idle_gap_is_told_though_a_prefill_came_between(world: World, fakes: Any) -> None:
    reqs = [fakes.Request("a")]
    world.round(reqs, [0])
    for _ in range(5):
        world.observer.round_begins()
    world.round(reqs, None, mode="extend")
    report = world.round(reqs, [0])
    assert report.after_idle
    assert report.after_prefill
    assert not world.round(reqs, [0]).after_idle


def test_health_checks_and_the_servers_own_first_request_are_warm_up(fakes: Any) -> None:
    world = World(fakes, warm_up_comes=True)
    assert world.round([fakes.Request("first")], [0]).warm_up
    assert world.round([fakes.Request("first")], [0]).warm_up
    assert not world.round([fakes.Request("second")], [0]).warm_up
    assert not world.round([fakes.Request("first"), fakes.Request("second")], [0, 0]).warm_up
    assert world.round([fakes.Request("HEALTH_CHECK_1")], [0]).warm_up
    assert not world.round([fakes.Request("HEALTH_CHECK_1"), fakes.Request("second")], [0, 0]).warm_up
    assert not World(fakes).round([fakes.Request("first")], [0]).warm_up


def test_padding_is_told_where_a_graph_ran(fakes: Any) -> None:
    world = World(fakes, graphs=(1, 2, 4))
    reqs = [fakes.Request(name) for name in "abc"]
    assert world.round(reqs, [0] * 3, graph=True).padded_batch_size == 4
    assert world.round(reqs, [0] * 3, graph=False).padded_batch_size == 0
    assert world.round(reqs[:1], [0], graph=True).cuda_graph_ran


def test_sglangs_choice_is_told_where_its_rule_decided(world: World, fakes: Any) -> None:
    reqs = [fakes.Request("a")]
    report = world.round(reqs, [0], launch=Launch(3, 0, Kind.ENGINES_RULE))
    assert (report.engine_rule_num_steps, report.decision_id) == (3, 0)
    # A launch that cannot have made this result says nothing.
    report = world.round(reqs, [0], launch=Launch(1, 5, Kind.TABLE))
    assert (report.num_steps, report.decision_id, report.engine_rule_num_steps) == (3, 0, None)


def test_grammar_is_marked_and_the_kv_cache_is_not_read_every_step(world: World, fakes: Any) -> None:
    reqs = [fakes.Request("a")]
    assert world.round(reqs, [0], grammar=True).has_grammar
    for _ in range(15):
        world.round(reqs, [0])
    assert world.kv_reads == 2
