"""report.py   Tables and pictures from contests' outputs.

    python benchmarks/gpu/report.py plain.json governed1.json governed2.json --page docs/benchmarks-gpu.md \
        --plot docs/benchmarks-gpu-ramp.svg --reality both.json --reality-page docs/simulator.md

Runs of one load and contestant are put together, from whichever file they come, and stand as medians with the
least and the largest; so give those together whose contestants may be compared, and each set a place (--mark)
of its own. Replaces what stands between the page's marks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from presence import presence  # noqa: E402
from report_tables import Runs, spread, table  # noqa: E402
from sweep import SWEEP, sweep_figure, sweep_table  # noqa: E402

from specgov.controller.plot import Figure, Panel, Series, render  # noqa: E402

SERVED = 0.75
"""An open loop of which every contestant finished this share is below what the server can do."""
ORACLE = "oracle"
OURS = "specgov-"
PLOTTED = ("oracle", "specgov-greedy", "sglang-adaptive-default", "threshold-tuned", "static-3")


def collect(documents: Sequence[dict[str, Any]]) -> Runs:
    """The runs of all documents, each with the time at which its server was started."""
    runs: Runs = defaultdict(lambda: defaultdict(list))
    for document in documents:
        for run in document["runs"]:
            runs[run["load"]][run["contestant"]].append({"began": document.get("began", ""), **run})
    for load, by_contestant in runs.items():
        played = [run for found in by_contestant.values() for run in found]
        by_tpot = is_open(load) and all(finished_share(run) >= SERVED for run in played)
        for run in played:
            run["by_tpot"] = by_tpot
    return runs


def is_open(load: str) -> bool:
    """Whether requests come by themselves, so that all that can serve them have one output rate."""
    return load.startswith("open")


def finished_share(run: dict[str, Any]) -> float:
    """Of the requests that were sent."""
    requests = run.get("requests", {"finished": 1, "sent": 1})
    return float(requests["finished"] / max(requests["sent"], 1))


def speed(run: dict[str, Any]) -> float:
    """The output rate; of an open loop that all can serve, where all have the same: 1 over TPOT."""
    if run["by_tpot"]:
        return 1e3 / run["tpot_ms"]["p50"] if run["tpot_ms"] else 0.0
    return float(run["output_tokens_per_s"])


def rate(runs: Sequence[dict[str, Any]]) -> float:
    """The median speed."""
    return statistics.median(map(speed, runs))


def ratio(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> float:
    """The median of the ratios on the same requests, which are those of a seed; nan without any.

    On the same start of a server too, where the others were played on it.
    """
    by_seed = {run["seed"]: speed(run) for run in others}
    by_start = {(run["began"], run["seed"]): speed(run) for run in others}
    known = [(run, by_start.get((run["began"], run["seed"])) or by_seed.get(run["seed"])) for run in runs]
    ratios = [speed(run) / other for run, other in known if other]
    return statistics.median(ratios) if ratios else math.nan


def best_peer(by_contestant: dict[str, list[dict[str, Any]]]) -> tuple[str, float]:
    """The fastest that is neither Specgov nor the oracle, on the seeds that all such played, and its rate.

    ("", nan) without any.
    """
    peers = {
        name: runs for name, runs in by_contestant.items() if not name.startswith(OURS) and name != ORACLE
    }
    if not peers:
        return "", math.nan
    seeds = set.intersection(*({run["seed"] for run in runs} for runs in peers.values()))
    rates = {
        name: rate([run for run in runs if run["seed"] in seeds] or runs) for name, runs in peers.items()
    }
    name = max(rates, key=lambda who: rates[who])
    return name, rates[name]


def load_table(by_contestant: dict[str, list[dict[str, Any]]]) -> str:
    """One load: a row a contestant, the fastest first; in some open loops by TPOT, see ``speed``."""
    peer, _ = best_peer(by_contestant)
    to_peer = {name: ratio(runs, by_contestant.get(peer, [])) for name, runs in by_contestant.items()}
    played = [run for runs in by_contestant.values() for run in runs]
    opened, by_tpot = any(is_open(run["load"]) for run in played), any(run["by_tpot"] for run in played)
    named = [] if by_tpot else ["output tokens/s", "to the best peer", "of the oracle"]
    named += ["TPOT p50 / p99, ms", *(["speed (1 / TPOT p50) to the best peer"] if by_tpot else [])]
    named += ["TTFT p50 / p99, ms", *(["output tokens/s"] if by_tpot else [])]
    named += ["finished", "most waiting"] if opened else []
    named += ["time at num_steps", "switches", "by the decision", "errors"]
    rows = []
    for name, runs in sorted(by_contestant.items(), key=lambda item: (-_sort(to_peer[item[0]]), item[0])):
        to_best = _percent(to_peer[name] - 1, "+.1%")
        cells = {
            "output tokens/s": spread([run["output_tokens_per_s"] for run in runs]),
            "to the best peer": to_best,
            "of the oracle": _percent(ratio(runs, by_contestant.get(ORACLE, []))),
            "TPOT p50 / p99, ms": _pair(runs, "tpot_ms", ".2f" if opened else ".1f"),
            "speed (1 / TPOT p50) to the best peer": to_best,
            "TTFT p50 / p99, ms": _pair(runs, "ttft_ms"),
            "finished": f"{statistics.median(map(finished_share, runs)):.0%}",
            "most waiting": str(max(run["most_waiting"] for run in runs)) if opened else "",
            "time at num_steps": _tiers(runs),
            "switches": f"{statistics.median(run['tier_switches'] for run in runs):.0f}",
            "by the decision": _followed(runs),
            "errors": str(sum(sum(run["errors"].values()) for run in runs)),
        }
        rows.append((f"**{name}**" if name == peer else name, *(cells[column] for column in named)))
    return table(("contestant", *named), rows)


def tier_0_tax(by_contestant: dict[str, list[dict[str, Any]]]) -> str:
    """What being able to speculate costs where nothing is drafted; "" where it was not played."""
    if not {"static-0", "no-speculation"} <= set(by_contestant):
        return ""
    more = ratio(by_contestant["no-speculation"], by_contestant["static-0"]) - 1
    if math.isnan(more):
        return ""
    return f"Tier-0 tax: a server without speculation makes {more:+.1%} output tokens against static-0."


def summary(runs: Runs) -> str:
    """Every load: Specgov's best rule beside the best peer and the oracle."""
    head = (
        "load",
        "best peer",
        "specgov-greedy to it",
        "fastest of Specgov's to it",
        "greedy, of the oracle",
    )
    rows = []
    for load, by_contestant in runs.items():
        peer, peer_rate = best_peer(by_contestant)
        ours = {
            name: ratio(found, by_contestant[peer])
            for name, found in by_contestant.items()
            if name.startswith(OURS) and name != "specgov-static-3" and peer
        }
        ours = {name: value for name, value in ours.items() if not math.isnan(value)}
        if not ours:
            continue
        fastest = max(ours, key=lambda who: ours[who])
        greedy = by_contestant.get("specgov-greedy", [])
        rows.append(
            (
                load,
                f"{peer}, TPOT {1e3 / peer_rate:.2f} ms"
                if by_contestant[peer][0]["by_tpot"]
                else f"{peer}, {peer_rate:.0f}",
                _percent(ratio(greedy, by_contestant[peer]) - 1, "+.1%"),
                f"{fastest} {ours[fastest] - 1:+.1%}",
                _percent(ratio(greedy, by_contestant.get(ORACLE, []))),
            )
        )
    return table(head, rows)


def figure(by_contestant: dict[str, list[dict[str, Any]]], load: str, plotted: Sequence[str]) -> Figure:
    """Tier, requests and output rate over the time of a load, of each contestant's first run."""
    lines = {name: by_contestant[name][0]["timeline"] for name in plotted if name in by_contestant}

    def curves(what: str) -> tuple[Series, ...]:
        return tuple(Series(name, line["t_s"], line[what], "step") for name, line in lines.items())

    return Figure(
        f"{load}, a real server",
        "seconds",
        (
            Panel("num_steps, mean", curves("num_steps")),
            Panel("output rate, tokens/s", curves("output_tokens_per_s"), height_px=220),
            Panel("requests in a step", curves("batch_size")[:1]),
        ),
    )


def reality(document: dict[str, Any]) -> str:
    """The simulator beside the real server."""
    head = (
        "load",
        "contestant",
        "real, tokens/s",
        "simulator",
        "difference",
        "real tiers",
        "simulator's tiers",
    )
    rows = []
    for row in document["rows"]:
        real, simulated = row["real_output_tokens_per_s"], row["simulated_output_tokens_per_s"]
        rows.append(
            (
                row["load"],
                row["contestant"],
                f"{real:.0f}",
                f"{simulated:.0f}",
                f"{simulated / real - 1:+.1%}",
                _shares(row["real_tier_time_shares"]),
                _shares(row["simulated_tier_time_shares"]),
            )
        )
    return table(head, rows)


def markdown(documents: Sequence[dict[str, Any]]) -> str:
    """All that stands between the marks."""
    runs = collect(documents)
    first = documents[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    parts = [
        f"GPU: {first['gpu']}; {first['cores']} cores, Python {first['python']}, {versions}. "
        f"Runs of {', '.join(sorted({document['began'] for document in documents}))}.",
        summary(runs),
    ]
    for load, by_contestant in runs.items():
        if load.startswith(SWEEP):
            continue
        repeats = sorted({len(found) for found in by_contestant.values()})
        parts += [
            f"### {load}",
            f"{_tests(documents, load)} Repeats: {' to '.join(map(str, sorted({repeats[0], repeats[-1]})))}; "
            "least and largest in brackets.",
            load_table(by_contestant),
            tier_0_tax(by_contestant),
        ]
    if swept := sweep_table(runs):
        parts += ["### sweep", f"{_tests(documents, SWEEP)} Median of the repeats.", swept]
    pairs = (
        ("specgov-static-3", "static-3"),
        ("static-3", "no-plugin-3"),
        ("specgov-static-3", "no-plugin-3"),
    )
    if costs := [cost for on, off in pairs if (cost := presence(runs, on, off))]:
        parts += ["### Cost of being there", *costs]
    checked = [document["ranks"] for document in documents if document.get("ranks", {}).get("ranks", 1) > 1]
    for ranks in checked:
        parts.append(
            f"{ranks['ranks']} tensor-parallel ranks: {ranks['steps_compared']} steps compared, "
            f"{ranks['steps_that_differ']} differ, {ranks['tier_switches']} switches of tiers."
        )
    for what, title in (("left_out", "Not played"), ("failed", "Failed")):
        if lines := [line for document in documents for line in document.get(what, [])]:
            parts.append(f"{title}: " + "; ".join(lines) + ".")
    if cut := Counter(_load_and_repeat(line) for document in documents for line in document.get("cut", [])):
        parts.append("Cut for time: " + "; ".join(f"{where}: {count}" for where, count in cut.items()) + ".")
    return "\n\n".join(part for part in parts if part)


def _tests(documents: Sequence[dict[str, Any]], load: str) -> str:
    """What a load, or the first whose name begins so, is there for."""
    found = (d["loads"][name]["tests"] for d in documents for name in d["loads"] if name.startswith(load))
    return str(next(found, ""))


def _load_and_repeat(line: str) -> str:
    load, _, repeat = line.split(", ")
    return f"{load}, {repeat}, contestants"


def write_page(page: Path, text: str, mark: str) -> None:
    """Replace what stands between the page's marks of this name.

    Raises:
        SystemExit: it lacks them.

    """
    begin_mark = f"<!-- {mark}: begin, written by benchmarks/gpu/report.py -->"
    end_mark = f"<!-- {mark}: end -->"
    before, begin, rest = page.read_text().partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the tables: it needs {begin_mark!r} and {end_mark!r}")
    page.write_text(f"{before}{begin_mark}\n\n{text}\n\n{end_mark}{after}")


def _percent(share: float, form: str = ".1%") -> str:
    return "" if math.isnan(share) else format(share, form)


def _sort(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _pair(runs: Sequence[dict[str, Any]], what: str, form: str = ".1f") -> str:
    known = [run[what] for run in runs if run[what]]
    medians = [format(statistics.median(k[q] for k in known), form) for q in ("p50", "p99") if known]
    return " / ".join(medians)


def _tiers(runs: Sequence[dict[str, Any]]) -> str:
    totals: dict[str, float] = defaultdict(float)
    for run in runs:
        for tier, share in run["tier_time_shares"].items():
            totals[tier] += share / len(runs)
    return _shares(totals)


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{tier}: {share:.0%}" for tier, share in shares.items() if share >= 0.005)


def _followed(runs: Sequence[dict[str, Any]]) -> str:
    shares = [
        run["decisions"]["followed_share"] for run in runs if run.get("decisions", {}).get("steps_reported")
    ]
    if not shares:
        return ""
    lags = sorted(
        int(lag) for run in runs for lag, count in run["decisions"]["lag_steps"].items() for _ in range(count)
    )
    return f"{statistics.median(shares):.1%}" + (f", lag {statistics.median_low(lags)}" if lags else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contests", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, help="where the tables go; default: standard output")
    parser.add_argument("--mark", default="gpu", help="of the page's places for tables, the one of this name")
    parser.add_argument("--plot", type=Path, help="an SVG of one load over time")
    parser.add_argument("--plot-load", default="ramp")
    parser.add_argument("--plotted", default=",".join(PLOTTED))
    parser.add_argument("--sweep-plot", type=Path, help="an SVG of output rate against concurrency")
    parser.add_argument("--reality", type=Path, help="what reality.py wrote")
    parser.add_argument("--reality-page", type=Path, help="where that goes")
    parser.add_argument("--reality-mark", default="reality", help="as --mark")
    options = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in options.contests]
    text = markdown(documents)
    if options.page:
        write_page(options.page, text, options.mark)
    else:
        print(text)
    if options.reality:
        table = reality(json.loads(options.reality.read_text()))
        if options.reality_page:
            write_page(options.reality_page, table, options.reality_mark)
        else:
            print(table)
    if options.sweep_plot:
        options.sweep_plot.write_text(render(sweep_figure(collect(documents))))
    if options.plot:
        by_contestant = collect(documents)[options.plot_load]
        options.plot.write_text(render(figure(by_contestant, options.plot_load, options.plotted.split(","))))


if __name__ == "__main__":
    main()
