"""What a demo run amounts to: rates, switches, and the picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from specgov.controller.cli import output
from specgov.controller.plot import Figure, Panel, Series, render

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BINS = 64
"""Stretches of time over which the picture averages output rates."""
_POWERS_OF_FOUR = np.array([4.0**power for power in range(8)])
_ONE_TWO_FIVE = np.array([digit * 10.0**power for power in range(7) for digit in (1, 2, 5)])


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The steps of one run, shape (S,); ``end_s`` is the time at a step's end, from the start of the run."""

    name: str
    end_s: Floats
    batch_size: Ints
    num_steps: Ints
    output_tokens: Ints

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole run."""
        return float(self.output_tokens.sum() / self.end_s[-1]) if len(self.end_s) else 0.0

    @property
    def switches(self) -> int:
        """Steps whose tier differs from that of the step before."""
        return int(np.count_nonzero(np.diff(self.num_steps)))

    def binned_rate(self, duration_s: float) -> tuple[Floats, Floats]:
        """Middles of the bins in s and output tokens per second in them, both (BINS,)."""
        edges = np.linspace(0.0, duration_s, BINS + 1)
        tokens, _ = np.histogram(self.end_s, edges, weights=self.output_tokens)
        return (edges[:-1] + edges[1:]) / 2, tokens / np.diff(edges)


def best(traces: Sequence[StepTrace]) -> StepTrace:
    """The one with the largest output rate; the first where several have it."""
    return max(traces, key=lambda trace: trace.output_tokens_per_s)


def summary_table(policy: StepTrace, statics: Sequence[StepTrace], threshold: StepTrace) -> Table:
    """Output rates of the running policy beside what the others made of the same requests."""
    rows = [
        (
            trace.name,
            f"{trace.output_tokens_per_s:.0f}",
            f"{100 * (trace.output_tokens_per_s / policy.output_tokens_per_s - 1):+.1f} %",
            trace.switches,
        )
        for trace in (policy, *statics, threshold)
    ]
    return output.table(("policy", "tokens/s", "difference", "switches"), rows)


def figure(title: str, duration_s: float, policy: StepTrace, others: Sequence[StepTrace]) -> Figure:
    """Tier, batch size and output rate over time."""
    starts_s = np.concatenate([[0.0], policy.end_s[:-1]])
    kept = _changes(policy.num_steps)
    tiers = sorted({int(tier) for tier in policy.num_steps})
    top = 1.1 * max(*tiers, 1)
    sizes = _changes(policy.batch_size)
    rates = [(trace, *trace.binned_rate(duration_s)) for trace in (policy, *others)]
    return Figure(
        title,
        "time (s)",
        [
            Panel(
                "num_steps",
                [Series("", _closed(starts_s[kept], duration_s), _held(policy.num_steps[kept]), "step")],
                y_range=(0.0, top),
                y_ticks=tiers,
                height_px=110,
            ),
            Panel(
                "batch size",
                [Series("", _closed(starts_s[sizes], duration_s), _held(policy.batch_size[sizes]), "step")],
                y_log=True,
                y_ticks=_within(_POWERS_OF_FOUR, policy.batch_size),
                height_px=110,
            ),
            Panel(
                "output rate (tokens/s)",
                [
                    Series(trace.name, middles.tolist(), rate.tolist(), dashed=trace is not policy)
                    for trace, middles, rate in rates
                ],
                y_log=True,
                y_ticks=_within(_ONE_TWO_FIVE, np.concatenate([rate for _, _, rate in rates])),
                height_px=220,
            ),
        ],
    )


def svg(title: str, duration_s: float, policy: StepTrace, others: Sequence[StepTrace]) -> str:
    """The figure as SVG text."""
    return render(figure(title, duration_s, policy, others))


def _within(ticks: Floats, values: Ints | Floats) -> list[float]:
    """The ticks inside the range of the values above 0."""
    shown = values[values > 0]
    return [float(tick) for tick in ticks if len(shown) and shown.min() <= tick <= shown.max()]


def _changes(values: Ints) -> Ints:
    """Indices of the first value and of each that differs from the one before."""
    return np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])


def _closed(starts_s: Floats, end_s: float) -> list[float]:
    return [*starts_s.tolist(), end_s]


def _held(values: Ints) -> list[float]:
    return [*values.tolist(), float(values[-1])]
