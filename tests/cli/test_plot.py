"""The SVG plots: valid XML, and points where a hand calculation puts them."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from specgov.controller.plot import Figure, Panel, Scale, Series, render

SVG = "{http://www.w3.org/2000/svg}"


def drawn(figure: Figure) -> ET.Element:
    return ET.fromstring(render(figure))


def points(svg: ET.Element) -> list[list[tuple[float, float]]]:
    lines = svg.iter(f"{SVG}polyline")
    return [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in lines]


# A figure 796 wide has its x axis from 72 (left margin) to 796 - 24 = 772: 700 pixels. Its first panel, 100
# high, begins below 36 of title and 24 of panel head, so its y axis goes from 160 (bottom) up to 60.
def one_panel(series: Series, **panel: object) -> Figure:
    return Figure("t", "x", [Panel("p", [series], height_px=100, **panel)], width_px=796)


def test_a_line_lies_where_the_scales_put_it() -> None:
    # x 0..7 over 700 px: 100 px each. y 0..10 over 100 px: 10 px each, upwards from 160.
    svg = drawn(one_panel(Series("s", [0, 2, 7], [0, 5, 10]), y_range=(0, 10)))
    assert points(svg) == [[(72, 160), (272, 110), (772, 60)]]


def test_a_step_holds_its_value_until_the_next_x() -> None:
    svg = drawn(one_panel(Series("s", [0, 2, 7], [0, 5, 10], "step"), y_range=(0, 10)))
    assert points(svg) == [[(72, 160), (272, 160), (272, 110), (772, 110), (772, 60)]]


def test_points_are_dots_on_a_logarithmic_axis() -> None:
    # 1, 16, 256 are equally far apart on a logarithmic axis: 0, 350 and 700 px.
    series = Series("s", [1, 16, 256], [0, 0, 10], "points")
    svg = drawn(
        Figure("t", "x", [Panel("p", [series], y_range=(0, 10), height_px=100)], x_log=True, width_px=796)
    )
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in svg.iter(f"{SVG}circle")]
    assert dots[-3:] == [(72, 160), (422, 160), (772, 60)]


def test_what_cannot_be_shown_breaks_the_line() -> None:
    series = Series("s", [0, 1, 2, 3, 7], [0, 5, None, math.nan, 10])
    assert points(drawn(one_panel(series, y_range=(0, 10)))) == [[(72, 160), (172, 110)], [(772, 60)]]


def test_panels_share_the_x_axis_and_stand_one_below_the_other() -> None:
    panels = [
        Panel("a", [Series("", [0, 7], [0, 10])], y_range=(0, 10), height_px=100),
        Panel("b", [Series("", [0], [10])], y_range=(0, 10), height_px=50),
    ]
    svg = drawn(Figure("t", "x", panels, width_px=796))
    # The second panel begins 18 (gap) + 24 (its head) below the first one's bottom at 160.
    assert points(svg) == [[(72, 160), (772, 60)], [(72, 202)]]
    assert svg.attrib["height"] == str(36 + 24 + 100 + 18 + 24 + 50 + 44)


def polygons(svg: ET.Element) -> list[list[tuple[float, float]]]:
    shapes = svg.iter(f"{SVG}polygon")
    return [
        [tuple(map(float, pair.split(","))) for pair in shape.attrib["points"].split()] for shape in shapes
    ]


def rectangles(svg: ET.Element) -> list[tuple[float, ...]]:
    found = [rect.attrib for rect in svg.iter(f"{SVG}rect") if "x" in rect.attrib]
    return [tuple(float(each[key]) for key in ("x", "y", "width", "height")) for each in found]


@pytest.mark.parametrize("kind", ["area", "band"])
def test_an_area_goes_along_its_top_and_back_along_its_base(kind: str) -> None:
    svg = drawn(one_panel(Series("", [0, 7], [5, 10], kind, base=[0, 2]), y_range=(0, 10)))
    assert polygons(svg) == [[(72, 110), (772, 60), (772, 140), (72, 160)]]


def test_an_area_is_broken_where_its_top_or_its_base_cannot_be_shown() -> None:
    series = Series("", [0, 1, 2, 7], [5, None, 5, 10], "area", base=[0, 0, 0, 0])
    assert polygons(drawn(one_panel(series, y_range=(0, 10)))) == [
        [(72, 110), (72, 160)],
        [(272, 110), (772, 60), (772, 160), (272, 160)],
    ]


def test_bars_stand_on_the_axis_and_leave_gaps() -> None:
    # x -1..6 over 700 px: 100 px each, so bars one apart are 70 wide, 35 to each side.
    figure = Figure("t", "x", [Panel("p", [Series("", [0, 1], [10, 5], "bars")], (0, 10), height_px=100)],
                    width_px=796, x_range=(-1, 6))  # fmt: skip
    assert rectangles(drawn(figure)) == [(137, 60, 70, 100), (237, 110, 70, 50)]


def test_spans_are_shaded_from_top_to_bottom_and_never_vanish() -> None:
    series = Series("", [0, 7], [0, 10])
    svg = drawn(one_panel(series, y_range=(0, 10), spans=[(1, 3), (7, 7)]))
    assert rectangles(svg) == [(172, 60, 200, 100), (772, 60, 1.5, 100)]


def test_ticks_may_have_words_and_a_title_need_not_be() -> None:
    panel = Panel("p", [Series("", [0, 7], [0, 10])], y_range=(0, 10), height_px=100)
    figure = Figure("", "time", [panel], x_ticks=[0, 7], x_labels=["noon", "one"], width_px=796)
    svg = drawn(figure)
    assert {"noon", "one"} <= {text.text for text in svg.iter(f"{SVG}text")}
    assert points(svg) == [[(72, 124), (772, 24)]]  # without a title all is 36 px higher


def test_a_legend_without_room_beside_the_title_has_rows_of_its_own() -> None:
    # 24 of mark, 7.2 a character, 16 of gap: 30 characters take 256 px, so one has room in a row of 304.
    names = ["a" * 30, "b" * 30]
    panel = Panel("title", [Series(name, [0, 1], [0, 1]) for name in names], height_px=100)
    narrow, wide = (Figure("", "x", [panel], width_px=width) for width in (400, 860))
    assert [[series.label for _, series in row] for row in narrow.legend_rows(panel)] == [
        [],
        *([n] for n in names),
    ]
    assert len(wide.legend_rows(panel)) == 1
    assert narrow.height_px - wide.height_px == 2 * 18


def test_colours_have_classes_for_a_page_to_restyle() -> None:
    svg = drawn(one_panel(Series("", [0, 7], [0, 10]), y_range=(0, 10)))
    assert [line.attrib["class"] for line in svg.iter(f"{SVG}polyline")] == ["c0"]
    assert "paper" in {rect.attrib.get("class") for rect in svg.iter(f"{SVG}rect")}
    assert {text.attrib["class"] for text in svg.iter(f"{SVG}text")} == {"ink", "muted"}


def test_labels_are_escaped_and_all_there() -> None:
    svg = drawn(Figure("a < b & c", "time (s)", [Panel("rate", [Series("x<y", [0, 1], [0, 1])])]))
    texts = {text.text for text in svg.iter(f"{SVG}text")}
    assert {"a < b & c", "time (s)", "rate", "x<y"} <= texts


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0, 256, 4, [0, 100, 200]),  # a quarter is 64, the next round step is 100
        (0.1, 0.5, 4, [0.1, 0.2, 0.3, 0.4, 0.5]),
        (-3, 7, 2, [0, 5]),
    ],
)
def test_ticks_are_round(low: float, high: float, about: int, expected: list[float]) -> None:
    assert Scale(low, high, 0, 100).ticks(about) == pytest.approx(expected)


def test_ticks_of_a_logarithmic_axis_are_powers() -> None:
    assert Scale(3, 256, 0, 100, log=True).ticks(5) == [4, 8, 16, 32, 64, 128, 256]
    assert Scale(1, 1e5, 0, 100, log=True).ticks(5) == [1, 10, 100, 1000, 10000, 100000]


def test_a_figure_of_nothing_and_a_flat_one_are_drawn() -> None:
    drawn(Figure("t", "x", [Panel("p", [Series("s", [], [])])]))
    drawn(one_panel(Series("s", [3, 3], [5, 5])))


def test_unequal_lengths_and_empty_logarithmic_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 x and 1 y"):
        drawn(one_panel(Series("s", [0, 1], [0])))
    with pytest.raises(ValueError, match="logarithmic"):
        drawn(one_panel(Series("s", [0, 1], [0, -1]), y_log=True))
