"""The step costs of one recording, and the batches that it visits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
    axes = tuple(np.unique(axis) for axis in (cells.context_tokens, cells.batch_size, cells.num_steps))
    at = tuple(
        np.searchsorted(axis, column)
        for axis, column in zip(axes, (cells.context_tokens, cells.batch_size, cells.num_steps), strict=True)
    )
    shape = tuple(len(axis) for axis in axes)
    columns = {name: np.full(shape, np.nan) for name in ("median_ms", "p10_ms", "p90_ms")}
    for name, values in columns.items():
        values[at] = getattr(cells, name)
    count = np.zeros(shape, dtype=np.int64)
    count[at] = cells.count
    if not count.all():
        context, batch, tier = (axis[i] for axis, i in zip(axes, np.argwhere(count == 0)[0], strict=True))
        raise CliError(
            f"{file}: too few usable steps at context {context:g}, batch size {batch}, num_steps {tier}: "
            "replay needs every tier at every batch size"
        )
    planes = [isotonic_plane(*plane) for plane in zip(columns["median_ms"], count.astype(float), strict=True)]
    return StepGrid(*axes, np.maximum.accumulate(np.stack(planes), axis=0), count, **columns)


def _visits(recording: Recording) -> Visits:
    """One visit a usable step; a run is a stretch of the same batch size and context."""
    changed = (np.diff(recording.batch_size) != 0) | (np.diff(recording.context_tokens) != 0)
    runs = np.concatenate([[0], np.cumsum(changed)])
    return Visits(recording.batch_size, recording.sum_seq_len_tokens, runs)
