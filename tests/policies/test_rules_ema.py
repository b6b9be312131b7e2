"""The ``ema`` rule on traces worked out by hand. tests/sglang drives it beside SGLang's own."""

import json
from pathlib import Path

import numpy as np
import pytest

from specgov.policies.registry import make_policy
from specgov.policies.types import (
    BatchView,
    EngineSpec,
    Policy,
    PolicyContext,
    PolicyError,
    Reason,
    StepObservation,
)

TIERS = (0, 1, 3, 5, 7)
AT_ONCE = (
    "ema_alpha=1:warmup_batches=0:update_interval=1"  # the average is the last result, reviewed each time
)


def make(text: str, tiers: tuple[int, ...] = TIERS, graphs: tuple[int, ...] = ()) -> Policy:
    engine = EngineSpec(tiers, graphs, max_running_requests=256)
    return make_policy(text, PolicyContext(engine, np.random.default_rng(0), lambda: 0.0))


def feed(policy: Policy, accepted: list[int], times: int = 1) -> None:
    """``times`` results of a batch of ``len(accepted)`` requests, made by the tier that the rule chose."""
    size = len(accepted)
    for _ in range(times):
        num_steps = policy.choose(BatchView(size)).num_steps_for(size)
        counts = np.minimum(np.array(accepted, np.uint8), num_steps).astype(np.uint8)
        empty = np.zeros(0, np.uint16), np.zeros(0, np.uint8)
        policy.observe(StepObservation(1, size, num_steps, counts, *empty, 0, 0))


def tier(policy: Policy, batch_size: int) -> int:
    return policy.choose(BatchView(batch_size)).num_steps_for(batch_size)


def test_slots_start_at_the_middle_of_all_tiers_or_of_their_own() -> None:
    # The middle of 0, 1, 3, 5, 7 is 3. [1, 3, 5, 7] and [0, 1, 3] hold it; [0, 1] has its own middle, 1.
    policy = make("ema")
    assert [tier(policy, batch_size) for batch_size in (1, 7, 8, 31, 32, 63, 64, 256)] == [
        3,
        3,
        3,
        3,
        1,
        1,
        0,
        0,
    ]
    policy = make("ema:initial_num_steps=7")
    assert [tier(policy, batch_size) for batch_size in (1, 8, 32, 64)] == [7, 1, 1, 0]


def test_rejected_drafts_lead_to_0_then_a_probe_then_back_up() -> None:
    policy = make("ema")
    feed(policy, [0] * 8, times=14)
    assert tier(policy, 8) == 3  # ten results to warm up, then five to the first review
    feed(policy, [0] * 8)
    assert tier(policy, 8) == 0  # average 2 * 0.8^15 = 0.070 <= 0.5
    assert policy.choose(BatchView(8)).reason is Reason.POLICY
    feed(policy, [9] * 8, times=4)
    assert tier(policy, 8) == 0
    feed(policy, [9] * 8)
    assert tier(policy, 8) == 1  # five results later it probes
    assert policy.choose(BatchView(8)).reason is Reason.EXPLORATION
    assert policy.choose(BatchView(1)).reason is Reason.POLICY  # that is another slot
    # results at 0 said nothing: the average was still 0.0704
    assert policy.estimates()["accepted_drafts_from_batch_8"] == pytest.approx(2 * 0.8**15)
    feed(policy, [9] * 8, times=5)
    assert tier(policy, 8) == 3  # 1 - (1 - 0.0704) * 0.8^5 = 0.695 > 0.5
    assert policy.choose(BatchView(8)).reason is Reason.POLICY


def test_accepted_drafts_lead_up() -> None:
    policy = make("ema")
    feed(policy, [9], times=15)
    assert tier(policy, 1) == 5  # 3 - 0.8^15 = 2.965: above 2.5, not above 4.5
    feed(policy, [9], times=5)
    assert tier(policy, 1) == 5  # 5 - 2.035 * 0.8^5 = 4.333
    feed(policy, [9], times=5)
    assert tier(policy, 1) == 7  # 5 - 2.035 * 0.8^10 = 4.781


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        # From 3 in slot 1: down to 1 at 1 - 0.5 - 0.25 = 0.25 and below, up to 5 above 2.5.
        ([1, 0, 0, 0], 1),
        ([1, 1, 0, 0], 3),
        ([3, 3, 2, 2], 3),
        ([3, 3, 3, 2], 5),
        ([0], 1),
        ([3], 5),
    ],
)
def test_the_thresholds_are_exact(accepted: list[int], expected: int) -> None:
    policy = make(f"ema:{AT_ONCE}")
    feed(policy, accepted)
    assert tier(policy, 1) == expected


@pytest.mark.parametrize(
    ("options", "accepted", "expected"),
    [
        ("down_hysteresis=0", [1, 1, 0, 0], 1),  # 0.5 <= 1 - 0.5
        ("up_hysteresis=0.25", [3, 3, 3, 2], 3),  # 2.75 is not above 2.5 + 0.25
        ("ceiling_coeff=1", [1], 1),  # ceil(1) = 1 < 3
        ("ceiling_coeff=2", [1], 1),  # ceil(2) = 2 < 3
        ("ceiling_coeff=3", [1], 3),  # ceil(3) = 3
        ("ceiling_coeff=0.1", [3], 5),  # a rise is never capped
    ],
)
def test_options_count_in_every_slot(options: str, accepted: list[int], expected: int) -> None:
    policy = make(f"ema:{AT_ONCE}:{options}")
    feed(policy, accepted)
    assert tier(policy, 1) == expected


def test_a_drop_may_pass_several_tiers() -> None:
    policy = make(f"ema:{AT_ONCE}:initial_num_steps=7")
    feed(policy, [0])
    assert tier(policy, 1) == 1  # slot 1 does not hold 0


def test_a_batch_is_padded_to_its_graph_size_before_its_slot_is_chosen() -> None:
    policy = make("ema", graphs=(1, 2, 4, 8, 16, 24, 32, 48))
    # 5..8 run as 8, 25..32 as 32; above 48 nothing is padded, so that the last slot begins at 64.
    found = [(r.batch_size_min, r.batch_size_max, r.num_steps) for r in policy.choose(BatchView(1)).ranges]
    assert found == [(1, 24, 3), (25, 63, 1), (64, 256, 0)]
    feed(policy, [0] * 5, times=15)
    assert [tier(policy, batch_size) for batch_size in (4, 5, 8, 24)] == [3, 0, 0, 0]


def test_a_slot_that_starts_at_0_starts_its_average_with_the_first_probe(tmp_path: Path) -> None:
    table = tmp_path / "adaptive.json"
    table.write_text(
        json.dumps({"1": {"candidate_steps": [4, 0, 2]}, "warmup_batches": 0, "update_interval": 1})
    )
    policy = make(f"ema:config={table}:initial_num_steps=0:ema_alpha=1", tiers=(0, 2, 4))
    assert policy.estimates() == {"accepted_drafts_from_batch_1": -1.0}
    feed(policy, [0])
    assert (tier(policy, 1), policy.estimates()["accepted_drafts_from_batch_1"]) == (2, 1.0)
    feed(policy, [0])
    assert tier(policy, 1) == 0  # 0 <= 0.5 - 0.25
    feed(policy, [0])
    assert (tier(policy, 1), policy.estimates()["accepted_drafts_from_batch_1"]) == (
        2,
        0.0,
    )  # and no second time


def test_below_the_first_slot_is_the_first_slot(tmp_path: Path) -> None:
    table = tmp_path / "adaptive.json"
    table.write_text('{"8": {"candidate_steps": [3]}, "16": {"candidate_steps": [1]}}')
    policy = make(f"ema:config={table}", tiers=(1, 3))
    assert [tier(policy, batch_size) for batch_size in (1, 8, 15, 16)] == [3, 3, 3, 1]


def test_a_slots_own_figures_come_before_the_tables(tmp_path: Path) -> None:
    table = tmp_path / "adaptive.json"
    slots = {"1": {"candidate_steps": [1, 3], "ema_alpha": 0.5}, "2": {"candidate_steps": [1, 3]}}
    table.write_text(json.dumps({**slots, "ema_alpha": 0.25, "warmup_batches": 9}))
    policy = make(f"ema:config={table}", tiers=(1, 3))
    feed(policy, [0])
    feed(policy, [0, 0])
    # both start at 2; the middle of 1, 3 is 3
    assert policy.estimates() == {"accepted_drafts_from_batch_1": 1.0, "accepted_drafts_from_batch_2": 1.5}


def test_no_live_request_is_no_result() -> None:
    policy = make(f"ema:{AT_ONCE}")
    policy.observe(
        StepObservation(1, 1, 3, np.zeros(0, np.uint8), np.zeros(0, np.uint16), np.zeros(0, np.uint8), 0, 0)
    )
    assert policy.estimates()["accepted_drafts_from_batch_1"] == 2.0


def test_forgetting_starts_anew() -> None:
    policy, fresh = make("ema"), make("ema")
    feed(policy, [0] * 8, times=15)
    policy.forget()
    assert policy.choose(BatchView(8)) == fresh.choose(BatchView(8))
    assert policy.estimates() == fresh.estimates()


def test_sglangs_table_is_cut_to_the_engines_tiers() -> None:
    # Slot 1 has [1, 3], slot 8 [1, 3], slot 32 [1]; slot 64's only tier 0 becomes the smallest, 1.
    policy = make("ema", tiers=(1, 3))
    assert [tier(policy, batch_size) for batch_size in (1, 8, 32, 64)] == [3, 3, 1, 1]
    # None of 1, 3, 5, 7 is there: the nearest below 1 is 0. Slots 8 and 32 keep 0 alone.
    policy = make("ema", tiers=(0, 2, 4))
    assert [tier(policy, batch_size) for batch_size in (1, 8, 32, 64)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"ema_alpha": 0.5}', "no slot: the table needs a key that is a batch size"),
        ('{"1": [1, 3]}', "slot 1: must be an object with candidate_steps, not [1, 3]"),
        ('{"1": {}}', "slot 1: candidate_steps must be a list of whole numbers from 0 on, not None"),
        ('{"1": {"candidate_steps": []}}', "slot 1: candidate_steps must be"),
        ('{"1": {"candidate_steps": [-1]}}', "slot 1: candidate_steps must be"),
        ('{"1": {"candidate_steps": [1.5]}}', "slot 1: candidate_steps must be"),
        (
            '{"4": {"candidate_steps": [1], "ema_alpha": "x"}}',
            "slot 4: ema_alpha must be a finite number, not 'x'",
        ),
        (
            '{"4": {"candidate_steps": [1], "ceiling_coeff": NaN}}',
            "slot 4: ceiling_coeff must be a finite number",
        ),
        (
            '{"4": {"candidate_steps": [1], "warmup_batches": -1}}',
            "warmup_batches must be a whole number from 0",
        ),
        ('{"1": {"candidate_steps": [1, 9]}}', "this engine has no tier 9: its tiers are 0, 1, 3, 5, 7"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "adaptive.json"
    table.write_text(text)
    with pytest.raises(PolicyError) as error:
        make(f"ema:config={table}")
    assert message in str(error.value)
