"""Line, step and point plots as SVG text, with nothing but the standard library.

A figure is a column of panels that share their x axis. Series hold plain numbers; None or NaN breaks a line.
"""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

# Okabe and Ito's palette, told apart by colour-blind readers too (https://jfly.uni-koeln.de/color/).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
INK, MUTED, GRID = "#222222", "#666666", "#e4e4e4"
FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
FONT_PX = 12
CHARACTER_PX = 0.6 * FONT_PX
"""Width assumed of a character where text is laid out side by side."""

MARGIN_LEFT, MARGIN_RIGHT, MARGIN_BOTTOM = 72, 24, 44
X_TICKS, Y_TICKS = 10, 4
TITLE_PX, PANEL_HEAD_PX, PANEL_GAP_PX = 36, 24, 18


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: as many ``y`` as ``x``. A step curve holds each value until the next x."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    kind: Literal["line", "step", "points"] = "line"
    color: str | None = None
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot area. ``y_range`` None takes the data's, on a linear axis with 0 in it."""

    title: str
    series: Sequence[Series]
    y_range: tuple[float, float] | None = None
    y_log: bool = False
    y_ticks: Sequence[float] | None = None
    height_px: int = 150


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels one below the other over one x axis."""

    title: str
    x_label: str
    panels: Sequence[Panel]
    x_log: bool = False
    x_ticks: Sequence[float] | None = None
    width_px: int = 860

    @property
    def height_px(self) -> int:
        """Of the whole picture."""
        panels = sum(PANEL_HEAD_PX + panel.height_px for panel in self.panels)
        return TITLE_PX + panels + PANEL_GAP_PX * (len(self.panels) - 1) + MARGIN_BOTTOM


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
    ET.SubElement(svg, "title").text = figure.title
    ET.SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    _text(svg, figure.title, MARGIN_LEFT, 23, size=15, weight="bold")
    x_values = [x for panel in figure.panels for series in panel.series for x in series.x]
    x_scale = _scale(x_values, MARGIN_LEFT, figure.width_px - MARGIN_RIGHT, log=figure.x_log)
    top = TITLE_PX
    for panel in figure.panels:
        last = panel is figure.panels[-1]
        _draw_panel(svg, figure, panel, x_scale, top + PANEL_HEAD_PX, last)
        top += PANEL_HEAD_PX + panel.height_px + PANEL_GAP_PX
    middle = (MARGIN_LEFT + figure.width_px - MARGIN_RIGHT) / 2
    _text(svg, figure.x_label, middle, figure.height_px - 8, anchor="middle", color=MUTED)
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
        _line(svg, left, y, right, y, GRID)
        _text(svg, _number(value), left - 8, y + 4, anchor="end", color=MUTED)
    for value in figure.x_ticks if figure.x_ticks is not None else x_scale.ticks(X_TICKS):
        x = x_scale(value)
        _line(svg, x, bottom, x, bottom + 4, MUTED)
        if last:
            _text(svg, _number(value), x, bottom + 18, anchor="middle", color=MUTED)
    _line(svg, left, bottom, right, bottom, MUTED)
    _text(svg, panel.title, left, top - 8, weight="bold")
    _draw_legend(svg, panel, right, top - 8)
    for index, series in enumerate(panel.series):
        _draw_series(svg, series, _color(series, index), x_scale, y_scale)


def _draw_legend(svg: ET.Element, panel: Panel, right: float, baseline: float) -> None:
    """From the right end leftwards, on the line of the panel's title."""
    x = right
    for index, series in reversed(list(enumerate(panel.series))):
        if not series.label:
            continue
        x -= len(series.label) * CHARACTER_PX
        _text(svg, series.label, x, baseline)
        if series.kind == "points":
            _dot(svg, x - 14, baseline - 4, _color(series, index))
        else:
            _line(svg, x - 24, baseline - 4, x - 6, baseline - 4, _color(series, index), 2, series.dashed)
        x -= 40


def _draw_series(svg: ET.Element, series: Series, color: str, x_scale: Scale, y_scale: Scale) -> None:
    for run in _runs(series, y_scale.log, x_scale.log):
        points = [(x_scale(x), y_scale(y)) for x, y in run]
        if series.kind == "points":
            for x, y in points:
                _dot(svg, x, y, color)
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
        }
        if series.dashed:
            attributes["stroke-dasharray"] = "5 4"
        ET.SubElement(svg, "polyline", attributes)


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
    values = [y for series in panel.series for y in series.y]
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


def _text(
    svg: ET.Element,
    text: str,
    x: float,
    y: float,
    anchor: str = "start",
    color: str = INK,
    size: int = FONT_PX,
    weight: str = "normal",
) -> None:
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "fill": color}
    if size != FONT_PX:
        attributes["font-size"] = str(size)
    if weight != "normal":
        attributes["font-weight"] = weight
    ET.SubElement(svg, "text", attributes).text = text


def _line(
    svg: ET.Element,
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    color: str,
    width: float = 1,
    dashed: bool = False,
) -> None:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    attributes = {**ends, "stroke": color, "stroke-width": str(width)}
    if dashed:
        attributes["stroke-dasharray"] = "5 4"
    ET.SubElement(svg, "line", attributes)


def _dot(svg: ET.Element, x: float, y: float, color: str) -> None:
    ET.SubElement(svg, "circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "2.6", "fill": color})
