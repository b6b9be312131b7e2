"""Rows into columns: what a step is joined with, and which events are told."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest

from specgov.controller.report.model import accept_lengths, conditional_acceptance, model_of
from specgov.controller.report.steps import LogContentError, Steps, gather


def only(logs: ModuleType, *rows: dict[str, object]) -> Steps:
    (steps,) = gather(logs.placed(logs.engine_row(), *rows))
    return steps


def test_a_step_is_joined_with_what_it_followed_and_what_was_expected_before_it(logs: ModuleType) -> None:
    first = logs.decision(1, 3, propensity=0.25, expected_tokens=[2.0, 5.0], expected_ms=[4.0, 6.0])
    second = logs.decision(2, 0, propensity=0.5, expected_tokens=[8.0, 9.0], expected_ms=[5.0, 7.0])
    steps = only(
        logs,
        logs.step_row(1, 3, [1, 0, 0, 1], first),  # two requests: 1 and 4 tokens
        logs.step_row(2, 3, [0, 2, 1, 1], second, followed=1),  # four: 2, 2, 3 and 4
        logs.step_row(
            3, 3, [4, 0, 0, 0], None, followed=2
        ),  # decision 2 said 0, so its chance is not this tier's
    )
    assert steps.tokens.tolist() == [5, 11, 4]
    assert steps.survived.tolist() == [[2, 1, 1, 1], [4, 4, 2, 1], [4, 0, 0, 0]]
    np.testing.assert_allclose(steps.propensity, [math.nan, 0.25, math.nan])
    assert steps.own_rule.tolist() == [True, False, False]
    assert steps.decided.tolist() == [-1, 3, 0]
    # Decision 1 was made for two requests, and step 2 had four: twice the tokens.
    np.testing.assert_allclose(steps.expected_tokens, [[math.nan] * 2, [4.0, 10.0], [8.0, 9.0]])
    np.testing.assert_allclose(steps.expected_ms, [[math.nan] * 2, [4.0, 6.0], [5.0, 7.0]])


@pytest.mark.parametrize("change", [{"guard_cause": "budget"}, {"reason": "fallback"}, {"num_steps": 0}])
def test_what_chance_did_not_choose_has_no_propensity(logs: ModuleType, change: dict[str, object]) -> None:
    made = logs.decision(1, 3, propensity=0.5)
    changed = logs.decision(2, **{"num_steps": 3, "propensity": 0.5, **change})
    rows = [
        logs.step_row(1, 3, [1, 0, 0, 0], made),
        logs.step_row(2, 3, [1, 0, 0, 0], changed, followed=1),
        logs.step_row(3, 3, [1, 0, 0, 0], None, followed=2),
    ]
    np.testing.assert_allclose(only(logs, *rows).propensity, [math.nan, 0.5, math.nan])


def test_rows_of_version_1_have_no_estimates(logs: ModuleType) -> None:
    made = logs.decision(1, 3)
    for key in ("guard_cause", "by_candidate", "expected_tokens", "expected_ms"):
        del made[key]
    steps = only(logs, logs.step_row(1, 3, [1, 0, 0, 0], made), logs.step_row(2, 3, [1, 0, 0, 0], made, 1))
    assert np.isnan(steps.expected_ms).all()
    assert steps.propensity[1] == 1.0
    assert model_of(steps, None) is None


def test_warm_up_is_left_out_and_a_new_stream_forgets_the_decisions(logs: ModuleType) -> None:
    made = logs.decision(1, 3, propensity=0.5)
    steps = only(
        logs,
        logs.step_row(1, 3, [1, 0, 0, 0], made, flags=["warm_up"]),
        logs.step_row(2, 3, [1, 0, 0, 0], None, followed=1),
        logs.engine_row(2.5),
        logs.step_row(3, 3, [1, 0, 0, 0], None, followed=1),  # another decision 1, which is not in the log
    )
    np.testing.assert_allclose(steps.propensity, [0.5, math.nan])
    assert [event.text for event in steps.events if event.kind == "stream"] == [
        "the engine connected, policy greedy",
        "the engine connected again, policy greedy",
    ]


def test_a_file_that_repeats_the_engine_is_no_new_stream(logs: ModuleType) -> None:
    made = logs.decision(1, 3, propensity=0.5)
    steps = only(logs, logs.step_row(1, 3, [1, 0, 0, 0], made), logs.engine_row(),
                 logs.step_row(2, 3, [1, 0, 0, 0], None, followed=1))  # fmt: skip
    assert steps.propensity[1] == 0.5
    assert len([event for event in steps.events if event.kind == "stream"]) == 1


def test_engines_and_sets_of_tiers_are_apart(logs: ModuleType) -> None:
    rows = [
        logs.engine_row(),
        logs.engine_row(engine_id="f", tiers=(0, 1)),
        logs.step_row(1, 3, [1, 0, 0, 0], None),
        logs.step_row(2, 1, [0, 1], None, engine_id="f"),
        logs.engine_row(3.0, tiers=(0, 1, 3)),
        logs.step_row(4, 1, [0, 1], None),
    ]
    found = [(steps.name, steps.tiers, len(steps)) for steps in gather(logs.placed(*rows))]
    assert found == [("e", (0, 3), 1), ("f", (0, 1), 1), ("e", (0, 1, 3), 1)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_steps": 5}, r"line 2: a step at num_steps 5, but the engine's tiers are \(0, 3\)"),
        ({"engine_id": "x"}, "line 2: no row before it says which tiers the engine 'x' has"),
        ({"accepted": None}, "line 2: "),
    ],
)
def test_rows_that_make_no_sense_are_named(logs: ModuleType, change: dict[str, object], said: str) -> None:
    with pytest.raises(LogContentError, match=said):
        only(logs, logs.step_row(1, 3, [1, 0, 0, 0], None) | change)


def test_a_missing_field_is_named(logs: ModuleType) -> None:
    row = logs.step_row(1, 3, [1, 0, 0, 0], None)
    del row["step_ms"]
    with pytest.raises(LogContentError, match="line 2: the field 'step_ms' is missing"):
        only(logs, row)


def test_what_the_guard_did_is_told_once_for_each_time(logs: ModuleType) -> None:
    guarded = logs.decision(1, 0, reason="guard", guard_cause="budget")
    alarmed = logs.decision(2, 0, reason="fallback", guard_cause="zero_acceptance")
    rows = [
        logs.step_row(1, 0, [1], guarded, followed=9),
        *(logs.step_row(at, 0, [1], guarded, followed=1) for at in (2, 3, 4)),
        *(logs.step_row(at, 0, [1], alarmed, followed=1) for at in (20, 21)),  # 16 s later: another time
        logs.step_row(22, 0, [1], None, followed=2, reports_dropped=7),
        logs.step_row(23, 0, [1], None, followed=0),
        logs.step_row(24, 0, [1], None, followed=0, mode="shadow"),
    ]
    told = [
        (e.kind, e.text.partition(":")[0], e.start_s, e.end_s, e.steps) for e in only(logs, *rows).events[1:]
    ]
    assert told == [
        ("guard", "budget", 2.0, 4.0, 3),
        ("guard", "budget", 20.0, 21.0, 2),
        ("lost", "reports that were dropped or left out", 22.0, 22.0, 7),
        ("alarm", "zero_acceptance", 22.0, 22.0, 1),
        ("own rule", "steps by the engine's own rule, for want of a fresh decision", 23.0, 23.0, 1),
        ("change", "mode active to shadow", 24.0, 24.0, 0),
    ]


def test_a_canarys_blocks_are_one_event_and_no_change_of_policy(logs: ModuleType) -> None:
    own, candidate = logs.decision(1, 0), logs.decision(2, 3, policy="thompson", by_candidate=True)
    rows = [
        logs.decision_row(0.5, own),
        logs.step_row(2, 0, [1], candidate, followed=1),
        *(logs.step_row(at, 3, [1, 0, 0, 0], candidate, followed=2) for at in (3, 4, 200)),
    ]
    told = [(e.kind, e.text, e.start_s, e.end_s, e.steps) for e in only(logs, *rows).events[1:]]
    assert told == [("canary", "steps by the canary's candidate, thompson", 3.0, 200.0, 3)]


def test_acceptance_counts_only_the_positions_that_were_drafted(logs: ModuleType) -> None:
    """At num_steps 3: 4 requests, of which 3, 2, 1 passed positions 1, 2, 3. At 0 nothing is drafted."""
    steps = only(logs, logs.step_row(1, 3, [1, 1, 1, 1], None), logs.step_row(2, 0, [4], None))
    probability, drafts = conditional_acceptance(steps)
    np.testing.assert_allclose(probability, [3 / 4, 2 / 3, 1 / 2])
    assert drafts.tolist() == [4, 3, 2]
    # One window, so it is the whole log's: 1 + 3/4 + 1/2 + 1/4 at num_steps 3.
    np.testing.assert_allclose(accept_lengths(steps)[0], [1.0, 1.75, 2.25, 2.5])


def test_without_estimates_a_profile_and_the_acceptance_seen_make_the_model(logs: ModuleType) -> None:
    class Linear:
        def step_ms(self, batch_size, num_steps, sum_seq_len_tokens):  # type: ignore[no-untyped-def]
            return 5.0 + 1.0 * num_steps + 0.0 * batch_size + 0.0 * sum_seq_len_tokens

    steps = only(logs, logs.step_row(1, 3, [1, 1, 1, 1], None), logs.step_row(2, 0, [2], None))
    model = model_of(steps, Linear(), "mine")
    assert model is not None
    assert "profile mine" in model.source
    np.testing.assert_allclose(model.ms, [[5.0, 8.0], [5.0, 8.0]])
    np.testing.assert_allclose(model.tokens, [[4.0, 10.0], [2.0, 5.0]])
    np.testing.assert_allclose(model.best, [1250.0, 625.0])
