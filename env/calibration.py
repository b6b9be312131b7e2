"""From recorded steps to a profile.

1. Steps are filtered (``specgov.env.recording``) and sorted into cells of padded batch size, num_steps and
   context. The context is the run's, or the power of two nearest to the mean sequence length where the
   recording has no runs.
2. In a cell, a step of more than twice or less than half the median is an outlier. A cell of fewer than
   ``MIN_STEPS`` steps is dropped.
3. The parametric model is fitted to the medians of all cells, of both kinds of server.
4. The table is completed: in the plane (context) with most cells a missing one takes the model's value times
   the neighbours' ratio of table to model; in the other planes, and in two more at context 0 and far beyond
   the largest, it is the first plane's value plus the model's cost of the longer context, scaled as the
   measured planes say. Batch sizes and num_steps beyond the measured ones are added in the same way. All
   these cells have count 0.
5. Medians that fall with batch size, num_steps or context are smoothed isotonically, weighted by count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.fitting import Array, Cells, fit_parametric, isotonic_grid, predict
from specgov.env.logged_steps import logged, logged_engine, require_one_kind
from specgov.env.prefill_cost import prefill_cost
from specgov.env.recording import Recording
from specgov.policies.profile import Profile
from specgov.policies.step_time import (
    DRAFTS,
    HARDWARE,
    MODELS,
    HardwareSpec,
    ModelSpec,
    ParametricStepTime,
    PrefillCost,
    StepGrid,
    StepNoise,
    roofline_prior,
)
from specgov.policies.step_time.lookup import Padding

MIN_STEPS = 5
OUTLIER_RATIO = 2.0
FAR_CONTEXT_TOKENS = 131_072.0
FAR_NUM_STEPS = (16, 32)
FAR_BATCH_RATIOS = (2, 4)
# Kernels a layer and time to launch one: assumed, for the least time of a step without a CUDA graph.
LAUNCH_MS_PER_LAYER = 12 * 0.004
# Weight of a cell that was not measured, in steps.
EXTRAPOLATED_WEIGHT = 1e-3


class CalibrationError(ValueError):
    """The recordings are not enough for a profile; the message says what is missing."""


@dataclass(frozen=True)
class Setup:
    """What the recordings do not say of themselves.

    ``draft_name`` is for people, ``draft`` for the parametric model. Without ``engine``, ``draft_name`` or
    ``graph_batch_sizes`` those that a decision log names hold. The defaults are for a recording of which
    nothing is known: they shape only what lies beyond the measured cells, and are marked as assumed.
    """

    name: str = "recording"
    hardware: HardwareSpec = HARDWARE["H200"]
    engine: str = ""
    model: ModelSpec = MODELS["llama-3.1-8b"]
    draft: ModelSpec = DRAFTS["llama-3.1-8b"]
    draft_name: str = ""
    tensor_parallel_size: int = 1
    graph_batch_sizes: tuple[int, ...] = ()


UNKNOWN_SETUP = Setup()


def calibrate(recordings: Sequence[Recording], setup: Setup = UNKNOWN_SETUP) -> Profile:
    """Make a profile. The same recordings and setup give the same profile.

    Raises:
        CalibrationError: too little data, with what is missing.
        RecordingError: logs of engines that differ in kind.

    """
    require_one_kind(recordings)
    logged_sizes = logged(recordings, "graph_batch_sizes") or ()
    graph_batch_sizes = setup.graph_batch_sizes or tuple(int(size) for size in logged_sizes)
    cells, logs, outliers, dropped = gather(recordings, graph_batch_sizes)
    require_enough(cells)
    start = roofline_prior(setup.model, setup.draft, setup.hardware, setup.tensor_parallel_size)
    parametric = fit_parametric(start, cells)
    grid, slope_ratio = complete(cells.where(cells.can_speculate), parametric)
    no_spec = cells.where(~cells.can_speculate)
    no_spec_grid = (
        complete(no_spec, parametric.without_speculation(), slope_ratio)[0] if len(no_spec) else None
    )
    errors = np.abs(predict(parametric, cells) / cells.median_ms - 1)
    assumed = ["noise.stall_probability", "noise.stall_ms", "eager_floor_ms", "every cell with count 0"]
    if setup == UNKNOWN_SETUP:
        assumed.append("model, draft and hardware")
    facts: dict[str, Any] = {
        "recordings": [_source(recording) for recording in recordings],
        "outliers": outliers,
        "dropped_cells": dropped,
        "measured_cells": len(cells),
        "extrapolated_cells": int((~grid.measured).sum())
        + (0 if no_spec_grid is None else int((~no_spec_grid.measured).sum())),
        "smoothed_cells": _smoothed(grid) + ([] if no_spec_grid is None else _smoothed(no_spec_grid)),
        "context_slope_of_model": slope_ratio,
        "mean_context_excess_tokens": _context_excess(recordings),
        "parametric_error": {
            "median": round(float(np.median(errors)), 4),
            "p95": round(float(np.quantile(errors, 0.95)), 4),
        },
        "sigma_by_batch_size": _sigma_by_batch_size(cells, logs),
        "prefill": {},  # below, since it rests on the step times
        "assumed": assumed,
    }
    profile = Profile(
        name=setup.name,
        hardware=setup.hardware.name,
        engine=setup.engine or logged_engine(recordings),
        model=setup.model.name,
        draft=setup.draft_name or logged(recordings, "draft") or "",
        tensor_parallel_size=setup.tensor_parallel_size,
        tiers=tuple(int(tier) for tier in np.unique(cells.num_steps[cells.can_speculate])),
        graph_batch_sizes=graph_batch_sizes,
        grid=grid,
        no_spec_grid=no_spec_grid,
        noise=StepNoise(sigma=_sigma(logs)),
        prefill=PrefillCost(0.0, 0.0),
        parametric=parametric,
        eager_floor_ms=round(LAUNCH_MS_PER_LAYER * setup.model.layers, 4),
        facts=facts,
    )
    prefill, facts["prefill"] = prefill_cost(recordings, profile)
    return replace(profile, prefill=prefill)


def write_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path``, in one piece: a reader sees the old file or the new one."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(profile.to_json(), encoding="utf-8")
    partial.replace(path)


def gather(
    recordings: Sequence[Recording], graph_batch_sizes: tuple[int, ...] = ()
) -> tuple[Cells, Array, int, list[str]]:
    """Sort steps into cells.

    Returns:
        the cells; the logarithm of each step over its cell's median; how many steps were outliers; the cells
        that were dropped for having too few steps, in words.

    """
    steps: dict[tuple[bool, float, int, int], list[float]] = {}
    for recording in recordings:
        batch = running_sizes(recording, graph_batch_sizes)
        for key in zip(
            cell_contexts(recording, batch), batch, recording.num_steps, recording.step_ms, strict=True
        ):
            cell = (recording.can_speculate, float(key[0]), int(key[1]), int(key[2]))
            steps.setdefault(cell, []).append(float(key[3]))
    kept: list[tuple[bool, float, int, int, float, float, float, int]] = []
    logs: list[Array] = []
    outliers, dropped = 0, []
    for cell, values in sorted(steps.items()):
        step_ms = np.array(values)
        inlier = np.abs(np.log(step_ms / np.median(step_ms))) <= np.log(OUTLIER_RATIO)
        outliers += int((~inlier).sum())
        step_ms = step_ms[inlier]
        if len(step_ms) < MIN_STEPS:
            where = f"context {cell[1]:g}, batch size {cell[2]}, num_steps {cell[3]}"
            dropped.append(f"{where}: {len(step_ms)} steps")
            continue
        median = float(np.median(step_ms))
        spread = (float(np.quantile(step_ms, 0.1)), float(np.quantile(step_ms, 0.9)))
        kept.append((*cell, median, *spread, len(step_ms)))
        logs.append(np.log(step_ms / median))
    columns: list[tuple[Any, ...]] = list(zip(*kept, strict=True)) or [()] * 8
    cells = Cells(
        context_tokens=np.array(columns[1], dtype=np.float64),
        batch_size=np.array(columns[2], dtype=np.int64),
        num_steps=np.array(columns[3], dtype=np.int64),
        can_speculate=np.array(columns[0], dtype=np.bool_),
        median_ms=np.array(columns[4], dtype=np.float64),
        p10_ms=np.array(columns[5], dtype=np.float64),
        p90_ms=np.array(columns[6], dtype=np.float64),
        count=np.array(columns[7], dtype=np.int64),
    )
    return cells, np.concatenate(logs) if logs else np.zeros(0), outliers, dropped


def require_enough(cells: Cells) -> None:
    """Refuse cells from which no profile can be made.

    Raises:
        CalibrationError: with what is missing.

    """
    spec = cells.where(cells.can_speculate)
    if not len(spec):
        raise CalibrationError(
            f"no cell with at least {MIN_STEPS} usable steps of a server that can speculate: record "
            "consecutive decode steps at fixed batch sizes and tiers"
        )
    tiers = sorted({int(tier) for tier in spec.num_steps})
    missing = []
    if 0 not in tiers:
        missing.append("num_steps 0, without which no break-even is known")
    if len(tiers) < 2:
        missing.append(f"a second tier beside num_steps {tiers[0]}")
    base = spec.where(spec.context_tokens == _base_context(spec))
    for tier in tiers:
        sizes = sorted({int(size) for size in base.batch_size[base.num_steps == tier]})
        if len(sizes) < 2:
            missing.append(
                f"num_steps {tier} at two or more batch sizes "
                f"(at context {_base_context(spec):g} there are {sizes})"
            )
    if missing:
        raise CalibrationError("too little data for a profile; missing: " + "; ".join(missing))


def complete(
    cells: Cells, model: ParametricStepTime, slope_ratio: float | None = None
) -> tuple[StepGrid, float]:
    """A full, monotone grid from ``cells`` of one kind of server.

    Returns:
        the grid; the measured cost of context over the model's (where only one context was measured,
        ``slope_ratio``, else 1).

    """
    measured_contexts = sorted({float(value) for value in cells.context_tokens})
    far = max(FAR_CONTEXT_TOKENS, 2 * measured_contexts[-1])
    contexts = np.array(sorted({0.0, *measured_contexts, far}))
    batches, tiers = _axis(cells.batch_size), np.unique(cells.num_steps)
    if tiers[-1] > 0:
        beyond = np.array(FAR_NUM_STEPS, dtype=np.int64)
        tiers = np.concatenate([tiers, beyond[beyond > tiers[-1]]])
    at = (
        np.searchsorted(contexts, cells.context_tokens),
        np.searchsorted(batches, cells.batch_size),
        np.searchsorted(tiers, cells.num_steps),
    )
    shape = (len(contexts), len(batches), len(tiers))
    recorded = {name: np.full(shape, np.nan) for name in ("median_ms", "p10_ms", "p90_ms")}
    for name, values in recorded.items():
        values[at] = getattr(cells, name)
    count = np.zeros(shape, dtype=np.int64)
    count[at] = cells.count
    context, batch, tier = np.meshgrid(contexts, batches, tiers, indexing="ij")
    modelled = model.step_ms(batch, tier, batch * context)
    base = int(np.searchsorted(contexts, _base_context(cells)))
    step_ms, ratio = _filled(recorded["median_ms"], modelled, batches, base, slope_ratio)
    weights = np.maximum(count.astype(np.float64), EXTRAPOLATED_WEIGHT)
    step_ms = isotonic_grid(step_ms, weights).round(4)
    rounded = {name: np.round(values, 4) for name, values in recorded.items()}
    return StepGrid(contexts, batches, tiers, step_ms, count, **rounded), ratio


def _axis(batch_size: NDArray[np.int64]) -> NDArray[np.int64]:
    """The measured batch sizes and some beyond."""
    measured = np.unique(batch_size)
    return np.append(measured, [ratio * measured[-1] for ratio in FAR_BATCH_RATIOS])


def _filled(
    median_ms: Array, modelled: Array, batches: NDArray[np.int64], base: int, slope_ratio: float | None
) -> tuple[Array, float]:
    """Values for the cells that have none, from the model and the cells that have one."""
    known = ~np.isnan(median_ms[base])
    first = median_ms[base].copy()
    places: Array = np.log(batches.astype(np.float64))
    ratios: Array = np.ones(len(batches))
    for column in range(first.shape[1]):
        have = known[:, column]
        # A column with no cell at all keeps the ratios of the column before it.
        if have.any():
            log_ratio = np.log(first[have, column] / modelled[base, have, column])
            ratios = np.exp(np.interp(places, places[have], log_ratio))
        first[:, column] = np.where(have, first[:, column], modelled[base, :, column] * ratios)
    longer = modelled - modelled[base]
    both = ~np.isnan(median_ms) & known
    both[base] = False
    if both.any():
        slope_ratio = round(float(np.sum((median_ms - first)[both]) / np.sum(longer[both])), 4)
    ratio = 1.0 if slope_ratio is None else slope_ratio
    # Attention is a part of a step only, so some of the step is left at context 0.
    derived = np.maximum(first + ratio * longer, 0.1 * first)
    return np.where(np.isnan(median_ms), derived, median_ms), float(ratio)


def running_sizes(recording: Recording, graph_batch_sizes: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """The padded batch size of each step: the recording's, or by the graphs' sizes, or as it is."""
    if not graph_batch_sizes or not len(recording.batch_size):
        by_rule = recording.batch_size
    else:
        by_rule = Padding(graph_batch_sizes, 1).running_size(recording.batch_size)
    return np.where(recording.padded_batch_size > 0, recording.padded_batch_size, by_rule)


def cell_contexts(recording: Recording, running_sizes: NDArray[np.int64]) -> Array:
    """The context (tokens a request) by which each step is sorted: see the rules above, 1."""
    stated = recording.context_tokens.astype(np.float64)
    mean = recording.sum_seq_len_tokens / np.maximum(running_sizes, 1)
    nearest = np.exp2(np.round(np.log2(np.maximum(mean, 1.0))))
    return np.asarray(np.where(stated > 0, stated, nearest), dtype=np.float64)


def _base_context(cells: Cells) -> float:
    values, counts = np.unique(cells.context_tokens, return_counts=True)
    return float(values[np.argmax(counts)])


def _context_excess(recordings: Sequence[Recording]) -> float:
    """By how much the batches' mean sequence length exceeded the run's nominal context, on average."""
    excess = [
        recording.sum_seq_len_tokens / recording.batch_size - recording.context_tokens
        for recording in recordings
        if (recording.context_tokens > 0).all()
    ]
    return round(float(np.mean(np.concatenate(excess))), 1) if excess else 0.0


def _sigma(logs: Array) -> float:
    """Half the width of the middle 68 % of the logarithms: a lognormal's sigma, blind to the tails."""
    low, high = np.quantile(logs, [0.1587, 0.8413])
    return round(float(high - low) / 2, 4)


def _sigma_by_batch_size(cells: Cells, logs: Array) -> dict[str, float]:
    """Of the server that can speculate, all tiers and contexts together."""
    batch = np.repeat(cells.batch_size, cells.count)
    speculating = np.repeat(cells.can_speculate, cells.count)
    sizes = np.unique(cells.batch_size[cells.can_speculate])
    return {str(size): _sigma(logs[speculating & (batch == size)]) for size in sizes}


def _source(recording: Recording) -> dict[str, Any]:
    return {
        "file": recording.name,
        "sha256": recording.sha256,
        "rows": recording.rows,
        "used": len(recording.step_ms),
        "rejected": dict(recording.rejected),
    }


def _smoothed(grid: StepGrid) -> list[dict[str, Any]]:
    """The measured cells whose value is not their median."""
    with np.errstate(invalid="ignore"):
        moved = np.argwhere(grid.measured & (np.abs(grid.step_ms - grid.median_ms) > 5e-5))
    return [
        {
            "server": "can speculate" if len(grid.num_steps) > 1 else "without speculation",
            "context_tokens": float(grid.context_tokens[c]),
            "batch_size": int(grid.batch_sizes[b]),
            "num_steps": int(grid.num_steps[k]),
            "median_ms": float(grid.median_ms[c, b, k]),
            "step_ms": float(grid.step_ms[c, b, k]),
        }
        for c, b, k in moved
    ]
