"""One rule on one simulated server, and what came of it: figures, picture, trajectory."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.controller.cli.errors import UsageError
from specgov.controller.plot import Figure, Panel, Series, render
from specgov.env.emulated import EngineStep, run_in_process
from specgov.env.scenario import Scenario
from specgov.env.server import Server
from specgov.policies.registry import make_policy
from specgov.policies.types import Policy, PolicyContext, PolicyError

Floats = NDArray[np.float64]

BINS = 240
"""Stretches of time over which the picture averages."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Row:
    """A step of the trajectory; ``end_s`` is simulated time at its end, prefill and idle precede the step."""

    step_id: int
    end_s: float
    num_steps: int
    batch_size: int
    output_tokens: int
    accept_length: float
    step_ms: float
    prefill_ms: float
    idle_ms: float
    waiting_requests: int
    kv_use_ratio: float
    sum_seq_len_tokens: int
    finished_requests: int
    retracted_requests: int


@dataclass(frozen=True)
class SimulatedRun:
    """The steps of a run and the latencies of the requests that finished in it, in ms.

    ``end_s`` is the simulated time that the run stands for, of which ``idle_end_s`` are idle after the last
    step.
    """

    scenario: str
    policy: str
    seed: int
    end_s: float
    idle_end_s: float
    rows: list[Row]
    ttft_ms: Floats
    tpot_ms: Floats

    def column(self, name: str) -> Floats:
        """One field of all rows."""
        return np.array([getattr(row, name) for row in self.rows], dtype=np.float64)

    def summary(self) -> dict[str, Any]:
        """The run's figures, by name."""
        tokens = sum(row.output_tokens for row in self.rows)
        tiers = self.column("num_steps")
        return {
            "scenario": self.scenario,
            "policy": self.policy,
            "seed": self.seed,
            "steps": len(self.rows),
            "simulated_s": self.end_s,
            "time_shares": self._time_shares(),
            "output_tokens": tokens,
            "output_tokens_per_s": tokens / self.end_s if self.end_s else 0.0,
            "requests_finished": len(self.ttft_ms),
            "requests_retracted": sum(row.retracted_requests for row in self.rows),
            "requests_waiting_at_end": self.rows[-1].waiting_requests if self.rows else 0,
            "ttft_ms": _quantiles(self.ttft_ms),
            "tpot_ms": _quantiles(self.tpot_ms),
            "tier_switches": int(np.count_nonzero(np.diff(tiers))),
            "tiers": self._tier_shares(tiers),
        }

    def svg(self) -> str:
        """Tier, batch, output rate and step time over simulated time, averaged over stretches of it."""
        end_s = self.column("end_s")
        edges = np.linspace(0.0, self.end_s or 1.0, BINS + 1)
        at = np.clip(np.searchsorted(edges, end_s) - 1, 0, BINS - 1)
        steps = np.bincount(at, minlength=BINS)

        def curve(label: str, values: Floats) -> Series:
            totals = np.bincount(at, values, minlength=BINS)
            means = [float(t / n) if n else None for t, n in zip(totals, steps, strict=True)]
            return Series(label, edges[:-1].tolist(), means, "step")

        tokens = np.bincount(at, self.column("output_tokens"), minlength=BINS) / np.diff(edges)
        return render(
            Figure(
                f"{self.scenario}, {self.policy}, seed {self.seed}",
                "simulated time (s)",
                (
                    Panel("num_steps, mean", (curve("", self.column("num_steps")),)),
                    Panel(
                        "requests",
                        (
                            curve("running", self.column("batch_size")),
                            curve("waiting", self.column("waiting_requests")),
                        ),
                    ),
                    Panel(
                        "output rate, tokens/s", (Series("", edges[:-1].tolist(), tokens.tolist(), "step"),)
                    ),
                    Panel("step time, ms", (curve("", self.column("step_ms")),)),
                ),
            )
        )

    def write_csv(self, path: Path) -> None:
        """The steps, one a line, with a header."""
        names = [field.name for field in fields(Row)]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(names)
            writer.writerows([_plain(getattr(row, name)) for name in names] for row in self.rows)

    def _time_shares(self) -> dict[str, float]:
        """What the simulated time went into; a last step that the end cut off is in none of it."""
        spent_s = {
            "decode": 1e-3 * float(self.column("step_ms").sum()),
            "prefill": 1e-3 * float(self.column("prefill_ms").sum()),
            "idle": 1e-3 * float(self.column("idle_ms").sum()) + self.idle_end_s,
        }
        return {name: seconds / self.end_s if self.end_s else 0.0 for name, seconds in spent_s.items()}

    def _tier_shares(self, tiers: Floats) -> dict[str, dict[str, float]]:
        step_ms = self.column("step_ms")
        return {
            str(int(tier)): {
                "time": float(step_ms[tiers == tier].sum() / step_ms.sum()),
                "steps": float((tiers == tier).mean()),
            }
            for tier in np.unique(tiers)
        }


def simulate_policy(
    scenario: Scenario,
    policy: str,
    seed: int,
    duration_s: float,
    progress: Callable[[float], None] = lambda _: None,
) -> SimulatedRun:
    """Play ``policy`` on the scenario's server until ``duration_s`` of simulated time or the end of the load.

    ``progress`` is told the simulated time, not more often than every tenth of a simulated second.

    Raises:
        UsageError: the policy cannot be made.

    """
    server = scenario.build(1, seed)
    rule = _make(policy, scenario, server, seed)
    rows: list[Row] = []
    ttft_ns, tpot_ns = [], []
    shown_s = end_s = idle_end_s = 0.0
    for step in run_in_process(rule, server):
        row = _row(step)
        if row.end_s > duration_s:
            idle_end_s = min(1e-3 * row.idle_ms, duration_s - end_s)
            end_s = duration_s
            break
        rows.append(row)
        end_s = row.end_s
        ended = step.result.finished
        ttft_ns.append(ended.first_token_ns - ended.arrival_ns)
        tpot_ns.append((ended.finish_ns - ended.first_token_ns) / ended.output_tokens)
        if row.end_s >= shown_s + 0.1:
            shown_s = row.end_s
            progress(shown_s)
    ttft_ms, tpot_ms = (np.concatenate(values or [np.zeros(0)]) * 1e-6 for values in (ttft_ns, tpot_ns))
    return SimulatedRun(scenario.name, policy, seed, end_s, idle_end_s, rows, ttft_ms, tpot_ms)


def _make(policy: str, scenario: Scenario, server: Server, seed: int) -> Policy:
    context = PolicyContext(
        engine=server.config.engine,
        rng=np.random.default_rng(seed),
        clock=lambda: float(server.time_ns[0]) * 1e-9,
        step_time=scenario.profile.step_time,
    )
    try:
        return make_policy(policy, context)
    except PolicyError as error:
        raise UsageError(f"simulate: {error}") from error


def _row(step: EngineStep) -> Row:
    result, seen = step.result, step.observation
    return Row(
        step_id=seen.step_id,
        end_s=float(result.time_ns[0]) * 1e-9,
        num_steps=seen.num_steps,
        batch_size=seen.batch_size,
        output_tokens=int(result.output_tokens[0]),
        accept_length=1.0 + float(seen.accepted.mean()),
        step_ms=float(result.step_ms[0]),
        prefill_ms=float(result.prefill_ms[0]),
        idle_ms=float(result.idle_ms[0]),
        waiting_requests=seen.waiting_requests,
        kv_use_ratio=float(result.kv_use_ratio[0]),
        sum_seq_len_tokens=seen.sum_seq_len_tokens,
        finished_requests=int(result.finished_requests[0]),
        retracted_requests=int(result.retracted_requests[0]),
    )


def _quantiles(values: Floats) -> dict[str, float | None]:
    if len(values) == 0:
        return dict.fromkeys(QUANTILES)
    return {name: float(np.quantile(values, share)) for name, share in QUANTILES.items()}


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}" if value < 1e5 else f"{value:.3f}"
