"""The report's plots, as figures of ``controller.plot``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, tzinfo

import numpy as np
from numpy.typing import NDArray

from specgov.controller.plot import Figure, Panel, Series
from specgov.controller.report.model import Model, conditional_acceptance
from specgov.controller.report.steps import Steps
from specgov.controller.report.summary import Bins, rate_time, tier_shares, time_cells, time_ratio
from specgov.controller.svg import PALETTE

Floats = NDArray[np.float64]

WIDE_PX, NARROW_PX = 860, 400
SHADED_EVENTS = ("alarm", "guard", "fallback", "own rule")
MOST_SPANS = 100
_TICK_STEPS_S = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10_800,
    21_600,
    43_200,
    86_400,
)
_BLUE, _ORANGE, _GREEN, _PINK, _YELLOW, _SKY, _GREY = PALETTE
TIER_COLORS = ("#b9bcc2", "#a6d4f2", _SKY, "#2b8cc9", _BLUE, "#74c69d", _GREEN, _YELLOW, _ORANGE)
"""By depth: grey for none, then from light to strong."""


def over_time(steps: Steps, model: Model | None, bins: Bins, zone: tzinfo = UTC) -> Figure:
    """Tiers, batch size and waiting requests, output rate; shaded where the policy did not decide."""
    median, low, high = bins.quantiles(steps.batch_size, 0.5, 0.1, 0.9)
    (waiting,) = bins.quantiles(steps.waiting_requests, 0.5)
    rate = bins.sums(steps.tokens) / bins.width_s
    batch = [
        Series("10th to 90th percentile", _x(bins), _y(high), "band", _BLUE, base=_y(low)),
        Series("running requests", _x(bins), _y(median), "line", _BLUE),
    ]
    if np.nanmax(waiting, initial=0.0) > 0:
        batch.append(Series("waiting", _x(bins), _y(waiting), "line", _ORANGE, dashed=True))
    spans = _spans(steps)
    panels = [
        Panel(
            "share of decode time by num_steps",
            _stack(steps, model, bins),
            (0.0, 1.0),
            height_px=150,
            spans=spans,
        ),
        Panel("batch size", batch, height_px=120, spans=spans),
        Panel(
            "output rate (tokens/s)",
            [Series("", _x(bins), _y(rate), "line", _GREEN)],
            height_px=150,
            spans=spans,
        ),
    ]
    return _timed(panels, bins, zone)


def regret(steps: Steps, model: Model, bins: Bins, zone: tzinfo = UTC) -> Figure:
    """Estimated share of output lost against the model's best tier, in %."""
    ran, best = rate_time(steps, model)
    known = np.isfinite(ran) & np.isfinite(best)
    with np.errstate(invalid="ignore", divide="ignore"):
        lost = 100.0 * (1.0 - bins.sums(np.where(known, ran, 0.0)) / bins.sums(np.where(known, best, 0.0)))
    panel = Panel(
        "estimated loss against the model's best tier (%)",
        [Series("", _x(bins), _y(lost), "line", _PINK)],
        height_px=120,
        spans=_spans(steps),
    )
    return _timed([panel], bins, zone)


def acceptance(steps: Steps) -> Figure:
    """P(draft accepted | those before it were) by position."""
    probability, drafts = conditional_acceptance(steps)
    positions = np.flatnonzero(drafts > 0) + 1
    bars = Series("", positions.tolist(), probability[positions - 1].tolist(), "bars", _BLUE)
    panel = Panel("P(draft accepted | those before it were)", [bars], (0.0, 1.0), height_px=150)
    last = int(positions[-1]) if len(positions) else 1
    ticks = list(range(1, last + 1))
    return Figure("", "position", [panel], x_ticks=ticks, x_range=(0.4, last + 0.6))


def acceptance_over_time(steps: Steps, bins: Bins, zone: tzinfo = UTC) -> Figure:
    """The same over time."""
    survived = steps.survived.astype(np.float64)
    series = []
    for position in range(1, survived.shape[1]):
        drafted = steps.num_steps >= position
        at_risk = bins.sums(survived[:, position - 1] * drafted)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(at_risk >= 20, bins.sums(survived[:, position] * drafted) / at_risk, np.nan)
        if np.isfinite(share).any():
            color = TIER_COLORS[min(position, len(TIER_COLORS) - 1)]
            series.append(Series(str(position), _x(bins), _y(share), "line", color))
    return _timed([Panel("acceptance over time, by position", series, (0.0, 1.0), height_px=170)], bins, zone)


def step_times(steps: Steps, model: Model) -> Figure | None:
    """Medians of measured and expected step times by batch size, for each tier; None without any."""
    cells = time_cells(steps, model)
    if not cells:
        return None
    series: list[Series] = []
    for index, tier in enumerate(steps.tiers):
        mine = [cell for cell in cells if cell.num_steps == tier]
        if mine:
            x = [cell.batch_size for cell in mine]
            color = tier_color(steps.tiers, index)
            series.append(Series("", x, [cell.expected_ms for cell in mine], "line", color))
            series.append(Series(f"k={tier}", x, [cell.measured_ms for cell in mine], "points", color))
    panel = Panel("step time (ms): dots measured, lines expected", series, height_px=200)
    sizes = [cell.batch_size for cell in cells]
    low, high = max(min(sizes) / 1.2, 0.8), max(sizes) * 1.2
    ticks = [2.0**power for power in range(17) if low <= 2.0**power <= high]
    return Figure("", "batch size", [panel], x_log=True, x_ticks=ticks, x_range=(low, high))


def time_error(steps: Steps, model: Model, bins: Bins, zone: tzinfo = UTC) -> Figure:
    """Measured over expected step time: median and the middle 80 %."""
    median, low, high = bins.quantiles(time_ratio(steps, model), 0.5, 0.1, 0.9)
    top = float(np.clip(np.nanmax(high, initial=1.2) * 1.05, 1.3, 3.0))
    ones = Series(
        "", [float(bins.edges_s[0]), float(bins.edges_s[-1])], [1.0, 1.0], "line", _GREY, dashed=True
    )
    series = [
        Series("10th to 90th percentile", _x(bins), _y(np.minimum(high, top)), "band", _BLUE, base=_y(low)),
        Series("median", _x(bins), _y(np.minimum(median, top)), "line", _BLUE),
        ones,
    ]
    return _timed([Panel("measured / expected", series, (0.0, top), height_px=130)], bins, zone)


def narrow(figure: Figure) -> Figure:
    """The figure for a phone: half as wide, with half the ticks on the x axis."""
    if figure.x_ticks is None or len(figure.x_ticks) <= 5:
        return replace(figure, width_px=NARROW_PX)
    labels = None if figure.x_labels is None else figure.x_labels[::2]
    return replace(figure, width_px=NARROW_PX, x_ticks=figure.x_ticks[::2], x_labels=labels)


def tier_color(tiers: tuple[int, ...], index: int) -> str:
    """The colour of a tier: grey for 0, and the others spread over the scale."""
    if tiers[index] == 0:
        return TIER_COLORS[0]
    above = [tier for tier in tiers if tier > 0]
    place = above.index(tiers[index]) / max(len(above) - 1, 1)
    return TIER_COLORS[1 + round(place * (len(TIER_COLORS) - 2))]


def time_ticks(first_s: float, last_s: float, zone: tzinfo, about: int = 8) -> tuple[list[float], list[str]]:
    """Round times of day between two, about so many, and how to write them."""
    wanted = (last_s - first_s) / about
    step = next((step for step in _TICK_STEPS_S if step >= wanted), None)
    if step is None:
        step = 86_400 * int(np.ceil(wanted / 86_400))
    offset = datetime.fromtimestamp(first_s, zone).utcoffset()
    shift = 0.0 if offset is None else offset.total_seconds()
    begin = np.ceil((first_s + shift) / step) * step - shift
    ticks = np.arange(begin, last_s + 1e-6, step).tolist()
    pattern = "%H:%M:%S" if step < 60 else "%H:%M" if last_s - first_s <= 86_400 else "%d %b %H:%M"
    if step >= 86_400:
        pattern = "%d %b"
    return ticks, [datetime.fromtimestamp(tick, zone).strftime(pattern) for tick in ticks]


def _timed(panels: Sequence[Panel], bins: Bins, zone: tzinfo) -> Figure:
    first, last = float(bins.edges_s[0]), float(bins.edges_s[-1])
    ticks, labels = time_ticks(first, last, zone)
    return Figure("", "", panels, x_ticks=ticks, x_labels=labels, x_range=(first, last))


def _stack(steps: Steps, model: Model | None, bins: Bins) -> list[Series]:
    shares = tier_shares(steps, model, bins)
    base = np.zeros(len(bins))
    series = []
    for index, tier in enumerate(steps.tiers):
        top = base + shares[:, index]
        if np.nansum(shares[:, index]) > 0:
            color = tier_color(steps.tiers, index)
            series.append(Series(f"k={tier}", _x(bins), _y(top), "area", color, base=_y(base)))
        base = top
    return series


def _spans(steps: Steps) -> list[tuple[float, float]]:
    shaded = [event for event in steps.events if event.kind in SHADED_EVENTS]
    return [(event.start_s, event.end_s) for event in shaded[:MOST_SPANS]]


def _x(bins: Bins) -> list[float]:
    return [float(value) for value in bins.middles_s]


def _y(values: Floats) -> list[float]:
    return [float(value) for value in values]
