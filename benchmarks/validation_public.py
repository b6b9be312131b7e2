"""The roofline prior against figures that other people published.

1. Every pair of speculation and none on one machine: the ratio of their speeds, predicted as
   ``accept length * T(no speculation) / T(speculation)`` from data-sheet figures. Nothing is fitted but,
   where a source leaves the accept length out, that one number from the first row of a series, which is then
   not counted.
2. Public cases with the decision that they call for, against the oracle's on the same model.

    python benchmarks/validation_public.py ../shared/data/public -o out/validation_public.json
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from public_cases import judge_cases
from public_sources import NO_DRAFT, NOT_PREDICTED, SOURCES, Source

from specgov.policies.step_time import HARDWARE, Coefficients, ParametricStepTime

# Metrics where less is better.
TIMES = ("tpot", "latency", "itl", "step")
SAME_ROW = ("source_id", "hardware", "model", "workload", "metric", "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="specdec_perf.csv and cases.csv")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    pairs = list(find_pairs(read(arguments.folder / "specdec_perf.csv")))
    sources = [judge_source(name, pairs) for name in SOURCES]
    cases = judge_cases(read(arguments.folder / "cases.csv"))
    left_out = defaultdict(int)
    for pair in pairs:
        if pair["source_id"] not in SOURCES:
            left_out[pair["source_id"]] += 1
    report = {
        "pairs": len(pairs),
        "sources": sources,
        "not_predicted": {
            name: {"pairs": count, "reason": NOT_PREDICTED.get(name, "not looked into")}
            for name, count in sorted(left_out.items())
        },
        "cases": cases,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def find_pairs(rows: list[dict[str, str]]) -> Iterable[dict[str, Any]]:
    """Rows with speculation beside the row without it; rows that state the ratio stand for a pair."""
    base = {tuple(row[key] for key in SAME_ROW): float(row["value"]) for row in rows if is_baseline(row)}
    # A source may name its quantised target otherwise: the same figures without the model's name.
    loose = {(key[0], *key[3:]): value for key, value in base.items()}
    for row in rows:
        if is_baseline(row) or row["mode"].startswith(("no_spec", "SD loaded", "same after")):
            continue
        key = tuple(row[name] for name in SAME_ROW)
        if row["metric"] == "speedup_vs_no_spec":
            ratio = float(row["value"])
        elif (value := base.get(key, loose.get((key[0], *key[3:])))) is not None:
            ratio = float(row["value"]) / value
            ratio = 1 / ratio if any(word in row["metric"] for word in TIMES) else ratio
        else:
            continue
        yield row | {"ratio": ratio}


def is_baseline(row: dict[str, str]) -> bool:
    return row["mode"].startswith("no_spec")


def judge_source(name: str, pairs: list[dict[str, Any]]) -> dict[str, Any]:
    source = SOURCES[name]
    series: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for pair in pairs:
        if pair["source_id"] == name and int(pair["x"] or 1) not in source.skip_batch_sizes:
            series[pair["draft"]].append(pair)
    judged = [row for draft, rows in series.items() for row in judge_series(source, draft, rows)]
    counted = [row for row in judged if not row["fixes_accept_length"]]
    errors = [math.log(row["predicted"] / row["observed"]) for row in counted]
    return {
        "source": name,
        "url": next(pair["source_url"] for pair in pairs if pair["source_id"] == name),
        "n": len(counted),
        "sign_agrees": sum((row["predicted"] > 1) == (row["observed"] > 1) for row in counted),
        "median_error": round(float(np.median(np.abs(np.expm1(errors)))), 3) if counted else None,
        "bias": round(math.exp(float(np.mean(errors))) - 1, 3) if counted else None,
        "confounds": source.confounds,
        "rows": judged,
    }


def judge_series(source: Source, draft: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    fixed = None
    judged = []
    for row in rows:
        batch, passes = int(row["x"] or 1), int(row["num_steps"] or source.num_steps)
        stated = float(row["accept_len"]) if row["accept_len"] else source.accept_length.get((draft, passes))
        cost = cost_ratio(source, row["hardware"], draft, batch, passes, int(row["num_draft_tokens"] or 0))
        fixes = stated is None and fixed is None
        if fixes:
            fixed = row["ratio"] * cost
        accept_length = fixed if stated is None else stated
        judged.append(
            {
                "draft": draft,
                "batch_size": batch,
                "num_steps": passes,
                "topk": int(row["topk"] or 1),
                "accept_length": round(accept_length or 0.0, 3),
                "observed": round(row["ratio"], 3),
                "predicted": round((accept_length or 0.0) / cost, 3),
                "fixes_accept_length": fixes,
            }
        )
    return judged


def cost_ratio(source: Source, machine: str, draft: str, batch: int, passes: int, verified: int) -> float:
    """T with speculation over T without. ``verified`` is the tokens of a tree (0: a chain of ``passes``)."""
    hardware = HARDWARE["RTX-5090"] if "5090" in machine else source.hardware
    drafter = source.drafts[draft]
    coefficients = Coefficients()
    if drafter is NO_DRAFT:
        coefficients = Coefficients(draft_pass_ms=0.0, draft_extend_ms=0.0)
    tp = source.tensor_parallel_size
    without = ParametricStepTime(source.model, drafter, hardware, tp, coefficients).without_speculation()
    speculating = ParametricStepTime(source.spec_model or source.model, drafter, hardware, tp, coefficients)
    size, context = np.float64(batch), np.float64(batch * source.context_tokens)
    width = np.float64(max(verified - 1, passes))
    step_ms = (
        coefficients.fixed_ms
        + coefficients.request_us * batch / 1e3
        + speculating.verify_ms(size, width, context)
        + speculating.draft_ms(size, np.float64(passes), context)
        + speculating.draft_extend_ms(size, width, context)
    )
    return float(step_ms / without.step_ms(batch, 0, batch * source.context_tokens))


def print_report(report: dict[str, Any]) -> None:
    predicted = sum(source["n"] for source in report["sources"])
    print(f"{report['pairs']} pairs in all, {predicted} predicted\n")
    print("| source | n | sign agrees | median error of the ratio | bias | confounds |")
    print("|---|---|---|---|---|---|")
    for source in report["sources"]:
        shown = (
            f"{source['n']} | {source['sign_agrees']} | {source['median_error']:.0%} | {source['bias']:+.0%}"
        )
        print(f"| {source['source']} | {shown} | {source['confounds']} |")
    print("\n| not predicted | pairs | reason |\n|---|---|---|")
    for name, entry in report["not_predicted"].items():
        print(f"| {name} | {entry['pairs']} | {entry['reason']} |")
    cases = report["cases"]
    print(f"\n{cases['rows']} cases: {cases['predicted']} predicted, {cases['agree']} agree; ", end="")
    print(f"{len(cases['guard_inputs'])} alarm and hold rows kept for the guard\n")
    columns = ("source", "expected", "oracle", "speed", "note", "miss")
    print(
        "| case | expected | oracle | speed against none | note | why it misses |\n|---|---|---|---|---|---|"
    )
    for case in cases["judged"]:
        print("| " + " | ".join(case[name] for name in columns) + " |")


if __name__ == "__main__":
    main()
