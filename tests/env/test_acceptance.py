"""The acceptance model against its published figures and against what follows by hand."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from specgov.env.acceptance import (
    AcceptanceModel,
    AcceptanceTables,
    Drift,
    Shift,
    marginal_hazard,
)
from specgov.env.acceptance_classes import CHAT, CLASSES, MATHS, AcceptanceClass
from specgov.env.rng import draw, environment_keys, normal

PUBLISHED = Path(__file__).parents[3] / "shared/data/public/acceptance_by_position.csv"


def tables_of(*classes: AcceptanceClass, positions: int = 4) -> AcceptanceTables:
    return AcceptanceTables(AcceptanceModel(classes), positions)


def population(tables: AcceptanceTables, n: int, class_index: int = 0) -> tuple[np.ndarray, ...]:
    """Keys, classes and factors of n new requests of one class."""
    keys = draw(environment_keys(3, 1), np.arange(n))
    classes = np.full(n, class_index)
    request, text = tables.first_state(keys)
    factor = tables.factor(classes, request, text, np.zeros(n), np.zeros(n, bool))
    return keys, classes, factor


def test_every_class_has_a_source_or_a_range() -> None:
    for accepted in CLASSES.values():
        assert (accepted.source_url is None) != (accepted.assumed_range is None), accepted.name
        assert all(a >= b for a, b in zip(accepted.survival, accepted.survival[1:], strict=False)), (
            accepted.name
        )
        if accepted.assumed_range is not None:
            low, high = accepted.assumed_range
            assert low <= accepted.survival[0] <= high, accepted.name


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the table of public figures is not here")
def test_sourced_classes_are_the_published_figures() -> None:
    with PUBLISHED.open() as file:
        rows = list(csv.DictReader(file))
    chosen = {  # which of a source's rows a class takes
        "chat": ("4", "conc 1-8"),
        "maths": ("8", "conc 64 T=0"),
        "agentic": ("3", "single"),
        "mixed": ("16", "conc 64 T=1 static"),
    }
    for name, (k, condition) in chosen.items():
        wanted = [
            float(row["p_accept_unconditional"])
            for row in rows
            if (row["source_url"], row["K"], row["condition"]) == (CLASSES[name].source_url, k, condition)
        ]
        assert list(CLASSES[name].survival) == wanted


def test_hazard_holds_the_last_conditional_probability() -> None:
    # survival 0.8, 0.4: conditionals 0.8, 0.5, and from there on 0.5: 0.2, 0.1.
    survival = np.exp(-AcceptanceClass("c", (0.8, 0.4)).hazard(4))
    assert survival == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert np.exp(-AcceptanceClass("c", (0.5,)).hazard(3)) == pytest.approx([0.5, 0.25, 0.125])
    assert np.exp(-AcceptanceClass("c", (0.0,)).hazard(3)).tolist() == [0.0, 0.0, 0.0]
    assert np.exp(-MATHS.hazard(2)) == pytest.approx([0.7568, 0.6011])


def test_marginal_hazard_without_spread_is_the_hazard() -> None:
    assert marginal_hazard(np.array([0.1, 2.0, np.inf]), 0.0) == pytest.approx([0.1, 2.0, np.inf])


def test_a_population_has_the_published_survival() -> None:
    # 200,000 requests: the standard error of a share is at most 0.0011; the bound is four of them.
    tables = tables_of(CHAT)
    keys, classes, factor = population(tables, 200_000)
    accepted = tables.accepted(
        keys, np.zeros(len(keys), np.int32), classes, factor, np.full(len(keys), 4, np.uint8)
    )
    shares = [(accepted >= i).mean() for i in (1, 2, 3, 4)]
    assert shares == pytest.approx(CHAT.survival, abs=0.0045)
    assert tables.survival(classes, factor).mean(axis=0) == pytest.approx(CHAT.survival, abs=0.0045)


def test_conditional_acceptance_is_a_power_of_the_classes() -> None:
    # Without spread H = -log survival, so at factor 2 every conditional probability is squared.
    tables = tables_of(AcceptanceClass("c", (0.8, 0.4), spread=0.0))
    survival = tables.survival(np.array([0]), np.array([2.0], np.float32))[0]
    assert survival == pytest.approx([0.64, 0.16, 0.04, 0.01], rel=1e-5)


def test_accepted_is_cut_at_each_requests_tier_and_the_same_below_it() -> None:
    tables = tables_of(AcceptanceClass("c", (0.9,)), AcceptanceClass("d", (0.7, 0.5)))
    keys, _, factor = population(tables, 1000)
    classes, generated = np.arange(1000) % 2, np.arange(1000, dtype=np.int32)
    full = tables.accepted(keys, generated, classes, factor, np.full(1000, 4, np.uint8))
    tiers = (np.arange(1000) % 5).astype(np.uint8)
    assert (tables.accepted(keys, generated, classes, factor, tiers) == np.minimum(full, tiers)).all()
    assert set(full.tolist()) == {0, 1, 2, 3, 4}
    assert tables.accepted(keys, generated, classes, factor, np.zeros(1000, np.uint8)).sum() == 0
    # One class takes another path through the code: the same result.
    alone = tables_of(AcceptanceClass("c", (0.9,)))
    first = np.flatnonzero(classes == 0)
    single = alone.accepted(
        keys[first], generated[first], classes[first], factor[first], np.full(500, 4, np.uint8)
    )
    assert (single == full[first]).all()


def test_always_and_never() -> None:
    tables = tables_of(AcceptanceClass("always", (1.0,)), AcceptanceClass("never", (0.0,)))
    keys, _, factor = population(tables, 400)
    classes = np.arange(400) % 2
    accepted = tables.accepted(keys, np.zeros(400, np.int32), classes, factor, np.full(400, 4, np.uint8))
    assert set(accepted[::2].tolist()) == {4}
    assert set(accepted[1::2].tolist()) == {0}
    assert tables.survival(classes[:2], factor[:2]).tolist() == [[1.0] * 4, [0.0] * 4]


def test_text_is_autocorrelated_as_stated() -> None:
    # AR(1): correlation 0.8 after one block and 0.8^3 after three passed at once; variance stays 1. 100,000
    # requests: the standard error of a correlation is 0.003 at most.
    tables = tables_of(CHAT)
    keys = draw(environment_keys(3, 1), np.arange(100_000))
    zero = np.zeros(len(keys), np.int64)
    text = normal(keys, 12345)
    one = tables.next_block(keys, zero, text, zero + 3, zero + 16)
    three = tables.next_block(keys, zero, text, zero + 3, zero + 48)
    assert np.corrcoef(text, one)[0, 1] == pytest.approx(0.8, abs=0.01)
    assert np.corrcoef(text, three)[0, 1] == pytest.approx(0.512, abs=0.01)
    assert [one.std(), three.std()] == pytest.approx([1.0, 1.0], abs=0.01)


def test_a_block_is_the_same_however_it_is_reached() -> None:
    tables = tables_of(CHAT)
    keys, zero = environment_keys(3, 5), np.zeros(5, np.int64)
    text = normal(keys, 1)
    assert (tables.next_block(keys, zero, text, zero + 15, zero + 16)).tolist() == (
        tables.next_block(keys, zero, text, zero + 10, zero + 19)
    ).tolist()


def test_factor_by_hand() -> None:
    # spread 0.5 and a share of 0.64 give scales 0.4 and 0.3; context 0.05 per 1,000 tokens, at most
    # 32,768 of them.
    tables = tables_of(AcceptanceClass("c", (0.5,), spread=0.5, between_requests=0.64, context_hazard=0.05))
    request, text = np.array([1.0, 0.0, 0.0, -2.0]), np.array([0.0, -1.0, 0.0, 2.0])
    context, cold = np.array([0, 2000, 10**6, 0]), np.array([False, False, False, True])
    factor = tables.factor(np.zeros(4, np.int64), request, text, context, cold)
    exponents = [0.4, -0.3 + 0.1, 32.768 * 0.05, -0.8 + 0.6 + 0.7]
    assert factor == pytest.approx([math.exp(e) for e in exponents], rel=1e-6)


def test_drift_by_hand() -> None:
    drift = Drift((Shift(10.0, 0.5), Shift(20.0, -1.0, ramp_s=10.0)))
    gain = drift.gain(environment_keys(0, 5), np.array([9.0, 10.0, 20.0, 25.0, 99.0]))
    assert gain == pytest.approx([1.0, math.exp(0.5), math.exp(0.5), 1.0, math.exp(-0.5)], rel=1e-6)
    assert Drift().is_none
    assert not drift.is_none


def test_regimes_last_and_then_change() -> None:
    # 10,000 environments: the standard error of a standard deviation of 0.3 is 0.0021.
    drift, keys = Drift(regime_spread=0.3, regime_s=60.0), environment_keys(0, 10_000)
    first, still, then = (np.log(drift.gain(keys, np.full(len(keys), t))) for t in (0.0, 59.9, 60.0))
    assert (first == still).all()
    assert abs(np.corrcoef(first, then)[0, 1]) < 0.05
    assert first.std() == pytest.approx(0.3, abs=0.01)
