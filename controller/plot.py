"""Line, step, point, area and bar plots as SVG text, with nothing but the standard library.

A figure is a column of panels that share their x axis. Series hold plain numbers; None or NaN breaks a line.
What has a colour of ``svg.py``'s has a class too (``ink``, ``muted``, ``grid``, ``paper``, ``c0`` ... for the
palette), so that a page which holds the picture can restyle it, for dark mode say.
"""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from specgov.controller.svg import AREA_OPACITY, BAND_OPACITY, FONT, FONT_PX, GRID, MUTED, PALETTE
from specgov.controller.svg import class_of as svg_class
from specgov.controller.svg import dot as svg_dot
from specgov.controller.svg import line as svg_line
from specgov.controller.svg import rect as svg_rect
from specgov.controller.svg import text as svg_text

CHARACTER_PX = 0.6 * FONT_PX
"""Width assumed of a character where text is laid out side by side."""

MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM, X_LABEL_PX = 72, 24, 28, 16
X_TICKS, Y_TICKS = 10, 4
TITLE_PX, PANEL_HEAD_PX, PANEL_GAP_PX = 36, 24, 18
LEGEND_ROW_PX, LEGEND_MARK_PX, LEGEND_GAP_PX = 18, 24, 16
BAR_SHARE = 0.7
"""Of the room that a bar has."""
LEAST_SPAN_PX = 1.5


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: as many ``y`` as ``x``. A step curve holds each value until the next x.

    Areas, bands (areas that others shine through) and bars go from ``base`` to ``y``; base None is 0.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    kind: Literal["line", "step", "points", "area", "band", "bars"] = "line"
    color: str | None = None
    dashed: bool = False
    base: Sequence[float | None] | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot area. ``y_range`` None takes the data's, on a linear axis with 0 in it.

    ``spans`` are stretches of x that are shaded from top to bottom.
    """

    title: str
    series: Sequence[Series]
    y_range: tuple[float, float] | None = None
    y_log: bool = False
    y_ticks: Sequence[float] | None = None
    height_px: int = 150
    spans: Sequence[tuple[float, float]] = ()

    @property
    def labelled(self) -> list[tuple[int, Series]]:
        """The series that the legend shows, with their places among all."""
        return [(index, series) for index, series in enumerate(self.series) if series.label]


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels one below the other over one x axis.

    ``x_labels`` are the texts of ``x_ticks`` where numbers would say little. A figure without a title has no
    room for one.
    """

    title: str
    x_label: str
    panels: Sequence[Panel]
    x_log: bool = False
    x_ticks: Sequence[float] | None = None
    width_px: int = 860
    x_labels: Sequence[str] | None = None
    x_range: tuple[float, float] | None = None

    @property
    def height_px(self) -> int:
        """Of the whole picture."""
        panels = sum(self.head_px(panel) + panel.height_px for panel in self.panels)
        gaps = PANEL_GAP_PX * (len(self.panels) - 1)
        return self.title_px + panels + gaps + MARGIN_BOTTOM + (X_LABEL_PX if self.x_label else 0)

    @property
    def title_px(self) -> int:
        """Height of the title."""
        return TITLE_PX if self.title else 0

    def legend_rows(self, panel: Panel) -> list[list[tuple[int, Series]]]:
        """The panel's legend in rows; the first stands beside its title if all of it has room there."""
        width = self.width_px - MARGIN_LEFT - MARGIN_RIGHT
        beside = width - _text_px(panel.title) - LEGEND_GAP_PX
        if sum(_entry_px(series) for _, series in panel.labelled) <= beside:
            return [panel.labelled]
        rows: list[list[tuple[int, Series]]] = [[], []]
        for entry in panel.labelled:
            if rows[-1] and sum(_entry_px(series) for _, series in [*rows[-1], entry]) > width:
                rows.append([])
            rows[-1].append(entry)
        return rows

    def head_px(self, panel: Panel) -> int:
        """Height of the panel's title and legend."""
        return PANEL_HEAD_PX + LEGEND_ROW_PX * (len(self.legend_rows(panel)) - 1)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the data range ``low``..``high`` to the pixels ``start_px``..``end_px``."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of ``value``."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start_px + (at - low) / (high - low) * (self.end_px - self.start_px)

    def ticks(self, about: int) -> list[float]:
        """Round values inside the range, about so many; powers where the axis is logarithmic."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high, about)


def render(figure: Figure) -> str:
    """The figure as an SVG document.

    Raises:
        ValueError: a series has not as many y as x, or nothing that a logarithmic axis can show.

    """
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {figure.width_px} {figure.height_px}",
            "width": str(figure.width_px),
            "height": str(figure.height_px),
            "font-family": FONT,
            "font-size": str(FONT_PX),
            "role": "img",
        },
    )
    names = ", ".join(panel.title for panel in figure.panels)
    ET.SubElement(svg, "title").text = figure.title or names
    ET.SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": "white", "class": "paper"})
    if figure.title:
        svg_text(svg, figure.title, MARGIN_LEFT, 23, size=15, weight="bold")
    left, right = MARGIN_LEFT, figure.width_px - MARGIN_RIGHT
    if figure.x_range is not None:
        x_scale = Scale(*figure.x_range, left, right, figure.x_log)
    else:
        x_values = [x for panel in figure.panels for series in panel.series for x in series.x]
        x_scale = _scale(x_values, left, right, log=figure.x_log)
    top = figure.title_px
    for panel in figure.panels:
        last = panel is figure.panels[-1]
        head_px = figure.head_px(panel)
        _draw_panel(svg, figure, panel, x_scale, top + head_px, last)
        top += head_px + panel.height_px + PANEL_GAP_PX
    middle = (MARGIN_LEFT + figure.width_px - MARGIN_RIGHT) / 2
    svg_text(svg, figure.x_label, middle, figure.height_px - 8, anchor="middle", color=MUTED)
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _draw_panel(
    svg: ET.Element, figure: Figure, panel: Panel, x_scale: Scale, top: float, last: bool
) -> None:
    bottom = top + panel.height_px
    y_scale = _y_scale(panel, bottom, top)
    left, right = x_scale.start_px, x_scale.end_px
    for value in panel.y_ticks if panel.y_ticks is not None else y_scale.ticks(Y_TICKS):
        y = y_scale(value)
        svg_line(svg, left, y, right, y, GRID)
        svg_text(svg, _number(value), left - 8, y + 4, anchor="end", color=MUTED)
    for start, end in panel.spans:
        svg_rect(
            svg, x_scale(start), top, max(x_scale(end) - x_scale(start), 1.5), panel.height_px, PALETTE[1]
        )
    ticks = list(figure.x_ticks if figure.x_ticks is not None else x_scale.ticks(X_TICKS))
    labels = figure.x_labels if figure.x_labels is not None else [_number(value) for value in ticks]
    for value, label in zip(ticks, labels, strict=True):
        x = x_scale(value)
        svg_line(svg, x, bottom, x, bottom + 4, MUTED)
        if last:
            svg_text(svg, label, x, bottom + 18, anchor="middle", color=MUTED)
    svg_line(svg, left, bottom, right, bottom, MUTED)
    _draw_head(svg, figure, panel, left, right, top)
    for index, series in enumerate(panel.series):
        _draw_series(svg, series, _color(series, index), x_scale, y_scale)


def _draw_head(svg: ET.Element, figure: Figure, panel: Panel, left: float, right: float, top: float) -> None:
    """The panel's title, and its legend: beside it from the right end, or in rows of their own below."""
    rows = figure.legend_rows(panel)
    baseline = top - 8 - LEGEND_ROW_PX * (len(rows) - 1)
    svg_text(svg, panel.title, left, baseline, weight="bold")
    for number, row in enumerate(rows):
        x = left if len(rows) > 1 else right - sum(_entry_px(series) for _, series in row) + LEGEND_GAP_PX
        for index, series in row:
            _draw_entry(svg, series, _color(series, index), x, baseline + LEGEND_ROW_PX * number)
            x += _entry_px(series)


def _draw_entry(svg: ET.Element, series: Series, color: str, x: float, baseline: float) -> None:
    if series.kind == "points":
        svg_dot(svg, x + 10, baseline - 4, color)
    elif series.kind in ("area", "band", "bars"):
        opacity = BAND_OPACITY if series.kind == "band" else AREA_OPACITY
        svg_rect(svg, x + 4, baseline - 9, 14, 10, color, opacity)
    else:
        svg_line(svg, x, baseline - 4, x + 18, baseline - 4, color, 2, series.dashed)
    svg_text(svg, series.label, x + LEGEND_MARK_PX, baseline)


def _text_px(text: str) -> float:
    return len(text) * CHARACTER_PX


def _entry_px(series: Series) -> float:
    return LEGEND_MARK_PX + _text_px(series.label) + LEGEND_GAP_PX


def _draw_series(svg: ET.Element, series: Series, color: str, x_scale: Scale, y_scale: Scale) -> None:
    if series.kind in ("area", "band", "bars"):
        _draw_filled(svg, series, color, x_scale, y_scale)
        return
    for run in _runs(series, y_scale.log, x_scale.log):
        points = [(x_scale(x), y_scale(y)) for x, y in run]
        if series.kind == "points":
            for x, y in points:
                svg_dot(svg, x, y, color)
            continue
        if series.kind == "step":
            corners = [(later[0], earlier[1]) for earlier, later in itertools.pairwise(points)]
            points = [*itertools.chain(*zip(points, corners, strict=False)), points[-1]]
        attributes = {
            "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
            "fill": "none",
            "stroke": color,
            "stroke-width": "1.8",
            "stroke-linejoin": "round",
        } | svg_class(color)
        if series.dashed:
            attributes["stroke-dasharray"] = "5 4"
        ET.SubElement(svg, "polyline", attributes)


def _draw_filled(svg: ET.Element, series: Series, color: str, x_scale: Scale, y_scale: Scale) -> None:
    base = series.base if series.base is not None else [max(y_scale.low, 0.0)] * len(series.x)
    tops = Series(series.label, series.x, series.y)
    bottoms = dict(zip(series.x, base, strict=True))
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(series.x))]
    bar_px = BAR_SHARE * (x_scale(x_scale.low + min(gaps, default=1.0)) - x_scale.start_px)
    for run in _runs(tops, y_scale.log, x_scale.log):
        shown = [(x, y, low) for x, y in run if (low := bottoms[x]) is not None and math.isfinite(low)]
        if series.kind == "bars":
            for x, y, low in shown:
                y_px, low_px = y_scale(y), y_scale(low)
                svg_rect(svg, x_scale(x) - bar_px / 2, y_px, bar_px, low_px - y_px, color, AREA_OPACITY)
        elif shown:
            upper = [(x_scale(x), y_scale(y)) for x, y, _ in shown]
            lower = [(x_scale(x), y_scale(low)) for x, _, low in reversed(shown)]
            attributes = {
                "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *lower)),
                "fill": color,
                "fill-opacity": BAND_OPACITY if series.kind == "band" else AREA_OPACITY,
            }
            ET.SubElement(svg, "polygon", attributes | svg_class(color))


def _runs(series: Series, y_log: bool, x_log: bool) -> Iterator[list[tuple[float, float]]]:
    """The stretches between the points that cannot be shown."""
    if len(series.x) != len(series.y):
        raise ValueError(f"series {series.label!r} has {len(series.x)} x and {len(series.y)} y")
    run: list[tuple[float, float]] = []
    for x, y in zip(series.x, series.y, strict=True):
        if _shown(y, y_log) and _shown(x, x_log):
            run.append((float(x), float(y or 0.0)))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _shown(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _scale(values: Sequence[float | None], start_px: float, end_px: float, log: bool) -> Scale:
    shown = [float(value) for value in values if value is not None and _shown(value, log)]
    if not shown:
        if log:
            raise ValueError("nothing to show on a logarithmic axis: it needs values above 0")
        shown = [0.0]
    low, high = min(shown), max(shown)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return Scale(low, high, start_px, end_px, log)


def _y_scale(panel: Panel, bottom: float, top: float) -> Scale:
    if panel.y_range is not None:
        return Scale(*panel.y_range, bottom, top, panel.y_log)
    values = [y for series in panel.series for y in (*series.y, *(series.base or ()))]
    scale = _scale(values, bottom, top, panel.y_log)
    if panel.y_log:
        return scale
    return Scale(min(0.0, scale.low), scale.high + 0.05 * (scale.high - min(0.0, scale.low)), bottom, top)


def _linear_ticks(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of two over a short range, of ten over a long one."""
    base = 2.0 if high / low <= 4096 else 10.0
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [base**power for power in range(first, last + 1)]


def _number(value: float) -> str:
    """``value`` as a tick label: 12, 0.25, 1.5k, 2M."""
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g}{unit}"
    return f"{value:g}"


def _color(series: Series, index: int) -> str:
    return series.color or PALETTE[index % len(PALETTE)]
