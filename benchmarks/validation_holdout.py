"""Step times that the models were not fitted to, against the recordings.

Fits on about half of the batch sizes at context 512, of both kinds of server, and predicts the other batch
sizes and context 4096. Beside each error stands half the width of the 95 % bootstrap interval of the measured
median: no model can be shown to be better than that. Writes JSON, and a table to stdout.

    python benchmarks/validation_holdout.py ../shared/data/h200 -o out/validation_holdout.json
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.calibration import complete, gather
from specgov.env.fitting import Cells, fit_parametric, predict
from specgov.env.recording import read_recording
from specgov.policies.step_time import (
    DRAFTS,
    HARDWARE,
    MODELS,
    ParametricStepTime,
    ResidualStepTime,
    TableStepTime,
    roofline_prior,
)
from specgov.policies.types import StepTime

RECORDINGS = {
    "llama-3.1-8b": ("llama8b_spec_ctx512", "llama8b_spec_ctx4096", "llama8b_nospec_ctx512"),
    "qwen3-30b-a3b": ("qwen3moe_spec_ctx512", "qwen3moe_nospec_ctx512"),
}
SPLITS = {"a": (1, 4, 16, 64, 128, 256), "b": (1, 2, 8, 32, 96, 192, 256)}
FIT_CONTEXT_TOKENS = 512
BOOTSTRAPS = 2000
AIM = {"median": 0.03, "p95": 0.10}

Array = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="recordings steps_*.csv")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "aim": AIM,
        "bootstraps": BOOTSTRAPS,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "results": [],
    }
    for model, parts in RECORDINGS.items():
        paths = [arguments.folder / f"steps_{part}.csv" for part in parts]
        for split, sizes in SPLITS.items():
            report["results"] += validate(model, paths, split, sizes)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report["results"])


def print_table(results: list[dict[str, Any]]) -> None:
    print("| model | split | held out | step time | n | median | 95 % | largest | in spread | spread |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        what = " | ".join(str(result[name]) for name in ("model", "split", "held_out", "source", "n"))
        shown = " | ".join(f"{result[name]:.1%}" for name in ("median", "p95", "max"))
        print(f"| {what} | {shown} | {result['within_spread']} | {result['spread_median']:.1%} |")


def validate(model: str, paths: list[Path], split: str, fit_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    cells, logs, _, _ = gather([read_recording(path) for path in paths])
    spread = median_spread(cells, logs)
    at_fit_context = cells.context_tokens == FIT_CONTEXT_TOKENS
    fitted_on = np.isin(cells.batch_size, fit_sizes) & at_fit_context
    start = roofline_prior(MODELS[model], DRAFTS[model], HARDWARE["H200"])
    parametric = fit_parametric(start, cells.where(fitted_on))
    # A server without speculation needs no model of its own here: its cells test the parametric one only.
    spec = cells.can_speculate
    grid, _ = complete(cells.where(fitted_on & spec), parametric)
    sources: dict[str, StepTime] = {
        "roofline prior": start,
        "parametric": parametric,
        "table": TableStepTime(grid),
        "residual": ResidualStepTime(parametric, grid),
    }
    groups = {"batch sizes": ~fitted_on & at_fit_context, "context 4096": ~at_fit_context}
    results = []
    for held_out, mask in groups.items():
        for source, step_time in sources.items():
            wanted = mask & (spec | isinstance(step_time, ParametricStepTime))
            if wanted.any():
                error = errors(step_time, cells.where(wanted))
                results.append(
                    {"model": model, "split": split, "fit_batch_sizes": list(fit_sizes), "held_out": held_out}
                    | {"source": source}
                    | summary(error, spread[wanted])
                    | {"cells": by_cell(cells.where(wanted), error, spread[wanted])}
                )
    return results


def errors(step_time: StepTime, cells: Cells) -> Array:
    """Relative error of the prediction for each cell."""
    if isinstance(step_time, ParametricStepTime):
        predicted = predict(step_time, cells)
    else:
        total = cells.batch_size * cells.context_tokens
        predicted = step_time.step_ms(cells.batch_size, cells.num_steps, total)
    return predicted / cells.median_ms - 1


def median_spread(cells: Cells, logs: Array) -> Array:
    """Half the width of each median's 95 % bootstrap interval, relative to the median."""
    rng = np.random.default_rng(0)
    spread = []
    for steps in np.split(logs, np.cumsum(cells.count)[:-1]):
        drawn = rng.choice(steps, (BOOTSTRAPS, len(steps)))
        low, high = np.exp(np.quantile(np.median(drawn, axis=1), [0.025, 0.975]))
        spread.append((high - low) / 2)
    return np.array(spread)


def summary(error: Array, spread: Array) -> dict[str, Any]:
    size = np.abs(error)
    return {
        "n": len(error),
        "median": round(float(np.median(size)), 4),
        "p95": round(float(np.quantile(size, 0.95)), 4),
        "max": round(float(size.max()), 4),
        "within_spread": int((size <= spread).sum()),
        "spread_median": round(float(np.median(spread)), 4),
        "aim_met": bool(np.median(size) <= AIM["median"] and np.quantile(size, 0.95) <= AIM["p95"]),
    }


def by_cell(cells: Cells, error: Array, spread: Array) -> list[dict[str, Any]]:
    return [
        {
            "server": "can speculate" if cells.can_speculate[i] else "without speculation",
            "context_tokens": float(cells.context_tokens[i]),
            "batch_size": int(cells.batch_size[i]),
            "num_steps": int(cells.num_steps[i]),
            "median_ms": round(float(cells.median_ms[i]), 3),
            "error": round(float(error[i]), 4),
            "spread": round(float(spread[i]), 4),
        }
        for i in range(len(cells))
    ]


if __name__ == "__main__":
    main()
