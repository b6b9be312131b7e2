"""The tables of an evaluation, for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specgov.env.contenders import ORACLE, Contender
from specgov.env.evaluation_results import ConditionFacts, Results
from specgov.env.evaluation_stats import (
    Shares,
    Standing,
    headline_shares,
    mean_of,
    ratio_of,
    rules_of,
    shares_of,
    standing,
)

ABOVE_ORACLE = 1.002
"""A mean share that is worth mentioning."""
MOST_ABOVE = 10
_NONE = "-"


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A title, what stands in the columns, and rows of text."""

    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As GitHub shows it."""
        align = ["---", *("---:" for _ in self.columns[1:])]
        lines = [self.columns, align, *self.rows]
        body = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"### {self.title}\n\n{self.about}\n\n{body}\n"


def tables(results: Results) -> list[ResultTable]:
    """All tables that the results give."""
    plain = [name for name, facts in results.conditions.items() if not facts.setting]
    made = [_aims(results, plain)]
    for grid, facts in _grids(results).items():
        made.append(_by_setting(results, grid, facts) if facts[0].setting else _by_rule(results, grid, facts))
    made += [_training(results, plain), _learning(results, plain), _above_oracle(results)]
    return [table for table in made if table.rows]


def markdown(results: Results, command: str) -> str:
    """All tables, and how they came about."""
    seeds = len({row["seed"] for row in results.rows})
    head = (
        f"Made by `{command}`: {len(results.conditions)} conditions, {seeds} seeds, {len(results.rows)} "
        f"runs; suite {results.suite_hash}, code {results.code_hash}. Shares are percentages of the oracle's "
        "figure on the same requests (of a latency, the oracle's over the rule's), with 95 % bootstrap "
        "intervals.\n"
    )
    return "\n".join([head, *(table.markdown() for table in tables(results))])


def _aims(results: Results, names: list[str]) -> ResultTable:
    """The project's aims for its own rules."""
    rows = []
    for known, mean_aim, worst_aim in (("", 99.7, 97.0), ("@none", 99.0, 96.0), ("@other", 99.0, 96.0)):
        for rule in ("greedy", "thompson"):
            stands = standing(rule + known, headline_shares(results, rule + known, names))
            if stands is None:
                continue
            mean, worst = 100 * stands.share.mean, 100 * stands.worst
            met = "met" if mean >= mean_aim and worst >= worst_aim else "missed"
            rows.append(
                (
                    rule + known,
                    f"{mean:.2f} (aim {mean_aim:g})",
                    f"{worst:.2f} (aim {worst_aim:g})",
                    _short(results.conditions[stands.worst_condition]),
                    met,
                )
            )
    return ResultTable(
        "Aims",
        "Share of the oracle over the conditions of the main grids: output rate in closed loops, tokens per "
        "request-second in open ones.",
        ("rule", "mean", "worst condition", "condition", "aims"),
        tuple(rows),
    )


def _by_rule(results: Results, grid: str, facts: list[ConditionFacts]) -> ResultTable:
    names = [condition.name for condition in facts]
    closed = all(condition.is_closed_loop for condition in facts)
    stands = _standings(results, names, rules_of(results, names))
    rows = []
    for each in stands:
        figures = (
            _mean_share(results, each.rule, metric, names)
            for metric in ("efficiency", "tpot_ms", "tpot_p99_ms", "ttft_ms", "ttft_p99_ms")
        )
        rows.append(
            (
                each.rule,
                _interval(each),
                f"{100 * each.worst:.1f}",
                _short(results.conditions[each.worst_condition]),
                *figures,
                _total_goodput(results, each.rule, names),
                _switches(results, each.rule, names),
                _plain(mean_of(results, each.rule, "recovery_s", names)),
            )
        )
    measure = "output rate" if closed else "tokens per request-second"
    return ResultTable(
        f"Grid {grid}",
        f"{len(facts)} conditions; the first share is that of {measure}. All but the last two columns are "
        "shares of the oracle; switches per 1,000 steps, recovery from a jump of load or acceptance in s.",
        (
            "rule",
            "share",
            "worst",
            "which",
            "per step",
            "TPOT",
            "p99 TPOT",
            "TTFT",
            "p99 TTFT",
            "goodput",
            "switches",
            "recovery",
        ),
        tuple(rows),
    )


def _by_setting(results: Results, grid: str, facts: list[ConditionFacts]) -> ResultTable:
    settings = list(dict.fromkeys(condition.setting for condition in facts))
    names = [condition.name for condition in facts]
    rows = []
    for stands in _standings(results, names, rules_of(results, names)):
        cells = []
        for setting in settings:
            here = [condition.name for condition in facts if condition.setting == setting]
            at = standing(stands.rule, headline_shares(results, stands.rule, here))
            cells.append(_NONE if at is None else f"{100 * at.share.mean:.1f} ({100 * at.worst:.1f})")
        rows.append((stands.rule, *cells))
    return ResultTable(
        f"Grid {grid}",
        f"{len(facts)} conditions; mean share of the oracle in the same setting, in parentheses the worst.",
        ("rule", *settings),
        tuple(rows),
    )


def _training(results: Results, names: list[str]) -> ResultTable:
    """What tuned rules keep of what they were tuned to."""
    train = [name for name in names if results.conditions[name].is_training]
    test = [name for name in names if not results.conditions[name].is_training]
    rows = []
    for rule in rules_of(results, names):
        if not Contender(rule).tuned_for and rule not in ("greedy", "greedy@none"):
            continue
        cells = [standing(rule, headline_shares(results, rule, part)) for part in (train, test)]
        if all(cells):
            rows.append((rule, *(f"{_interval(c)} ({100 * c.worst:.1f})" for c in cells if c is not None)))
    return ResultTable(
        "Tuned rules on scenarios that they were tuned on, and on others",
        "Mean share of the oracle with interval, in parentheses the worst condition.",
        ("rule", "training scenarios", "test scenarios"),
        tuple(rows),
    )


def _learning(results: Results, names: list[str]) -> ResultTable:
    """What is lost against the same rule with converged estimates, step by step."""
    rules = rules_of(results, names)
    rows = []
    for rule in rules:
        contender = Contender(rule)
        learnt = f"{contender.rule}@learnt"
        if contender.has_learnt or learnt not in rules:
            continue
        cells = []
        for metric in ("efficiency", "late_efficiency"):
            ratio = ratio_of(
                shares_of(results, rule, metric, names), shares_of(results, learnt, metric, names)
            )
            cells.append(_losses(rule, ratio))
        rows.append((rule, *cells))
    return ResultTable(
        "Learning loss",
        "What a rule loses against itself with converged estimates, in % of the per-step share: mean, and in "
        "the worst condition.",
        ("rule", "whole run", "after 2,000 steps"),
        tuple(rows),
    )


def _above_oracle(results: Results) -> ResultTable:
    found = []
    for name, facts in results.conditions.items():
        for rule in rules_of(results, [name]):
            stands = standing(rule, headline_shares(results, rule, [name]))
            if stands is not None and stands.share.mean >= ABOVE_ORACLE:
                found.append((stands.share.mean, rule, facts))
    found.sort(key=lambda entry: (-entry[0], entry[1]))
    return ResultTable(
        "Above the oracle",
        f"Of {len(found)} shares above {100 * ABOVE_ORACLE:.1f} % in a condition, the {MOST_ABOVE} largest.",
        ("rule", "share", "condition"),
        tuple((rule, f"{100 * share:.1f}", facts.name) for share, rule, facts in found[:MOST_ABOVE]),
    )


def _standings(results: Results, names: list[str], rules: Iterable[str]) -> list[Standing]:
    """Best first."""
    stands = (standing(rule, headline_shares(results, rule, names)) for rule in rules)
    return sorted((s for s in stands if s is not None), key=lambda s: (-s.share.mean, s.rule))


def _grids(results: Results) -> dict[str, list[ConditionFacts]]:
    grids: dict[str, list[ConditionFacts]] = {}
    for facts in results.conditions.values():
        grids.setdefault(facts.grid, []).append(facts)
    return grids


def _interval(stands: Standing) -> str:
    share = stands.share
    return f"{100 * share.mean:.1f} [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _losses(rule: str, ratio: Shares) -> str:
    stands = standing(rule, ratio)
    if stands is None:
        return _NONE
    return f"{100 * (1 - stands.share.mean):.2f}, {100 * (1 - stands.worst):.2f}"


def _mean_share(results: Results, rule: str, metric: str, names: Sequence[str]) -> str:
    stands = standing(rule, shares_of(results, rule, metric, names))
    return _NONE if stands is None else f"{100 * stands.share.mean:.1f}"


def _total_goodput(results: Results, rule: str, names: Sequence[str]) -> str:
    """Of all conditions together: where the oracle has next to none, a share of it means nothing."""
    own, oracle = (mean_of(results, each, "goodput", names) for each in (rule, ORACLE))
    return _NONE if own is None or not oracle else f"{100 * own / oracle:.1f}"


def _switches(results: Results, rule: str, names: Sequence[str]) -> str:
    switches, steps = (mean_of(results, rule, name, names) for name in ("switches", "steps"))
    return _NONE if switches is None or not steps else f"{1000 * switches / steps:.0f}"


def _plain(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _short(facts: ConditionFacts) -> str:
    return f"{facts.scenario}, {facts.profile.removeprefix('h200-')}"
