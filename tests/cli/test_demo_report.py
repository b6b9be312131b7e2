"""What a demo run amounts to, by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from specgov.controller.cli import output
from specgov.controller.cli.demo_report import StepTrace, best, figure, summary_table, svg


def trace(name: str = "p", tokens=(1, 3, 3, 1), tiers=(0, 3, 3, 0)) -> StepTrace:
    """Four steps of a second each."""
    return StepTrace(
        name, np.array([1.0, 2.0, 3.0, 4.0]), np.array([1, 1, 2, 1]), np.array(tiers), np.array(tokens)
    )


def test_output_rate_and_switches() -> None:
    assert trace().output_tokens_per_s == 2.0  # 8 tokens in 4 s
    assert trace().switches == 2


def test_rates_over_time_add_up_to_the_tokens() -> None:
    middles, rate = trace().binned_rate(4.0)
    # 64 bins of 1/16 s; a step lies in the bin of its end: 1 token at 1 s is 16 tokens/s in bin 16.
    assert middles[16] == pytest.approx(1 + 1 / 32)
    assert rate[16] == pytest.approx(16.0)
    assert rate.sum() / 16 == pytest.approx(8.0)


def test_the_best_is_the_one_with_the_largest_rate() -> None:
    assert best([trace("a"), trace("b", (2, 3, 3, 1)), trace("c")]).name == "b"


def test_summary_compares_with_the_running_policy() -> None:
    table = summary_table(
        trace("p"), [trace("static:0", (1, 1, 1, 1), (0, 0, 0, 0))], trace("best", (2, 3, 3, 2))
    )
    console = output.console()
    with console.capture() as captured:
        console.print(table)
    rows = [line.split() for line in captured.get().splitlines() if "%" in line]
    assert rows == [
        ["p", "2", "+0.0", "%", "2"],
        ["static:0", "1", "-50.0", "%", "0"],  # 4 tokens against 8
        ["best", "2", "+25.0", "%", "2"],  # 10 against 8
    ]


def test_the_picture_holds_each_value_until_the_next_step() -> None:
    tiers, batch, rates = figure("t", 4.0, trace(), [trace("q")]).panels
    (tier,) = tiers.series
    assert (tier.x, tier.y) == ([0.0, 1.0, 3.0, 4.0], [0, 3, 0, 0])  # unchanged steps are left out
    assert (batch.series[0].x, batch.series[0].y) == ([0.0, 2.0, 3.0, 4.0], [1, 2, 1, 1])
    assert [series.label for series in rates.series] == ["p", "q"]
    ET.fromstring(svg("t", 4.0, trace(), []))
