"""What keeps a server from starting, each with its remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specgov.sglang_plugin.checks import start_problems, why_idle
from specgov.sglang_plugin.settings import Settings
from specgov.sglang_plugin.versions import ServerFacts, parse_version, server_facts

GOOD = ServerFacts(
    algorithm="EAGLE3",
    adaptive=True,
    adaptive_config=None,
    num_steps=3,
    topk=1,
    dp_attention=False,
    multi_layer_eagle=False,
    two_batch_overlap=False,
    pdmux=False,
    lora=False,
    tp_size=1,
    pp_size=1,
    dp_size=1,
    disaggregation="null",
    model="m",
    draft="d",
    port=30000,
    skips_warm_up=False,
)
SETTINGS = Settings("unix:///s")
TIERS = (0, 1, 3, 5, 7)


def problems(
    settings: Settings = SETTINGS,
    version: tuple[int, int, int] = (0, 5, 23),
    reason: str | None = None,
    **facts: Any,
) -> list[str]:
    return [str(p) for p in start_problems(settings, replace(GOOD, **facts), version, TIERS, reason)]


def test_a_good_server_has_no_problem() -> None:
    assert problems() == []
    assert problems(algorithm="EAGLE", topk=None, dp_size=4, tp_size=8) == []


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
        ({"topk": 4}, "--speculative-eagle-topk is 4"),
        ({"dp_attention": True}, "--enable-dp-attention"),
        ({"multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"pdmux": True}, "--enable-pdmux"),
        ({"pp_size": 2}, "--pp-size is 2"),
        ({"lora": True}, "--enable-lora"),
    ],
)
def test_each_thing_that_does_not_go_together_is_named(facts: dict[str, Any], said: str) -> None:
    # SGLang resolves most of them to "not adaptive"; that alone would not help anybody.
    for adaptive in (True, False):
        (problem,) = problems(**facts, adaptive=adaptive)
        assert said in problem


def test_adaptive_that_is_not_on_and_adaptive_that_sglang_switched_off() -> None:
    assert problems(adaptive=False) == ["adaptive speculation is not on: add --speculative-adaptive"]
    (problem,) = problems(adaptive=False, reason="the platform serves EAGLE with XWorker")
    assert problem.startswith("adaptive speculation is not live (the platform serves EAGLE with XWorker)")


def test_tiers_outside_the_servers() -> None:
    (problem,) = problems(replace(SETTINGS, tiers=(0, 2, 4)))
    assert problem.startswith("SPECGOV_TIERS names 2, 4, but the server prepares 0, 1, 3, 5, 7")
    assert problems(replace(SETTINGS, tiers=(0, 3))) == []


def test_a_fallback_that_needs_other_tiers() -> None:
    (problem,) = problems(replace(SETTINGS, fallback="threshold:16:4"))
    assert "SPECGOV_FALLBACK" in problem
    assert "no tier 4" in problem
    assert problems(replace(SETTINGS, fallback="threshold:16:4", mode="shadow")) == []


@pytest.mark.parametrize(("patch", "wrong"), [(15, False), (16, True), (18, True), (19, False)])
def test_the_initial_tier_must_be_the_largest_on_some_releases(patch: int, wrong: bool) -> None:
    found = problems(version=(0, 5, patch))
    assert bool(found) == wrong
    if wrong:
        assert "start with the largest tier, 7, and --speculative-num-draft-tokens 8" in found[0]
    assert problems(version=(0, 5, patch), num_steps=7) == []


def test_an_old_sglang() -> None:
    (problem,) = problems(version=(0, 5, 13))
    assert "use SGLang 0.5.14 or newer" in problem


def test_where_there_is_nothing_to_do() -> None:
    assert why_idle(GOOD) is None
    assert why_idle(replace(GOOD, disaggregation="decode")) is None
    assert "prefill worker" in str(why_idle(replace(GOOD, disaggregation="prefill")))
    assert "does not speculate" in str(why_idle(replace(GOOD, algorithm=None)))


def test_versions() -> None:
    assert parse_version("0.5.12.post1") == (0, 5, 12)
    assert parse_version("0.6.0rc1") == (0, 6, 0)


def test_facts_of_plain_arguments() -> None:
    class Arguments:
        speculative_algorithm = "EAGLE"
        speculative_adaptive = True
        speculative_num_steps = 3
        lora_paths = ("a",)
        tp_size = 2

    facts = server_facts(Arguments())
    assert (facts.algorithm, facts.adaptive, facts.num_steps, facts.tp_size) == ("EAGLE", True, 3, 2)
    assert facts.lora
    assert facts.disaggregation == "null"
