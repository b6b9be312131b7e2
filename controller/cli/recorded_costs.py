"""The step costs of one recording, and the batches that it visits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specgov.controller.cli.counterfactual import Visits
from specgov.controller.cli.errors import CliError
from specgov.env.calibration import gather, require_enough
from specgov.env.fitting import Cells, isotonic_plane
from specgov.env.recording import Recording, read_recording
from specgov.policies.step_time import StepGrid, TableStepTime


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """What a recording says: ``tiers`` that it has, what a step costs at each of its batch sizes, its visits.

    ``noise_sigma`` is that of the lognormal scatter of single steps.
    """

    tiers: tuple[int, ...]
    step_time: TableStepTime
    noise_sigma: float
    visits: Visits


def read_costs(file: Path) -> RecordedCosts:
    """Read a recording of steps. The table holds its medians, smoothed where they fall with batch or tier.

    Raises:
        RecordingError: the file cannot be read or is no recording; the message names the line.
        CalibrationError: too few usable steps.
        CliError: a batch size lacks a tier that others have.

    """
    recording = read_recording(file)
    cells, logs, _, _ = gather([recording])
    require_enough(cells)
    grid = _grid(cells, file)
    low, high = np.quantile(logs, [0.1587, 0.8413])  # the middle 68 %: one sigma either side
    tiers = tuple(int(tier) for tier in grid.num_steps)
    return RecordedCosts(tiers, TableStepTime(grid), float(high - low) / 2, _visits(recording))


def _grid(cells: Cells, file: Path) -> StepGrid:
    contexts, batches = np.unique(cells.context_tokens), np.unique(cells.batch_size)
    tiers = np.unique(cells.num_steps)
    at = (
        np.searchsorted(contexts, cells.context_tokens),
        np.searchsorted(batches, cells.batch_size),
        np.searchsorted(tiers, cells.num_steps),
    )

    def on_grid(column: NDArray[np.float64]) -> NDArray[np.float64]:
        values = np.full((len(contexts), len(batches), len(tiers)), np.nan)
        values[at] = column
        return values

    median_ms = on_grid(cells.median_ms)
    missing = np.argwhere(np.isnan(median_ms))
    if len(missing):
        context, batch, tier = missing[0]
        raise CliError(
            f"{file}: too few usable steps at context {contexts[context]:g}, batch size {batches[batch]}, "
            f"num_steps {tiers[tier]}: replay needs every tier at every batch size"
        )
    count = on_grid(cells.count.astype(np.float64))
    planes = [isotonic_plane(*plane) for plane in zip(median_ms, count, strict=True)]
    return StepGrid(
        context_tokens=contexts,
        batch_sizes=batches,
        num_steps=tiers,
        step_ms=np.maximum.accumulate(np.stack(planes), axis=0),
        count=count.astype(np.int64),
        median_ms=median_ms,
        p10_ms=on_grid(cells.p10_ms),
        p90_ms=on_grid(cells.p90_ms),
    )


def _visits(recording: Recording) -> Visits:
    """One visit a usable step; all steps of a context and batch size make a run."""
    pairs = np.stack([recording.context_tokens, recording.batch_size], axis=1)
    _, runs = np.unique(pairs, axis=0, return_inverse=True)
    return Visits(recording.batch_size, recording.sum_seq_len_tokens, runs.reshape(-1))
