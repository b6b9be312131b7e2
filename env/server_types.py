"""What goes into and comes out of the simulated server: workloads, step results, true expectations.

N is the number of environments, n the number of requests in the step over all environments, K the largest
tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specgov.env.rng import Keys

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class SimulationError(ValueError):
    """A configuration or workload that cannot be simulated; the message says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Requests, one entry each, shape (m,).

    ``arrival_s`` is the time of arrival in an open loop; where the server asked in order to reach a target
    concurrency it is ignored (the request arrives at the time of asking). ``prompt_tokens`` and
    ``output_tokens`` are at least 1. ``class_index`` points into the acceptance model's classes.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    class_index: Ints


class Workload(Protocol):
    """Where requests come from: open loop, closed loop or both; one request counter for each environment.

    Every draw is keyed by (environment key, request index), so that the same requests come whatever the
    policy does and however many environments there are. Times are seconds of simulated time since the
    reset.
    """

    def start(self, keys: Keys) -> None:
        """Begin len(keys) environments at request 0; called once, before everything else."""
        ...

    def reset(self, envs: Ints, keys: Keys) -> None:
        """Begin the environments ``envs`` again at request 0, with new keys; both shape (m,)."""
        ...

    def next_arrival_s(self) -> Floats:
        """Time of the next open-loop arrival, shape (N,); inf where there is none."""
        ...

    def take(self, envs: Ints, time_s: Floats) -> RequestBatch:
        """The next request of each of ``envs`` (distinct, shape (m,)), and advance their counters.

        ``time_s``, shape (m,), is the present time there: what a scripted closed loop draws its class by.
        In an open loop what counts is the arrival's own time.
        """
        ...

    def target_concurrency(self, time_s: Floats) -> Ints:
        """Requests that a closed loop keeps in the system (running and waiting), shape (N,); 0 where open."""
        ...

    def resume_s(self, time_s: Floats) -> Floats:
        """When the closed loop's target is next above 0, shape (N,), at least ``time_s``; inf if never.

        inf in an open loop.
        """
        ...


@dataclass(frozen=True, slots=True)
class LiveRequests:
    """The requests of the step, flat over environments, sorted by (environment, slot); shape (n,).

    ``accepted`` counts accepted drafts, 0..num_steps, also past a request's last token.
    """

    env: Ints
    slot: Ints
    generation: NDArray[np.uint8]
    accepted: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FinishedRequests:
    """Requests that ended with the step, flat over environments, sorted by environment; shape (f,).

    Times are integer nanoseconds of simulated time; the first token comes at the end of prefill.
    ``output_tokens`` are those of decode steps, as asked for; prefill's own token is not among them, so
    that time per output token is ``(finish_ns - first_token_ns) / output_tokens``.
    """

    env: Ints
    class_index: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    arrival_ns: Ints
    first_token_ns: Ints
    finish_ns: Ints


@dataclass(frozen=True, slots=True)
class StepResult:
    """One decode step of every environment; shape (N,) unless said otherwise.

    An environment whose workload has ended and that is empty makes no step: ``batch_size`` is 0 there, and
    ``exhausted`` is set from the step that emptied it on. ``idle_ns`` and ``prefill_ns`` passed between the
    step before and this one; ``step_ms`` is the step alone. ``output_tokens`` are the step's, cut off at the
    lengths asked for. ``accepted_histogram``, shape (N, K + 1), counts requests by accepted drafts. Contexts,
    ``waiting_requests`` and ``kv_use_ratio`` are those that the step ran with, and ``retracted_requests``
    were so before it. ``time_ns`` is the time at its end.
    """

    step_id: Ints
    batch_size: Ints
    num_steps: Ints
    step_ms: Floats
    idle_ns: Ints
    prefill_ns: Ints
    output_tokens: Ints
    accepted_histogram: Ints
    sum_seq_len_tokens: Ints
    max_seq_len_tokens: Ints
    waiting_requests: Ints
    kv_use_ratio: Floats
    finished_requests: Ints
    retracted_requests: Ints
    exhausted: Flags
    time_ns: Ints
    live: LiveRequests
    finished: FinishedRequests

    @property
    def idle_ms(self) -> Floats:
        """Time with nothing to do before the step."""
        return self.idle_ns.astype(np.float64) * 1e-6

    @property
    def prefill_ms(self) -> Floats:
        """Time of prefill before the step."""
        return self.prefill_ns.astype(np.float64) * 1e-6

    @property
    def after_idle(self) -> Flags:
        """Whether there was nothing to do before the step."""
        return self.idle_ns > 0

    @property
    def after_prefill(self) -> Flags:
        """Whether prefill ran between the step before and this one."""
        return self.prefill_ns > 0

    @property
    def step_ms_valid(self) -> Flags:
        """Whether an engine can measure the step's time: it followed at once upon another decode step."""
        return np.asarray((self.batch_size > 0) & (self.idle_ns + self.prefill_ns == 0))


@dataclass(frozen=True, slots=True)
class Truth:
    """What each tier would really bring in the coming step, noise left out; shape (N, number of tiers).

    ``expected_tokens`` counts output tokens of the whole batch, cut off at the lengths asked for.
    ``conditional_acceptance``, shape (N, K), is P(draft i accepted | those before it were) over the
    batch; NaN where no request can get that far.
    """

    expected_tokens: Floats
    expected_ms: Floats
    conditional_acceptance: Floats
