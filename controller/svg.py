"""The shapes of ``plot.py``, their colours, and the classes by which a page can restyle them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

# Okabe and Ito's palette, told apart by colour-blind readers too (https://jfly.uni-koeln.de/color/).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
INK, MUTED, GRID = "#222222", "#666666", "#e4e4e4"
FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
CLASSES = {color: f"c{i}" for i, color in enumerate(PALETTE)} | {INK: "ink", MUTED: "muted", GRID: "grid"}
FONT_PX = 12
AREA_OPACITY = "0.85"
BAND_OPACITY = "0.22"
SPAN_OPACITY = "0.18"


def text(
    svg: ET.Element,
    words: str,
    x: float,
    y: float,
    anchor: str = "start",
    color: str = INK,
    size: int = FONT_PX,
    weight: str = "normal",
) -> None:
    """A text whose baseline is at ``y``."""
    attributes = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "fill": color} | class_of(color)
    if size != FONT_PX:
        attributes["font-size"] = str(size)
    if weight != "normal":
        attributes["font-weight"] = weight
    ET.SubElement(svg, "text", attributes).text = words


def line(
    svg: ET.Element,
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    color: str,
    width: float = 1,
    dashed: bool = False,
) -> None:
    """A straight line."""
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    attributes = {**ends, "stroke": color, "stroke-width": str(width)} | class_of(color)
    if dashed:
        attributes["stroke-dasharray"] = "5 4"
    ET.SubElement(svg, "line", attributes)


def dot(svg: ET.Element, x: float, y: float, color: str) -> None:
    """A small disc."""
    at = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "2.6", "fill": color}
    ET.SubElement(svg, "circle", at | class_of(color))


def rect(
    svg: ET.Element,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    opacity: str = SPAN_OPACITY,
) -> None:
    """A filled rectangle with its upper left corner at ``x``, ``y``."""
    sides = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{max(height, 0):.1f}"}
    ET.SubElement(svg, "rect", {**sides, "fill": color, "fill-opacity": opacity} | class_of(color))


def class_of(color: str) -> dict[str, str]:
    """The attribute by which a page finds what has this colour."""
    return {"class": CLASSES[color]} if color in CLASSES else {}
