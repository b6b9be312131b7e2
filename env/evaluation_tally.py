"""What is counted while a condition is played, and the figures that come of it.

Figures of a row (times in ms or s of simulated time):

- ``output_rate``: output tokens a second over the run; ``tokens_per_request_s``: over the time that requests
  spent in the system, waiting included (with a fixed number of clients that is the output rate over the
  number; in an open loop, one over the mean time per token, requests cut off by the end included).
- ``tpot_ms``, ``ttft_ms`` (mean) and ``..._p99_ms``: of the requests that finished.
- ``goodput``: output tokens a second of the requests that finished within both latency targets.
- ``efficiency``: of all step time, the share that the rate-optimal tier would have needed for the same
  expected tokens of the same batches, by the simulator's truth: a step-by-step comparison in which neither
  chance nor a different course of events plays a part. ``late_efficiency``: of the steps after the first
  2,000; missing where there are none.
- ``switches``: steps whose tier is not that of the step before.
- ``recovery_s``: mean time from a jump in the scenario's script to the first second (four windows of 0.25 s)
  in which the efficiency is at least 97 %; where that does not come before the next jump, the time until
  then. ``recovered``: the share of jumps after which it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.server import StepResult, Truth
from specgov.env.suite import Condition

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LATE_AFTER_STEPS = 2_000
WINDOW_S = 0.25
RECOVERED_WINDOWS = 4
RECOVERED_EFFICIENCY = 0.97


class Tally:
    """Counts of one condition in N environments.

    Args:
        condition: what is played.
        n_envs: N.

    """

    def __init__(self, condition: Condition, n_envs: int) -> None:
        self._condition = condition
        self._tiers = np.array(condition.scenario.engine.tiers)
        self._every = np.arange(n_envs)
        self._windows = int(np.ceil(condition.scenario.duration_s / WINDOW_S)) + 1
        self._tokens, self._steps, self._switches, self._retracted = (
            np.zeros(n_envs, np.int64) for _ in range(4)
        )
        self._last_tier = np.full(n_envs, -1)
        self._end_ns, self._request_ns = np.zeros(n_envs, np.int64), np.zeros(n_envs, np.int64)
        self._tier_steps = np.zeros((n_envs, len(self._tiers)), np.int64)
        # Time of steps, and what the best tier would have needed: by window, and of late steps.
        self._ms, self._ideal_ms = (np.zeros((n_envs, self._windows)) for _ in range(2))
        self._late = np.zeros((2, n_envs))
        self._finished: list[tuple[Ints, ...]] = []

    def add(self, result: StepResult, truth: Truth, request_ns: Ints, playing: NDArray[np.bool_]) -> None:
        """Count a step where ``playing``, shape (N,).

        Args:
            result: the step.
            truth: of the moment before it.
            request_ns: the server's time integral of requests in the system after it, shape (N,).
            playing: environments whose run is not over.

        """
        index = np.searchsorted(self._tiers, result.num_steps)
        ms = truth.expected_ms[self._every, index] * playing
        rate = np.divide(
            truth.expected_tokens,
            truth.expected_ms,
            out=np.zeros_like(truth.expected_ms),
            where=truth.expected_ms > 0,
        )
        best = np.maximum(rate.max(axis=1), 1e-12)
        ideal_ms = ms * rate[self._every, index] / best
        window = np.minimum((result.time_ns * 1e-9 / WINDOW_S).astype(np.int64), self._windows - 1)
        self._ms[self._every, window] += ms
        self._ideal_ms[self._every, window] += ideal_ms
        late = result.step_id > LATE_AFTER_STEPS
        self._late += np.stack([ideal_ms, ms]) * late
        self._tokens += result.output_tokens * playing
        self._steps += playing
        self._retracted += result.retracted_requests * playing
        self._switches += playing & (self._last_tier >= 0) & (self._last_tier != result.num_steps)
        self._last_tier = np.where(playing, result.num_steps, self._last_tier)
        self._tier_steps[self._every, index] += playing
        self._end_ns = np.where(playing, result.time_ns, self._end_ns)
        self._request_ns = np.where(playing, request_ns, self._request_ns)
        done = result.finished
        if done.env.size:
            kept = playing[done.env]
            columns = (done.env, done.arrival_ns, done.first_token_ns, done.finish_ns, done.output_tokens)
            self._finished.append(tuple(column[kept] for column in columns))

    def row(self, env: int) -> dict[str, Any]:
        """The figures of one environment; None where there is nothing to tell."""
        end_s = float(self._end_ns[env]) * 1e-9
        tokens = int(self._tokens[env])
        ttft_ms, tpot_ms, asked = self._latencies(env)
        slo = self._condition
        in_time = (ttft_ms <= slo.slo_ttft_ms) & (tpot_ms <= slo.slo_tpot_ms)
        changes = recoveries(self._condition.changes_s, self._efficiency(env))
        return {
            "simulated_s": _rounded(end_s),
            "steps": int(self._steps[env]),
            "output_tokens": tokens,
            "output_rate": _rounded(tokens / end_s),
            "tokens_per_request_s": _rounded(tokens / (float(self._request_ns[env]) * 1e-9)),
            "tpot_ms": _mean(tpot_ms),
            "tpot_p99_ms": _p99(tpot_ms),
            "ttft_ms": _mean(ttft_ms),
            "ttft_p99_ms": _p99(ttft_ms),
            "goodput": _rounded(float(asked[in_time].sum()) / end_s),
            "efficiency": _ratio(float(self._ideal_ms[env].sum()), float(self._ms[env].sum())),
            "late_efficiency": _ratio(float(self._late[0, env]), float(self._late[1, env])),
            "switches": int(self._switches[env]),
            "tier_steps": dict(
                zip(map(str, self._tiers.tolist()), self._tier_steps[env].tolist(), strict=True)
            ),
            "finished": len(asked),
            "retracted": int(self._retracted[env]),
            "recovery_s": _mean(np.array([seconds for seconds, _ in changes])),
            "recovered": _mean(np.array([float(came) for _, came in changes])),
        }

    def _latencies(self, env: int) -> tuple[Floats, Floats, Ints]:
        """TTFT and TPOT in ms, and output tokens, of the requests that finished."""
        columns = [
            np.concatenate(
                [done[column][done[0] == env] for done in self._finished] or [np.zeros(0, np.int64)]
            )
            for column in range(1, 5)
        ]
        arrival_ns, first_ns, finish_ns, tokens = columns
        tpot_ms = (finish_ns - first_ns) * 1e-6 / np.maximum(tokens, 1)
        return (first_ns - arrival_ns) * 1e-6, tpot_ms, tokens

    def _efficiency(self, env: int) -> Floats:
        """Of the second that begins with each window; 1 where no step ends in it."""
        sums = [
            np.convolve(values[env], np.ones(RECOVERED_WINDOWS), "full")[RECOVERED_WINDOWS - 1 :]
            for values in (self._ideal_ms, self._ms)
        ]
        return np.divide(sums[0], sums[1], out=np.ones(self._windows), where=sums[1] > 0)


def recoveries(changes_s: Sequence[float], efficiency: Floats) -> list[tuple[float, bool]]:
    """Seconds from each change to recovery or to the next change, and whether recovery came.

    Args:
        changes_s: ascending times of changes.
        efficiency: of the second that begins with each window, shape (windows,).

    """
    ends_s = [*changes_s[1:], len(efficiency) * WINDOW_S] if changes_s else []
    found = []
    for change_s, until_s in zip(changes_s, ends_s, strict=True):
        first, last = int(np.ceil(change_s / WINDOW_S)), int(until_s / WINDOW_S)
        well = np.flatnonzero(efficiency[first:last] >= RECOVERED_EFFICIENCY)
        if well.size:
            found.append((float(well[0]) * WINDOW_S, True))
        else:
            found.append((until_s - change_s, False))
    return found


def _mean(values: Floats) -> float | None:
    return _rounded(float(values.mean())) if len(values) else None


def _p99(values: Floats) -> float | None:
    return _rounded(float(np.quantile(values, 0.99))) if len(values) else None


def _ratio(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole > 0 else None


def _rounded(value: float) -> float:
    """Eight significant digits: more than matters, fewer than differ between machines."""
    return float(f"{value:.8g}")
