"""``specgov plot``: pictures of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from specgov.controller.cli import output
from specgov.controller.cli.errors import UsageError

if TYPE_CHECKING:
    from specgov.controller.plot import Figure, Panel
    from specgov.env.evaluation_results import Results

ResultsPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RESULTS.jsonl")]
OutputPath = Annotated[Path, tyro.conf.arg(name="output", aliases=["-o"], metavar="FOLDER")]

MOST_RULES = 7
"""As many as have a colour of their own."""
PROFILE_FROM = 0.8
_STEPS = 400
_WIDTH_PX = 1000


def plot(results_path: ResultsPath, *, policies: str = "", output_path: OutputPath = Path()) -> None:
    """Draw the results of specgov evaluate: performance profile, and shares by condition.

    For example: specgov plot quick.jsonl -o docs

    The profile shows in which share of the conditions a rule reaches x % of the oracle. The second picture
    has each condition's share of the oracle, one panel a scenario.

    Args:
        results_path: What specgov evaluate wrote.
        policies: These, separated by commas; default: the best of each kind.
        output_path: Folder for the pictures.

    """
    from specgov.controller.plot import render
    from specgov.env.evaluation_results import read_results

    results = read_results(results_path)
    names = [name for name, facts in results.conditions.items() if not facts.setting]
    rules = [rule.strip() for rule in policies.split(",")] if policies else default_rules(results, names)
    _check(results, rules, names)
    output_path.mkdir(parents=True, exist_ok=True)
    for kind, figure in (
        ("profile", profile_figure(results, rules, names)),
        ("conditions", conditions_figure(results, rules, names)),
    ):
        path = output_path / f"evaluation-{results.suite}-{kind}.svg"
        path.write_text(render(figure), encoding="utf-8")
        output.print_line(f"picture: {path}")


def default_rules(results: Results, names: Sequence[str]) -> list[str]:
    """Those whose names people look for, as far as they took part, else the best by mean share."""
    from specgov.env.evaluation_stats import headline_shares, rules_of, standing

    there = rules_of(results, names)
    wanted = [rule for rule in _LOOKED_FOR if rule in there][:MOST_RULES]
    if wanted:
        return wanted
    stands = [standing(rule, headline_shares(results, rule, names)) for rule in there]
    known = sorted((s for s in stands if s is not None), key=lambda s: -s.share.mean)
    return [each.rule for each in known[:MOST_RULES]]


_LOOKED_FOR = (
    "greedy",
    "greedy@none",
    "thompson",
    "schedule_tuned",
    "ema_tuned",
    "throughput_aware",
    "static:3",
)


def profile_figure(results: Results, rules: Sequence[str], names: Sequence[str]) -> Figure:
    """In which share of conditions each rule reaches x % of the oracle."""
    from specgov.controller.plot import Figure, Panel, Series
    from specgov.env.evaluation_stats import headline_shares, performance_profile

    levels = [PROFILE_FROM + (1.005 - PROFILE_FROM) * step / _STEPS for step in range(_STEPS + 1)]
    series = [
        Series(
            "",
            [100 * level for level in levels],
            [100 * share for share in performance_profile(headline_shares(results, rule, names), levels)],
            "step",
            color=_color(index),
            dashed="@" in rule,
        )
        for index, rule in enumerate(rules)
    ]
    return Figure(
        f"Suite {results.suite}: conditions in which a rule reaches x % of the oracle",
        "% of the oracle (output rate; tokens per request-second in open loops)",
        [
            _legend(rules),
            Panel("% of the conditions", series, y_range=(0.0, 100.0), height_px=300),
        ],
        width_px=_WIDTH_PX,
    )


def conditions_figure(results: Results, rules: Sequence[str], names: Sequence[str]) -> Figure:
    """Each condition's share by rule: a line of points for each condition, by share."""
    from specgov.controller.plot import Figure, Panel, Series
    from specgov.env.evaluation_stats import headline_shares, standing

    panels = [_legend(rules)]
    for name in names:
        facts = results.conditions[name]
        series = []
        for index, rule in enumerate(rules):
            stands = standing(rule, headline_shares(results, rule, [name]))
            if stands is not None:
                share = max(100 * stands.share.mean, 50.0)
                bar = ([50.0, share], [float(len(rules) - index)] * 2)
                series.append(Series("", *bar, color=_color(index), dashed="@" in rule))
                series.append(Series("", [share], [float(len(rules) - index)], "points", _color(index)))
        title = f"{facts.scenario}, {facts.profile}"
        height = 12 * len(rules) + 6
        panels.append(Panel(title, series, (0.0, len(rules) + 1.0), y_ticks=(), height_px=height))
    return Figure(
        f"Suite {results.suite}: share of the oracle by condition",
        "% of the oracle (output rate; tokens per request-second in open loops); bars begin at 50",
        panels,
        x_ticks=(50, 60, 70, 80, 90, 95, 100),
        width_px=_WIDTH_PX,
    )


def _legend(rules: Sequence[str]) -> Panel:
    from specgov.controller.plot import Panel, Series

    series = [
        Series(rule, (), (), color=_color(index), dashed="@" in rule) for index, rule in enumerate(rules)
    ]
    return Panel("", series, (0.0, 1.0), y_ticks=(), height_px=2)


def _color(index: int) -> str:
    from specgov.controller.svg import PALETTE

    return PALETTE[index % len(PALETTE)]


def _check(results: Results, rules: Sequence[str], names: Sequence[str]) -> None:
    from specgov.env.evaluation_stats import headline_shares

    for rule in rules:
        if not headline_shares(results, rule, names):
            raise UsageError(f"plot: {results.path} has nothing on {rule!r} beside the oracle")
    if not rules:
        raise UsageError(f"plot: {results.path} has no results yet: run specgov evaluate first")
