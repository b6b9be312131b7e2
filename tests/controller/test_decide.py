"""``Decide``: results worked out by hand from a step table, and what is wrong with bad questions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from specgov.controller import decide as decide_module
from specgov.controller.config import ServeConfig
from specgov.controller.decide import decide
from specgov.controller.validation import Cause, RejectedMessage
from specgov.policies.static import Static
from specgov.policies.step_time import StepGrid, TableStepTime
from specgov.policies.types import PolicyError
from specgov.proto.v1 import specgov_pb2 as pb

Make = Callable[..., Any]


class TwoCells:
    """A profile with a table of two batch sizes and three tiers, at one context."""

    tiers = (0, 1, 3)
    graph_batch_sizes = (8, 16)
    step_time = TableStepTime(
        StepGrid(
            context_tokens=np.array([512.0]),
            batch_sizes=np.array([8, 16]),
            num_steps=np.array([0, 1, 3]),
            step_ms=np.array([[[5.0, 6.0, 8.0], [6.0, 9.0, 15.0]]]),
            **{name: np.ones((1, 2, 3)) for name in ("median_ms", "p10_ms", "p90_ms")},
            count=np.ones((1, 2, 3), np.int64),
        ),
        (8, 16),
    )


@pytest.fixture(autouse=True)
def _two_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide_module, "profile_from_wire", lambda name, configured: TwoCells())


def _ask(**changes: Any) -> pb.Decision:
    return decide(pb.DecideRequest(**{**_QUESTION, **changes}), ServeConfig())


_QUESTION: dict[str, Any] = {
    "batch_size": 8,
    "by_position": pb.AcceptanceByPosition(probability=[0.5, 0.5, 0.5]),
}


def test_by_hand_at_batch_8() -> None:
    # Expected accept length at 0, 1, 3: 1, 1 + 1/2, 1 + 1/2 + 1/4 + 1/8. Times 8 requests: 8, 12, 15 tokens
    # in 5, 6, 8 ms: 1.6, 2.0, 1.875 tokens a ms.
    decision = _ask()
    assert decision.num_steps == 1
    assert [e.num_steps for e in decision.estimates] == [0, 1, 3]
    assert [e.expected_tokens for e in decision.estimates] == pytest.approx([8, 12, 15])
    assert [e.expected_ms for e in decision.estimates] == pytest.approx([5, 6, 8])
    assert (decision.batch_size_min, decision.batch_size_max) == (8, 8)
    assert (decision.policy, decision.reason, decision.propensity) == ("rate_optimal", pb.REASON_POLICY, 1.0)


def test_by_hand_at_batch_16() -> None:
    # 16, 24, 30 tokens in 6, 9, 15 ms: 2.67, 2.67, 2.0 tokens a ms; of two equal the smaller tier.
    assert _ask(batch_size=16).num_steps == 0


def test_batch_is_padded_to_the_next_graph_size() -> None:
    # A batch of 9 runs in the graph of 16: 9, 13.5, 16.875 tokens in 6, 9, 15 ms.
    decision = _ask(batch_size=9)
    assert decision.num_steps == 0
    assert [e.expected_ms for e in decision.estimates] == pytest.approx([6, 9, 15])


def test_positions_differ() -> None:
    # Accept lengths 1, 1.9, 1.9 + 0.09 + 0.0009: at 8 requests 8, 15.2, 15.9272 tokens in 5, 6, 8 ms.
    decision = _ask(by_position=pb.AcceptanceByPosition(probability=[0.9, 0.1, 0.01]))
    assert [e.expected_tokens for e in decision.estimates] == pytest.approx([8, 15.2, 15.9272])
    assert decision.num_steps == 1


def test_accept_length_with_its_num_steps() -> None:
    # 1.75 at 2 steps is 1 + p + p^2 with p = 1/2.
    by_length = _ask(accept_length_at=pb.AcceptLengthAt(accept_length=1.75, num_steps=2), by_position=None)
    assert [e.expected_tokens for e in by_length.estimates] == pytest.approx([8, 12, 15])


def test_tiers_of_the_question() -> None:
    # Tier 2 lies between 1 and 3: 7 ms, 8 * 1.75 = 14 tokens: 2.0 tokens a ms against 1.6 at tier 0.
    decision = _ask(tiers=[0, 2])
    assert decision.num_steps == 2
    assert [e.num_steps for e in decision.estimates] == [0, 2]
    assert decision.estimates[1].expected_ms == pytest.approx(7)


def test_named_policy() -> None:
    decision = _ask(policy="threshold:10:3")
    assert (decision.num_steps, decision.batch_size_min, decision.batch_size_max) == (3, 1, 9)
    assert decision.policy == "threshold"
    assert [n.num_steps for n in decision.neighbours] == [0]
    assert [e.expected_tokens for e in decision.estimates] == pytest.approx([8, 12, 15])


def test_named_policy_has_observed_the_acceptance() -> None:
    """SGLang's rule climbs with good drafts and falls with useless ones; a fresh one would not know."""
    good = _ask(policy="ema", by_position=pb.AcceptanceByPosition(probability=[1.0, 1.0, 1.0]))
    useless = _ask(policy="ema", by_position=pb.AcceptanceByPosition(probability=[0.0, 0.0, 0.0]))
    assert good.num_steps > useless.num_steps


def test_same_question_same_answer() -> None:
    assert _ask(policy="greedy") == _ask(policy="greedy")


BAD_QUESTIONS: list[tuple[str, dict[str, Any], Cause, str]] = [
    ("no batch", {"batch_size": 0}, Cause.IMPOSSIBLE_COUNT, "batch_size 0 is not in 1..65535"),
    ("absurd batch", {"batch_size": 65_536}, Cause.IMPOSSIBLE_COUNT, "batch_size 65536"),
    ("lengths for others", {"seq_len_tokens": [1, 2]}, Cause.LENGTH_MISMATCH, "2 entries for a batch of 8"),
    ("absurd length", {"seq_len_tokens": [10**9]}, Cause.OUT_OF_RANGE, "seq_len_tokens 1000000000"),
    ("tiers descend", {"tiers": [3, 1]}, Cause.BAD_TIERS, "ascending"),
    ("absurd tier", {"tiers": [99]}, Cause.BAD_TIERS, "at most 32 steps"),
    ("no acceptance", {"by_position": None}, Cause.MISSING_ACCEPTANCE, "no acceptance: give by_position"),
    *(
        (
            f"acceptance {value}",
            {"by_position": pb.AcceptanceByPosition(probability=[0.5, value, 0.5])},
            cause,
            says,
        )
        for value, cause, says in (
            (float("nan"), Cause.NOT_A_NUMBER, "position 2 is nan"),
            (float("-inf"), Cause.NOT_A_NUMBER, "position 2 is -inf"),
            (-0.1, Cause.OUT_OF_RANGE, "-0.1 at position 2 is not in 0..1"),
            (1.1, Cause.OUT_OF_RANGE, "1.1 at position 2"),
        )
    ),
    (
        "too few positions",
        {"by_position": pb.AcceptanceByPosition(probability=[0.5])},
        Cause.LENGTH_MISMATCH,
        "1 positions, but the largest tier needs 3",
    ),
    *(
        (
            f"accept length {length} at {num_steps}",
            {
                "by_position": None,
                "accept_length_at": pb.AcceptLengthAt(accept_length=length, num_steps=num_steps),
            },
            cause,
            says,
        )
        for length, num_steps, cause, says in (
            (float("nan"), 3, Cause.NOT_A_NUMBER, "accept_length is nan"),
            (-1.0, 3, Cause.OUT_OF_RANGE, "cannot occur at num_steps 3"),
            (4.5, 3, Cause.OUT_OF_RANGE, "cannot occur at num_steps 3"),
            (1.0, 0, Cause.OUT_OF_RANGE, "at num_steps 0 it says nothing"),
            (2.0, 2**32 - 1, Cause.OUT_OF_RANGE, "num_steps 4294967295 is above 32"),
        )
    ),
]


@pytest.mark.parametrize(
    ("changes", "cause", "says"),
    [case[1:] for case in BAD_QUESTIONS],
    ids=[case[0] for case in BAD_QUESTIONS],
)
def test_bad_question(changes: dict[str, Any], cause: Cause, says: str) -> None:
    with pytest.raises(RejectedMessage) as raised:
        _ask(**changes)
    assert raised.value.cause is cause
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *((case[1], case[3]) for case in BAD_QUESTIONS),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"policy": "static:2"}, "no tier 2"),
        ({"policy": "x" * 500_000}, "policy is longer than 4096 characters"),
        ({"policy": "x" * 4096}, "... "),  # too long for a status if it is repeated in full
        ({"policy": "ema:config=/etc/hostname"}, "config may name a file, and none is opened"),
    ],
)
def test_status(start: Make, changes: dict[str, Any], says: str) -> None:
    sidecar = start()
    with pytest.raises(grpc.RpcError) as raised:
        sidecar.controller.Decide(pb.DecideRequest(**{**_QUESTION, **changes}), timeout=60)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert says in raised.value.details()


def test_the_sidecars_own_policy_may_name_a_file(tmp_path: Path) -> None:
    """Who starts the sidecar may; a question may ask for the same policy, and for no other file."""
    file = tmp_path / "adaptive.json"
    file.write_text('{"1": {"candidate_steps": [1, 3]}}')
    own = f"ema:config={file}"
    request = pb.DecideRequest(**{**_QUESTION, "policy": own})
    assert decide(request, ServeConfig(policy=own)).policy == "ema"
    with pytest.raises(PolicyError, match="may name a file"):
        decide(request, ServeConfig(policy="ema"))


def test_a_large_batch_is_not_observed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much work a question makes is bounded: 65,535 requests are 512 observed, in 16 steps at least."""
    observed: list[int] = []
    monkeypatch.setattr(Static, "observe", lambda self, step: observed.append(len(step.accepted)))
    decision = _ask(batch_size=65_535, policy="static:3")
    assert decision.batch_size_max == 65_535
    assert observed == [512] * 256  # 2**19 drafts / (512 requests * 3 drafts) = 341 steps, 256 at most


def test_answer_through_a_server(start: Make) -> None:
    assert start().controller.Decide(pb.DecideRequest(**_QUESTION), timeout=60) == _ask()


def test_questions_to_policies_do_not_crowd_out_engines(start: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a core for a second or two each: two at a time, and questions without one beside them."""
    go_on, at_work = threading.Event(), threading.Semaphore(0)

    def think(*_: object) -> pb.Decision:
        at_work.release()
        go_on.wait(60)
        return pb.Decision(num_steps=3)

    sidecar = start()
    monkeypatch.setattr("specgov.controller.decide._ask_policy", think)
    question = pb.DecideRequest(**{**_QUESTION, "policy": "static:3"})
    try:
        asked = [sidecar.controller.Decide.future(question, timeout=60) for _ in range(2)]
        assert all(at_work.acquire(timeout=60) for _ in asked)
        with pytest.raises(grpc.RpcError) as raised:
            sidecar.controller.Decide(question, timeout=60)
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert sidecar.controller.Decide(pb.DecideRequest(**_QUESTION), timeout=60) == _ask()
    finally:
        go_on.set()
    assert [answer.result(60).num_steps for answer in asked] == [3, 3]
    assert sidecar.controller.Decide(question, timeout=60).num_steps == 3  # there is room again
    with pytest.raises(grpc.RpcError):  # and a question that is wrong takes none with it
        sidecar.controller.Decide(pb.DecideRequest(policy="static:3"), timeout=60)
    assert sidecar.controller.Decide(question, timeout=60).num_steps == 3
