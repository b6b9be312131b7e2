"""How the GPU benchmark tells of open loops, of the sweep and of what Specgov costs by being there."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU), str(GPU / "plugin")]

from contest import parse_arguments, rounds  # noqa: E402
from loads import get_load  # noqa: E402
from presence import presence  # noqa: E402
from report import collect, load_table, markdown, ratio, summary, write_page  # noqa: E402
from sweep import sweep_figure, sweep_table  # noqa: E402

from specgov.controller.plot import render  # noqa: E402


def run(load: str, who: str, rate: float, **others: Any) -> dict[str, Any]:
    """A run of seed 1."""
    return {
        "load": load,
        "contestant": who,
        "seed": 1,
        "output_tokens_per_s": rate,
        "tpot_ms": {"p50": 5.0, "p99": 6.0},
        "ttft_ms": {"p50": 50.0, "p99": 60.0},
        "tier_time_shares": {"3": 1.0},
        "tier_switches": 0,
        "step_ms": {},
        "most_waiting": 2,
        "errors": {},
        **others,
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_an_open_loop_is_told_by_the_time_of_a_token() -> None:
    # The output rate is the same for all, but for the noise, which must not decide.
    runs = collect(
        [
            {
                "runs": [
                    run("open_low", "static-3", 1010, tpot_ms={"p50": 5.0, "p99": 9.0}),
                    run("open_low", "specgov-greedy", 990, tpot_ms={"p50": 4.0, "p99": 8.0}),
                ]
            }
        ]
    )
    head, _, first, second = map(cells, load_table(runs["open_low"]).splitlines())
    assert head[1:4] == ["TPOT p50 / p99, ms", "speed (1 / TPOT p50) to the best peer", "TTFT p50 / p99, ms"]
    assert first[:4] == ["specgov-greedy", "4.00 / 8.00", "+25.0%", "50.0 / 60.0"]
    assert second[:3] == ["**static-3**", "5.00 / 9.00", "+0.0%"]
    assert cells(summary(runs).splitlines()[2])[1:3] == ["static-3, TPOT 5.00 ms", "+25.0%"]


def test_an_open_loop_that_not_all_can_serve_is_told_by_the_output_rate() -> None:
    # Of those that finished in time TPOT says little: they are the short ones.
    few, many = ({"requests": {"sent": 300, "finished": n}} for n in (100, 290))
    runs = collect(
        [
            {
                "runs": [
                    run("open_high", "static-3", 4000, **few),
                    run("open_high", "specgov-greedy", 3000, tpot_ms={"p50": 4.0, "p99": 8.0}, **many),
                ]
            }
        ]
    )
    head, _, first, second = map(cells, load_table(runs["open_high"]).splitlines())
    assert head[1:3] == ["output tokens/s", "to the best peer"]
    assert first[:3] == ["**static-3**", "4000", "+0.0%"]
    assert second[:3] == ["specgov-greedy", "3000", "-25.0%"]
    assert [row[head.index("finished")] for row in (first, second)] == ["33%", "97%"]
    assert cells(summary(runs).splitlines()[2])[1:3] == ["static-3, 4000", "-25.0%"]


def test_each_place_of_a_page_is_written_by_its_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = "<!-- {0}: begin, written by benchmarks/gpu/report.py -->\nold\n<!-- {0}: end -->\n"
    page.write_text("".join(marks.format(name) for name in ("gpu", "gpu moe")))
    write_page(page, "new", "gpu moe")
    assert page.read_text() == marks.format("gpu") + marks.format("gpu moe").replace("old", "\nnew\n")


def test_the_sweep_is_one_table_and_one_picture() -> None:
    made = [run(f"sweep_{n}", "static-3", 100.0 * n) for n in (10, 2)]
    made += [run("sweep_2", "specgov-greedy", 300.0), run("sweep_2", "specgov-greedy", 500.0)]
    document = {"runs": made, "loads": {"sweep_2": {"tests": "Concurrencies."}}, "began": "now"}
    document |= {"gpu": "g", "cores": 1, "python": "3", "versions": {}}
    runs = collect([document])
    lines = [cells(line) for line in sweep_table(runs).splitlines()]
    assert lines[0] == ["output tokens/s at", "2", "10"]
    assert ["static-3", "200", "1000"] in lines
    assert ["specgov-greedy", "400 (300 to 500)", ""] in lines
    said = markdown([document])
    assert "### sweep\n\nConcurrencies." in said
    assert "### sweep_2" not in said
    figure = sweep_figure(runs)
    assert figure.x_labels == ["2", "10"]
    # The slowest at 2 is static-3 with 200, at 10 it is the only one.
    over = {tuple(series.y) for series in figure.panels[1].series}
    assert over == {(1.0, 1.0), (2.0, None)}
    assert "specgov-greedy" in render(figure)
    assert sweep_table(collect([{"runs": [run("ramp", "static-3", 1.0)]}])) == ""


def test_presence_is_told_by_the_step_time_too() -> None:
    # Batch size 8 has most steps in both runs of each pair; the one at 7 must not count.
    made = []
    for seed, (on, off) in enumerate([(6.6, 6.0), (6.3, 6.0)]):
        for who, ms in (("on", on), ("off", off)):
            steps = {"8": {"3": [ms, 400]}, "7": {"3": [99.0, 20]}}
            made.append({**run("steady_8", who, 100.0, step_ms=steps), "seed": seed})
    row = cells(presence(collect([{"runs": made}]), "on", "off").splitlines()[2])
    mean = (math.log(1.1) + math.log(1.05)) / 2
    assert row[:4] == ["steady_8", "2", "1.0000", "1.0000 to 1.0000"]
    assert row[4] == f"{math.exp(mean):.4f}"


def test_runs_are_compared_within_a_start_of_the_server_where_that_can_be() -> None:
    # The second start is on a host twice as slow. A plain server is a start of its own.
    first = {"began": "1", "runs": [run("ramp", "static-3", 100.0), run("ramp", "specgov-greedy", 110.0)]}
    second = {"began": "2", "runs": [run("ramp", "static-3", 50.0), run("ramp", "specgov-greedy", 60.0)]}
    plain = {"began": "3", "runs": [run("ramp", "no-speculation", 40.0)]}
    by_contestant = collect([first, second, plain])["ramp"]
    greedy, static = by_contestant["specgov-greedy"], by_contestant["static-3"]
    assert ratio(greedy, static) == pytest.approx((1.1 + 1.2) / 2)
    assert ratio(by_contestant["no-speculation"], static) == pytest.approx(40 / 50)
    row = cells(presence(collect([first, second]), "specgov-greedy", "static-3").splitlines()[2])
    assert row[:3] == ["ramp", "2", f"{math.sqrt(1.1 * 1.2):.4f}"]


def test_a_load_is_played_as_often_as_wanted_each_first_of_all() -> None:
    words = ["-o", "o", "--loads", "ramp,steady_8", "--repeats", "1", "--repeats-of", "steady_8=3"]
    options = parse_arguments([*words, "--", "--model-path", "m"])
    loads = [get_load(name) for name in options.loads]
    played = [(repeat, load.name) for repeat, load in rounds(loads, options.repeats, options.repeats_of)]
    assert played == [(0, "ramp"), (0, "steady_8"), (1, "steady_8"), (2, "steady_8")]
