"""The report as one HTML page: no script, no network, light and dark, for a desk and for a phone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from html import escape
from importlib import resources

from specgov.controller.plot import Figure, render
from specgov.controller.report import charts
from specgov.controller.report.estimators import Interval
from specgov.controller.report.events import Event
from specgov.controller.report.html import cards, figure_html, note, table
from specgov.controller.report.model import Model, conditional_acceptance
from specgov.controller.report.steps import Steps
from specgov.controller.report.summary import Bins, Totals, time_cells, totals
from specgov.controller.report.whatif import BEST_EACH_STEP, WhatIf, WhatIfs

SHOWN_EVENTS = 100
ACCEPTANCE_BINS = 40
"""Fewer than of the others: deep positions are drafted seldom."""
WHOLE = 0.95
"""Share of the steps from which on the model speaks of the whole log."""


@dataclass(frozen=True)
class Section:
    """What the page shows of one engine."""

    steps: Steps
    model: Model | None
    what_ifs: WhatIfs


def page(sections: Sequence[Section], sources: Sequence[str], zone: tzinfo = UTC) -> str:
    """The page; times are told in ``zone``."""
    style = resources.files("specgov.controller.report").joinpath("style.css").read_text(encoding="utf-8")
    first = min(float(section.steps.time_s[0]) for section in sections)
    last = max(float(section.steps.time_s[-1]) for section in sections)
    links = "".join(
        f'<a href="#engine-{number}">{escape(section.steps.name)}</a>'
        for number, section in enumerate(sections, start=1)
    )
    body = [
        "<h1>Specgov: what the decisions did</h1>",
        f"<p>{_span(first, last, zone)}. Times are {escape(_zone_name(first, zone))}.</p>",
        note(f"From {', '.join(sources)}."),
        f"<nav>{links}</nav>" if len(sections) > 1 else "",
        *(_section(section, number, zone) for number, section in enumerate(sections, start=1)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Specgov report</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _section(section: Section, number: int, zone: tzinfo) -> str:
    steps, model = section.steps, section.model
    bins = Bins(steps)
    parts = [
        f'<section id="engine-{number}"><h2>{escape(steps.name)}</h2>',
        f"<p>{escape(_describe(steps))}</p>",
        cards(_cards(totals(steps, model), steps)),
        _plot("Tiers, batch and output rate", charts.over_time(steps, model, bins, zone), _SHADED),
        _events(steps, zone),
        _what_ifs(section),
        *_regret(section, bins, zone),
        _plot("Acceptance by position", charts.acceptance(steps), _acceptance_note(steps)),
        figure_html(*_both(charts.acceptance_over_time(steps, Bins(steps, ACCEPTANCE_BINS), zone)))
        if steps.tiers[-1]
        else "",
        *_step_times(section, bins, zone),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


_SHADED = (
    "Shaded: the guard, a fallback or the engine's own rule held, as listed below. The output rate is by the "
    "clock, prefill and idle time included."
)


def _describe(steps: Steps) -> str:
    engine = steps.engine
    words = [str(engine.get(key)) for key in ("model", "gpu", "engine", "engine_version") if engine.get(key)]
    what = ", ".join(words) or "model and machine not named"
    tiers = ", ".join(map(str, steps.tiers))
    return f"{what}; num_steps {tiers}; decided by {', '.join(steps.policies) or 'nobody'}."


def _cards(numbers: Totals, steps: Steps) -> list[tuple[str, str]]:
    shown = [
        (f"{numbers.wall_rate:,.0f}", "output tokens/s, by the clock"),
        (f"{numbers.decode_rate:,.0f}", "output tokens/s while decoding"),
        (f"{numbers.accept_length:.2f}", "accept length, over all tiers"),
        (f"{numbers.steps:,}", f"steps in {_duration(numbers.duration_s)}"),
        (f"{numbers.switches:,}", "switches of tier"),
        (_percent(numbers.regret, 1), "estimated loss against the model's best tier"),
        (_percent(numbers.error_median, 1), "median error of expected step times"),
        (f"{numbers.own_rule_steps:,}", "steps by the engine's own rule"),
    ]
    if steps.reports_dropped:
        shown.append((f"{steps.reports_dropped:,}", "reports dropped or left out"))
    return [(value, label) for value, label in shown if not value.startswith("nan")]


def _regret(section: Section, bins: Bins, zone: tzinfo) -> list[str]:
    if section.model is None:
        return []
    figure = charts.regret(section.steps, section.model, bins, zone)
    text = (
        f"An estimate, by {section.model.source}: how much more output the tier that the model held for best "
        "would have given. It contains what was paid to learn, decision lag, and the model's own errors."
    )
    return [_plot("Regret", figure, text)]


def _acceptance_note(steps: Steps) -> str:
    _, drafts = conditional_acceptance(steps)
    never = [str(position) for position, count in enumerate(drafts, start=1) if count == 0]
    text = (
        "The share accepted of the drafts that were verified at this position, those before being accepted."
    )
    return text + (f" Never drafted: position {', '.join(never)}." if never else "")


def _step_times(section: Section, bins: Bins, zone: tzinfo) -> list[str]:
    model, steps = section.model, section.steps
    if model is None:
        return [note("Step times have nothing to be compared with: neither estimates nor a profile.")]
    by_size = charts.step_times(steps, model)
    if by_size is None:
        return []
    rows = [
        (
            f"k={cell.num_steps}",
            f"{cell.batch_size:.0f}",
            f"{cell.steps:,}",
            f"{cell.measured_ms:.2f}",
            f"{cell.expected_ms:.2f}",
            f"{cell.ratio:.3f}",
        )
        for cell in time_cells(steps, model)
    ]
    columns = ("tier", "batch size", "steps", "measured ms", "expected ms", "ratio")
    detail = table(columns, [[escape(cell) for cell in row] for row in rows])
    return [
        _plot("Step times", by_size, f"Medians by power of two of the batch size. Expected: {model.source}."),
        figure_html(*_both(charts.time_error(steps, model, bins, zone))),
        f"<details><summary>The numbers</summary>{detail}</details>",
    ]


def _events(steps: Steps, zone: tzinfo) -> str:
    title = "<h3>Fallbacks, alarms and changes</h3>"
    if not steps.events:
        return title + "<p>None.</p>"
    # What went wrong comes first where not all are shown.
    ranked = sorted(steps.events, key=lambda event: (event.kind in ("stream", "change"), event.start_s))
    shown = sorted(ranked[:SHOWN_EVENTS], key=lambda event: event.start_s)
    left_out = len(steps.events) - len(shown) + steps.events_left_out
    rows = [_event_row(event, zone) for event in shown]
    more = note(f"{left_out} more are not shown.") if left_out else ""
    return title + table(("time", "kind", "what", "for", "steps"), rows, text_columns=(1, 2)) + more


def _event_row(event: Event, zone: tzinfo) -> list[str]:
    kind = escape(event.kind)
    return [
        datetime.fromtimestamp(event.start_s, zone).strftime("%d %b %H:%M:%S"),
        f'<span class="{kind.partition(" ")[0]}">{kind}</span>',
        escape(event.text),
        _duration(event.end_s - event.start_s) if event.end_s > event.start_s else "",
        f"{event.steps:,}" if event.steps else "",
    ]


def _what_ifs(section: Section) -> str:
    found, model = section.what_ifs, section.model
    source = (
        f"Model estimates: {model.source}."
        if model is not None
        else "There is no model: the log has no estimates, and no profile was given (--profile)."
    )
    if found.known_share < WHOLE:
        source += (
            f" They exist for {100 * found.known_share:.0f} % of the steps and speak of those alone: "
            "compare them with each other, not with what was measured."
        )
    largest = max([found.modelled or 0.0, *(rule.modelled or 0.0 for rule in found.rules)])
    heads = ["rule", "model estimate, tokens/s", "against what ran"]
    rows = [
        ['<span class="name">what ran</span>', _bar(found.modelled, largest), ""],
        *(_rule_row(rule, found, largest) for rule in found.rules),
    ]
    measured = f"Measured while decoding: {_decode_rate(section):,.0f} tokens/s. "
    reasons = {rule.why_not for rule in found.rules if rule.why_not and rule.name != BEST_EACH_STEP}
    if all(rule.evidence is None for rule in found.rules) and len(reasons) == 1:
        why = escape(reasons.pop())
        after = f"<p><b>From what happened, none of this can be known from this log:</b> {why}.</p>"
    else:
        after = note(_EVIDENCE)
        heads += ["from what happened, tokens/s", "gain", "how well known"]
        rows[0] += [f"{_decode_rate(section):,.0f}", "", "measured"]
        for row, rule in zip(rows[1:], found.rules, strict=True):
            row += _evidence_cells(rule)
    body = table(heads, rows, text_columns=(5,), first_is="ran")
    return f"<h3>What other rules would have given</h3>{note(measured + source + ' ' + _HELD)}{body}{after}"


def _decode_rate(section: Section) -> float:
    return totals(section.steps, section.model).decode_rate


_HELD = (
    "The load is held by the clock: so much time at each batch size as there was. Prefill and idle time are "
    "outside, and a faster server would have had smaller batches."
)
_EVIDENCE = (
    "From what happened: the steps at which chance chose the rule's tier, weighted by the inverse of its "
    "probability and corrected with the model (doubly robust), with 95 % intervals. This exists only where "
    "the log's probabilities reach."
)


def _rule_row(rule: WhatIf, found: WhatIfs, largest: float) -> list[str]:
    aside = f"<br><small>{escape(rule.note)}</small>" if rule.note else ""
    known = rule.modelled is not None and found.modelled
    gain = f"{100 * (rule.modelled / found.modelled - 1):+.1f} %" if known else ""  # type: ignore[operator]
    return [f'<span class="name">{escape(rule.name)}</span>{aside}', _bar(rule.modelled, largest), gain]


def _evidence_cells(rule: WhatIf) -> list[str]:
    evidence = rule.evidence
    if evidence is None:
        return ["cannot be known<br>from this log", "", escape(rule.why_not)]
    best = evidence.best
    how = "doubly robust" if evidence.doubly_robust else "inverse propensity"
    by_ips = f"; without the model {_interval(evidence.ips.rate)}" if evidence.doubly_robust else ""
    share, worth = f"{100 * evidence.share:.0f} %", f"{evidence.effective_steps:,.0f}"
    why = f"{how}, from {share} of the steps, worth {worth}{by_ips}"
    return [_interval(best.rate), _gain(best.gain), escape(why)]


def _gain(gain: Interval) -> str:
    return f"{100 * gain.value:+.1f} %<br><small>{100 * gain.low:+.1f} to {100 * gain.high:+.1f}</small>"


def _bar(value: float | None, largest: float) -> str:
    if value is None or not largest:
        return "not known"
    return f'<span class="bar" style="width:{4 * value / largest:.2f}rem"></span>{value:,.0f}'


def _interval(interval: Interval) -> str:
    if math.isnan(interval.value):
        return "-"
    ends = "" if math.isnan(interval.low) else f" ({interval.low:,.0f} to {interval.high:,.0f})"
    return f"{interval.value:,.0f}{ends}"


def _plot(title: str, figure: Figure, text: str) -> str:
    return f"<h3>{escape(title)}</h3>{note(text)}{figure_html(*_both(figure))}"


def _both(figure: Figure) -> tuple[str, str]:
    return render(figure), render(charts.narrow(figure))


def _span(first_s: float, last_s: float, zone: tzinfo) -> str:
    first, last = (datetime.fromtimestamp(at_s, zone) for at_s in (first_s, last_s))
    end = last.strftime("%H:%M:%S") if first.date() == last.date() else last.strftime("%d %b %Y %H:%M:%S")
    return f"{first.strftime('%d %b %Y %H:%M:%S')} to {end}"


def _zone_name(at_s: float, zone: tzinfo) -> str:
    return datetime.fromtimestamp(at_s, zone).tzname() or str(zone)


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "less than 1 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"
