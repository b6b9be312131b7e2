"""Alarms: what raises each, that nothing is learnt while it stands, and what ends it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from specgov.controller.guard.alarms import PROBE_DECISIONS, Alarms
from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.config import GuardConfig
from specgov.policies.types import StepObservation

CONFIG = GuardConfig(
    clear_steps=5,
    stale_steps=10,
    zero_acceptance_requests=12,
    first_backoff_steps=8,
    largest_backoff_steps=20,
)


def step(
    step_id: int, num_steps: int = 3, accepted: Iterable[int] = (1, 0), **changes: Any
) -> StepObservation:
    """A step of 2 requests at 10 ms."""
    fields: dict[str, Any] = {
        "batch_size": 2,
        "slots": np.zeros(0, np.uint16),
        "generations": np.zeros(0, np.uint8),
        "sum_seq_len_tokens": 100,
        "max_seq_len_tokens": 50,
        "step_ms": 10.0,
    }
    return StepObservation(
        step_id=step_id, num_steps=num_steps, accepted=np.array(accepted, np.uint8), **{**fields, **changes}
    )


class Bench:
    """Alarms that hear of consecutive steps; events are kept in order."""

    def __init__(self, config: GuardConfig = CONFIG) -> None:
        self.now_s = 100.0
        self.step_id = 0
        self.events: list[tuple[str, GuardCause]] = []
        self.alarms = Alarms(
            config,
            lambda: self.now_s,
            lambda cause: self.events.append(("begins", cause)),
            lambda cause: self.events.append(("ends", cause)),
        )

    def hear(self, times: int = 1, dropped: int = 0, gap: int = 1, **changes: Any) -> list[bool]:
        """Observe steps; whether each may be learnt from."""
        learnt = []
        for _ in range(times):
            self.step_id += gap
            self.now_s += 0.01
            seen = step(self.step_id, **changes)
            learnt.append(self.alarms.observe(seen, int(seen.accepted.sum()), dropped))
        return learnt


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    assert all(bench.hear(20))
    return bench


def test_an_alarm_ends_after_sound_steps_in_a_row_none_of_which_is_learnt_from(bench: Bench) -> None:
    bench.alarms.raise_alarm(GuardCause.IMPOSSIBLE_REPORT)
    assert bench.hear(3) == [False] * 3
    assert bench.alarms.clears_after_steps == 2
    bench.alarms.raise_alarm(GuardCause.IMPOSSIBLE_REPORT)  # again: the row begins anew
    assert bench.hear(6) == [False] * 5 + [True]
    assert bench.events == [
        ("begins", GuardCause.IMPOSSIBLE_REPORT),
        ("ends", GuardCause.IMPOSSIBLE_REPORT),
    ]
    assert bench.alarms.times == {GuardCause.IMPOSSIBLE_REPORT: 1}


def test_a_clock_that_goes_back_alarms(bench: Bench) -> None:
    bench.now_s -= 50
    assert bench.hear() == [False]
    assert bench.alarms.standing is GuardCause.CLOCK_STEPPED
    assert bench.hear(6) == [False] * 5 + [True]


def test_a_clock_that_jumps_forward_is_silence_and_no_alarm(bench: Bench) -> None:
    bench.now_s += 1e6
    assert bench.alarms.silent_s == pytest.approx(1e6)
    assert bench.hear() == [True]


@pytest.mark.parametrize(
    ("changes", "alarms"),
    [
        ({"gap": 10}, False),  # nine steps without a report
        ({"gap": 11}, True),
        ({"gap": 11, "after_prefill": True}, False),  # iterations of prefill have ids, and no report
        ({"gap": 11, "after_idle": True}, False),
        ({"dropped": 9}, False),
        ({"dropped": 10}, True),
    ],
)
def test_steps_that_were_not_reported(bench: Bench, changes: dict[str, Any], alarms: bool) -> None:
    assert bench.hear(**changes) == [not alarms]
    assert bench.alarms.standing is (GuardCause.REPORTS_STOPPED if alarms else GuardCause.NONE)


def test_what_went_unreported_before_a_stream_is_no_fault(bench: Bench) -> None:
    bench.alarms.stream_began(new_boot=False)
    assert bench.hear(gap=1000, dropped=500) == [True]


def test_one_jump_of_step_times_is_left_out_and_three_are_an_alarm(bench: Bench) -> None:
    assert bench.hear(step_ms=500.0) == [False]
    assert bench.hear() == [True]
    bench.hear(2, step_ms=500.0)
    assert bench.alarms.standing is GuardCause.NONE  # 1 - 1/16 + 2
    bench.hear(step_ms=500.0)
    assert bench.alarms.standing is GuardCause.STEP_TIME
    assert bench.hear(6) == [False] * 5 + [True]


def test_a_server_that_is_slower_for_good_is_believed(bench: Bench) -> None:
    """After ``clear_steps`` jumps in a row that is how it is; then so many sound steps end the alarm."""
    assert bench.hear(11, step_ms=500.0) == [False] * 10 + [True]
    assert bench.alarms.standing is GuardCause.NONE


def test_steps_without_a_valid_time_are_sound(bench: Bench) -> None:
    assert bench.hear(3, step_ms=None) == [True] * 3


# Zero acceptance: 12 verified requests, so 6 steps of two. The first wait is 8 steps, then 16, then 20.


def test_nothing_accepted_over_so_many_verified_requests_alarms(bench: Bench) -> None:
    assert bench.hear(5, accepted=(0, 0)) == [True] * 5
    assert bench.hear(accepted=(0, 0)) == [False]
    assert bench.alarms.standing is GuardCause.ZERO_ACCEPTANCE


@pytest.mark.parametrize(
    "between",
    [{"accepted": (0, 1)}, {"num_steps": 3, "accepted": (3, 0)}],
)
def test_one_accepted_draft_starts_the_count_again(bench: Bench, between: dict[str, Any]) -> None:
    bench.hear(5, accepted=(0, 0))
    bench.hear(**between)
    bench.hear(5, accepted=(0, 0))
    assert bench.alarms.standing is GuardCause.NONE


def test_steps_that_verify_nothing_do_not_count(bench: Bench) -> None:
    bench.hear(100, num_steps=0, accepted=(0, 0))
    bench.hear(100, num_steps=3, accepted=())
    assert bench.alarms.standing is GuardCause.NONE


def decisions(bench: Bench, count: int, zeros: bool = True) -> list[bool]:
    """Whether each of so many decisions, one a step, is a probe; a probe's step verifies two requests."""
    probes = []
    for _ in range(count):
        probes.append(probe := bench.alarms.takes_probe())
        bench.hear(num_steps=1 if probe else 0, accepted=(0, 0) if zeros or not probe else (1, 0))
    return probes


def test_probes_come_ever_more_rarely_and_never_cease(bench: Bench) -> None:
    bench.hear(6, accepted=(0, 0))
    waits = [(8, True), (16, False), (20, False), (20, False)]
    for wait, first in waits:
        # A wait begins with the last probe's decision, and that step passes too; the first with the alarm.
        assert decisions(bench, wait - (0 if first else 1)) == [False] * (wait - (0 if first else 1))
        assert decisions(bench, PROBE_DECISIONS) == [True] * PROBE_DECISIONS
    assert bench.alarms.times == {GuardCause.ZERO_ACCEPTANCE: 1}


def test_one_accepted_draft_of_a_probe_ends_the_alarm_and_is_learnt_from(bench: Bench) -> None:
    bench.hear(6, accepted=(0, 0))
    decisions(bench, 8)
    assert bench.alarms.takes_probe()
    assert bench.hear(num_steps=1, accepted=(1, 0)) == [True]
    assert bench.alarms.standing is GuardCause.NONE
    assert not bench.alarms.takes_probe()


def test_a_draft_that_is_accepted_once_in_a_while_is_tried_ever_more_rarely(bench: Bench) -> None:
    """An alarm that comes again before ``clear_steps`` steps with accepted drafts waits longer."""
    waits = []
    for _ in range(4):
        bench.hear(6, accepted=(0, 0))
        waits.append(bench.alarms.clears_after_steps)
        bench.hear(accepted=(1, 0))
    assert waits == [8, 16, 20, 20]
    bench.hear(5, accepted=(1, 0))
    bench.hear(6, accepted=(0, 0))
    assert bench.alarms.clears_after_steps == 8


def test_other_weights_end_the_alarm(bench: Bench) -> None:
    bench.hear(6, accepted=(0, 0))
    bench.alarms.draft_changed()
    assert bench.alarms.standing is GuardCause.NONE
    assert bench.hear(5, accepted=(0, 0)) == [True] * 5


def test_zero_acceptance_goes_before_other_alarms(bench: Bench) -> None:
    """Its smallest tier is the safer answer: the baseline may speculate."""
    bench.alarms.raise_alarm(GuardCause.CLOCK_STEPPED)
    bench.hear(6, accepted=(0, 0))
    assert bench.alarms.standing is GuardCause.ZERO_ACCEPTANCE
