"""Requests that come to the simulated server: open loop, closed loop, and replay of a trace.

All three implement ``Workload`` (``env/server_types.py``). Every draw is keyed by environment and request
number, so the same requests come whatever the policy does and however many environments run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specgov.env.arrivals import ExponentialGaps, Gaps, Intensity
from specgov.env.lengths import ClassMix, Lengths
from specgov.env.rng import Keys, Stream, draw, stream_keys, uniform
from specgov.env.server_types import RequestBatch
from specgov.env.traces import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RequestMix:
    """What the requests are like: their class by arrival time, and lengths by class."""

    classes: ClassMix
    lengths: Lengths

    def requests(self, keys: Keys, arrival_s: Floats, pattern_s: Floats) -> RequestBatch:
        """One request for each key, (m,); ``pattern_s`` is the time in the class pattern."""
        uniforms = uniform(keys[:, None], np.arange(3))
        request_class = self.classes.draw(pattern_s, uniforms[:, 0])
        prompt, output = self.lengths.draw(request_class, uniforms[:, 1:])
        return RequestBatch(arrival_s, prompt, output, request_class)


class _Counted:
    """Keys, request counters and start phases of the environments."""

    def __init__(self, mix: RequestMix, random_phase_s: float) -> None:
        self._mix = mix
        self._random_phase_s = random_phase_s

    def start(self, keys: Keys) -> None:
        """See ``Workload.start``."""
        n = len(keys)
        self._request_keys = np.zeros(n, dtype=np.uint64)
        self._arrival_keys = np.zeros(n, dtype=np.uint64)
        self._index = np.zeros(n, dtype=np.int64)
        self._phase_s = np.zeros(n)
        self.reset(np.arange(n), keys)

    def reset(self, envs: Ints, keys: Keys) -> None:
        """See ``Workload.reset``."""
        self._request_keys[envs] = stream_keys(keys, Stream.REQUEST)
        self._arrival_keys[envs] = stream_keys(keys, Stream.ARRIVAL)
        self._index[envs] = 0
        self._phase_s[envs] = self._random_phase_s * uniform(stream_keys(keys, Stream.PHASE), 0)

    def target_concurrency(self, time_s: Floats) -> Ints:
        """See ``Workload.target_concurrency``: 0, an open loop."""
        return np.zeros(len(time_s), dtype=np.int64)

    def resume_s(self, time_s: Floats) -> Floats:
        """See ``Workload.resume_s``: never, an open loop."""
        return np.full(len(time_s), np.inf)

    def _requests(self, envs: Ints, arrival_s: Floats) -> RequestBatch:
        """The next request of each environment; advances the counters."""
        keys = draw(self._request_keys[envs], self._index[envs])
        self._index[envs] += 1
        return self._mix.requests(keys, arrival_s, arrival_s + self._phase_s[envs])


class OpenLoop(_Counted):
    """Requests that come at a rate, whether the server keeps up or not.

    Args:
        mix: what the requests are like.
        intensity: the request rate over time.
        gaps: burstiness; a Poisson process by default.
        random_phase_s: each environment begins at a random time 0..random_phase_s of the pattern; 0 = all
        at 0.

    """

    def __init__(
        self,
        mix: RequestMix,
        intensity: Intensity,
        gaps: Gaps | None = None,
        random_phase_s: float = 0.0,
    ) -> None:
        super().__init__(mix, random_phase_s)
        self._intensity = intensity
        self._gaps = gaps or ExponentialGaps()

    def start(self, keys: Keys) -> None:
        """See ``Workload.start``."""
        self._operational = np.zeros(len(keys))
        self._next_s = np.zeros(len(keys))
        super().start(keys)

    def reset(self, envs: Ints, keys: Keys) -> None:
        """See ``Workload.reset``."""
        super().reset(envs, keys)
        self._operational[envs] = self._intensity.expected_requests(self._phase_s[envs])
        self._next_s[envs] = 0.0
        self._advance(envs)

    def next_arrival_s(self) -> Floats:
        """See ``Workload.next_arrival_s``."""
        return self._next_s

    def take(self, envs: Ints, time_s: Floats) -> RequestBatch:  # noqa: ARG002  (an arrival has its own time)
        """See ``Workload.take``."""
        requests = self._requests(envs, self._next_s[envs])
        self._advance(envs)
        return requests

    def _advance(self, envs: Ints) -> None:
        drawn = uniform(self._arrival_keys[envs], self._index[envs])
        phase_s = self._phase_s[envs]
        self._operational[envs] += self._gaps.quantile(drawn, self._next_s[envs] + phase_s)
        self._next_s[envs] = self._intensity.time_at(self._operational[envs]) - phase_s


class ClosedLoop(_Counted):
    """A number of clients, scripted over time, each of which sends its next request when the last one ends.

    Args:
        mix: what the requests are like.
        start_s: (m,) ascending from 0.
        concurrency: (m,) clients from each start on.
        interpolate: go from each value to the next in a straight line (rounded) instead of at once.
        period_s: repeat the script; without it the last value stays.
        random_phase_s: as for ``OpenLoop``.

    """

    def __init__(
        self,
        mix: RequestMix,
        start_s: Sequence[float],
        concurrency: Sequence[int],
        interpolate: bool = False,
        period_s: float | None = None,
        random_phase_s: float = 0.0,
    ) -> None:
        super().__init__(mix, random_phase_s)
        starts, targets = np.array(start_s, dtype=np.float64), np.array(concurrency, dtype=np.int64)
        self._start_s, self._targets = _staircase(starts, targets) if interpolate else (starts, targets)
        self._period_s = np.inf if period_s is None else period_s

    def next_arrival_s(self) -> Floats:
        """See ``Workload.next_arrival_s``: never, a closed loop."""
        return np.full(len(self._index), np.inf)

    def take(self, envs: Ints, time_s: Floats) -> RequestBatch:
        """See ``Workload.take``."""
        return self._requests(envs, time_s)

    def target_concurrency(self, time_s: Floats) -> Ints:
        """See ``Workload.target_concurrency``."""
        pattern_s = np.mod(time_s + self._phase_s, self._period_s)
        targets: Ints = self._targets[np.searchsorted(self._start_s, pattern_s, side="right") - 1]
        return targets

    def resume_s(self, time_s: Floats) -> Floats:
        """See ``Workload.resume_s``."""
        pattern_s = time_s + self._phase_s
        in_period = np.mod(pattern_s, self._period_s)
        busy_from = self._start_s[self._targets > 0]
        if len(busy_from) == 0:
            return np.full(len(time_s), np.inf)
        following = np.append(busy_from, busy_from[0] + self._period_s)
        wait_s = following[np.searchsorted(busy_from, in_period, side="right")] - in_period
        return np.where(self.target_concurrency(time_s) > 0, time_s, time_s + wait_s)


class Replay(_Counted):
    """The requests of a trace at its own times, lengths and order.

    Args:
        mix: gives the classes; its lengths are used only with ``own_lengths`` false.
        trace: the requests.
        repeat: begin again after the last request; else no request follows.
        random_start: each environment begins at a random request of the trace (needs ``repeat`` to be of
        use).
        own_lengths: prompt and output lengths of the trace.

    """

    def __init__(
        self,
        mix: RequestMix,
        trace: Trace,
        repeat: bool = True,
        random_start: bool = False,
        own_lengths: bool = True,
    ) -> None:
        super().__init__(mix, trace.period_s if random_start else 0.0)
        self._trace = trace
        self._repeat = repeat
        self._own_lengths = own_lengths

    def start(self, keys: Keys) -> None:
        """See ``Workload.start``."""
        self._first_row = np.zeros(len(keys), dtype=np.int64)
        self._next_s = np.zeros(len(keys))
        super().start(keys)

    def reset(self, envs: Ints, keys: Keys) -> None:
        """See ``Workload.reset``."""
        super().reset(envs, keys)
        self._first_row[envs] = np.searchsorted(self._trace.arrival_s, self._phase_s[envs])
        self._advance(envs)

    def next_arrival_s(self) -> Floats:
        """See ``Workload.next_arrival_s``."""
        return self._next_s

    def take(self, envs: Ints, time_s: Floats) -> RequestBatch:  # noqa: ARG002  (an arrival has its own time)
        """See ``Workload.take``."""
        row = (self._first_row[envs] + self._index[envs]) % len(self._trace)
        drawn = self._requests(envs, self._next_s[envs])
        self._advance(envs)
        if not self._own_lengths:
            return drawn
        lengths = self._trace.prompt_tokens[row], self._trace.output_tokens[row]
        return RequestBatch(drawn.arrival_s, *lengths, drawn.class_index)

    def _advance(self, envs: Ints) -> None:
        rounds, row = np.divmod(self._first_row[envs] + self._index[envs], len(self._trace))
        next_s = rounds * self._trace.period_s + self._trace.arrival_s[row] - self._phase_s[envs]
        self._next_s[envs] = np.where((rounds > 0) & (not self._repeat), np.inf, next_s)


def _staircase(start_s: Floats, targets: Ints) -> tuple[Floats, Ints]:
    """The rounded straight lines through the points, as pieces of constant whole numbers."""
    times, values = [start_s[:1]], [targets[:1]]
    for (begin, end), (low, high) in zip(pairwise(start_s), pairwise(targets), strict=True):
        change = abs(int(high) - int(low))
        times.append(begin + (end - begin) * (np.arange(change) + 0.5) / max(change, 1))
        values.append(low + np.sign(high - low) * np.arange(1, change + 1))
    return np.concatenate(times), np.concatenate(values)
