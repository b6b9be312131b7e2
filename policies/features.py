"""The observation of learned rules: what a live engine reports, as numbers of similar size.

The sidecar feeds it one engine's step reports, the simulated server those of many environments at once;
both run this code, so a network sees in service what it saw in training. Nothing is in it that a live
engine cannot report. ``ENTRIES`` is its specification.

Estimates, per engine:

- Acceptance by position, from censored counts: a request that accepted a drafts at tier k tried positions
  1..min(a + 1, k). Trials T_i and acceptances S_i are discounted each step; ``p = (Σ S + w p0) / (Σ T +
  w)`` pools the positions, and ``p_i = (S_i + w p) / (T_i + w)`` shrinks each to it. The confidence of
  position i is ``T_i / (T_i + w)``.
- Step time: the profile's, times exp(r_k), where r_k is the discounted mean of ln(measured / profile) at
  tier k, shrunk to the mean over all tiers in the same way. A single step counts at most a factor of e.
- Output rate of tier k: expected accept length / expected step time, relative to the best tier of the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from specgov.policies.learnt import Learnt
from specgov.policies.model import expected_accept_length
from specgov.policies.types import EngineSpec, PolicyError, StepObservation, StepTime

OBSERVATION_VERSION = 1
"""Changes whenever an entry changes its meaning, place or bounds; trained networks are bound to it."""

MAX_NUM_STEPS = 7
"""The largest tier that an observation can describe."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_TIERS = np.arange(MAX_NUM_STEPS + 1)
_POSITIONS = np.arange(1, MAX_NUM_STEPS + 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """One number of the observation, which lies in ``low``..``high``."""

    name: str
    unit: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Block:
    """Entries of one kind, side by side: one, or one for each of ``indices`` (tiers or positions)."""

    name: str
    unit: str
    low: float
    high: float
    indices: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Number of entries."""
        return len(self.indices) or 1

    def entries(self) -> Iterator[Entry]:
        """The entries, in order."""
        names = [f"{self.name}_{index}" for index in self.indices] or [self.name]
        return (Entry(name, self.unit, self.low, self.high) for name in names)


_ALL_TIERS = tuple(range(MAX_NUM_STEPS + 1))
_SPECULATING = tuple(range(1, MAX_NUM_STEPS + 1))

BLOCKS = (
    Block("batch_size", "log2(1 + requests) / 8", 0.0, 2.0),
    Block("padded_batch_size", "log2(1 + requests) / 8, padded to a CUDA graph", 0.0, 2.0),
    Block("waiting", "log2(1 + requests) / 8", 0.0, 2.0),
    Block("mean_context", "log2(1 + tokens) / 16, prompt and output", 0.0, 2.0),
    Block("max_context", "log2(1 + tokens) / 16, prompt and output", 0.0, 2.0),
    Block("steps_since_speculation", "log2(1 + steps since num_steps > 0) / 8", 0.0, 1.0),
    Block("live_share", "requests still live / batch size", 0.0, 1.0),
    Block("kv_use", "share of KV capacity, 0 if not known", 0.0, 1.0),
    Block("kv_known", "1 if the engine reports KV use", 0.0, 1.0),
    Block("reported", "1 once a step was reported", 0.0, 1.0),
    Block("cuda_graph", "1 if a captured graph fits the batch", 0.0, 1.0),
    Block("after_prefill", "1 if prefill ran just before the step", 0.0, 1.0),
    Block("after_idle", "1 if the engine idled just before the step", 0.0, 1.0),
    Block("step_time_valid", "1 if the step has a valid duration", 0.0, 1.0),
    Block("num_steps", "1 for the step's tier", 0.0, 1.0, _ALL_TIERS),
    Block("has_tier", "1 if the engine has the tier", 0.0, 1.0, _ALL_TIERS),
    Block("draft_stays_warm", "1 if tier 0 keeps the draft's KV cache up to date", 0.0, 1.0),
    Block("acceptance", "P(draft i accepted, given those before it were)", 0.0, 1.0, _SPECULATING),
    Block("confidence", "evidence for it, 0 none to 1", 0.0, 1.0, _SPECULATING),
    Block("accept_length", "expected accept length / 8", 0.125, 1.0, _SPECULATING),
    Block("step_ms_0", "log2(1 + expected ms at tier 0) / 8", 0.0, 2.0),
    Block("step_time_ratio", "expected step time / that of tier 0, - 1", -1.0, 8.0, _SPECULATING),
    Block("time_correction", "ln(measured / profile's step time), discounted", -1.0, 1.0, _ALL_TIERS),
    Block("relative_rate", "expected output rate / the best tier's, 0 without it", 0.0, 1.0, _ALL_TIERS),
)  # fmt: skip

ENTRIES = tuple(entry for block in BLOCKS for entry in block.entries())
"""The observation's entries, in order."""

OBSERVATION_SIZE = len(ENTRIES)

_LOW = np.array([entry.low for entry in ENTRIES], np.float32)
_HIGH = np.array([entry.high for entry in ENTRIES], np.float32)


def _slices() -> dict[str, slice]:
    ends = np.cumsum([block.width for block in BLOCKS]).tolist()
    return {block.name: slice(end - block.width, end) for block, end in zip(BLOCKS, ends, strict=True)}


_AT = _slices()


def entries_of(block: str) -> slice:
    """Where the entries of ``block`` (a name of ``BLOCKS``) stand in an observation."""
    return _AT[block]


_LOGARITHMS = slice(_AT["batch_size"].start, _AT["steps_since_speculation"].stop)
_LOG_UNITS = np.array([8.0, 8.0, 8.0, 16.0, 16.0, 8.0])
_PLAIN = slice(_AT["live_share"].start, _AT["step_time_valid"].stop)


@dataclass(frozen=True, slots=True)
class StepSummaries:
    """The newest step of each of N engines, shape (N,) unless said otherwise; batch size 0 means no step.

    ``at_least``, shape (N, MAX_NUM_STEPS + 1), counts live requests that accepted at least 0, 1, .. drafts.
    ``padded_batch_size`` is 0 where not known, ``kv_use_ratio`` NaN where not known, ``step_ms`` NaN where
    the step's time is not valid.
    """

    batch_size: Ints
    num_steps: Ints
    at_least: Ints
    sum_seq_len_tokens: Ints
    max_seq_len_tokens: Ints
    padded_batch_size: Ints
    waiting_requests: Ints
    kv_use_ratio: Floats
    step_ms: Floats
    after_prefill: Flags
    after_idle: Flags

    @classmethod
    def none(cls, n: int) -> StepSummaries:
        """No step of any of ``n`` engines."""
        zero, unknown, false = np.zeros(n, np.int64), np.full(n, np.nan), np.zeros(n, np.bool_)
        at_least = np.zeros((n, MAX_NUM_STEPS + 1), np.int64)
        return cls(zero, zero, at_least, zero, zero, zero, zero, unknown, unknown, false, false)


def summarise(step: StepObservation) -> StepSummaries:
    """One engine's step as summaries of N = 1. Accepted drafts beyond MAX_NUM_STEPS are not counted."""
    at_least = np.count_nonzero(step.accepted[:, None] >= _TIERS, axis=0)

    def one(value: int) -> Ints:
        return np.array([value], np.int64)

    return StepSummaries(
        one(step.batch_size),
        one(step.num_steps),
        at_least[None],
        one(step.sum_seq_len_tokens),
        one(step.max_seq_len_tokens),
        one(step.padded_batch_size),
        one(step.waiting_requests),
        np.array([np.nan if step.kv_use_ratio is None else step.kv_use_ratio]),
        np.array([np.nan if step.step_ms is None else step.step_ms]),
        np.array([step.after_prefill]),
        np.array([step.after_idle]),
    )


@dataclass(frozen=True, slots=True)
class FeatureConfig:
    """How fast evidence fades (after a half-life it counts half), and how much of it is needed.

    ``prior_acceptance`` is p0; ``prior_trials`` (drafts) and ``prior_times`` (steps) are the weights w.
    """

    acceptance_half_life_steps: float = 60.0
    prior_acceptance: float = 0.6
    prior_trials: float = 10.0
    time_half_life_steps: float = 200.0
    prior_times: float = 4.0


class Features(Learnt):
    """Observations of N engines of one kind, from their steps.

    Args:
        engine: what all of them are.
        step_time: the profile's step time.
        n: number of engines.
        config: rates of forgetting and priors.

    Raises:
        PolicyError: the engine has a tier above MAX_NUM_STEPS.

    """

    _last: StepSummaries
    _profile_ms: Floats
    _since: Floats
    _hits: Floats
    _trials: Floats
    _log_ratio: Floats
    _times: Floats

    def __init__(
        self, engine: EngineSpec, step_time: StepTime, n: int = 1, config: FeatureConfig | None = None
    ) -> None:
        if max(engine.tiers) > MAX_NUM_STEPS:
            raise PolicyError(
                f"this engine has tier {max(engine.tiers)}, and an observation describes tiers up to "
                f"{MAX_NUM_STEPS}: leave out the larger ones"
            )
        self._config = config or FeatureConfig()
        self._step_time = step_time
        self._graph_sizes = np.array(engine.graph_batch_sizes, dtype=np.int64)
        self._has_tier = np.isin(_TIERS, engine.tiers)
        self._draft_stays_warm = engine.draft_kv_stays_warm
        self._last = StepSummaries.none(n)
        self._rows = np.arange(n)
        self._profile_ms = self._price_tiers()
        self._since = np.zeros(n)
        self._hits, self._trials = np.zeros((n, MAX_NUM_STEPS)), np.zeros((n, MAX_NUM_STEPS))
        self._log_ratio, self._times = np.zeros((n, len(_TIERS))), np.zeros((n, len(_TIERS)))
        self._keep_acceptance = 0.5 ** (1.0 / self._config.acceptance_half_life_steps)
        self._keep_times = 0.5 ** (1.0 / self._config.time_half_life_steps)

    def reset(self, engines: Flags) -> None:
        """Forget everything about the engines where ``engines``, shape (N,), is true."""
        self._last = _where(engines, StepSummaries.none(len(engines)), self._last)
        self._profile_ms = self._price_tiers()
        for array in (self._since, self._hits, self._trials, self._log_ratio, self._times):
            array[engines] = 0.0

    def forget_acceptance(self) -> None:
        """The weights changed: evidence on acceptance no longer holds, that on step times does."""
        self._hits[:] = 0.0
        self._trials[:] = 0.0

    def update(self, steps: StepSummaries) -> None:
        """Learn from the newest step of each engine; engines of batch size 0 stay as they are."""
        stepped = steps.batch_size > 0
        self._last = steps if stepped.all() else _where(stepped, steps, self._last)
        self._profile_ms = self._price_tiers()
        self._learn_acceptance(steps, stepped)
        self._learn_times(steps)
        self._since = np.where(stepped & (steps.num_steps > 0), 0.0, self._since + stepped)

    def acceptance(self) -> Floats:
        """Conditional acceptance by position, shape (N, MAX_NUM_STEPS)."""
        weight = self._config.prior_trials
        pooled = (self._hits.sum(1) + weight * self._config.prior_acceptance) / (self._trials.sum(1) + weight)
        estimate: Floats = (self._hits + weight * pooled[:, None]) / (self._trials + weight)
        return estimate

    def time_correction(self) -> Floats:
        """ln(measured / profile's step time) by tier, shape (N, MAX_NUM_STEPS + 1)."""
        weight = self._config.prior_times
        pooled = self._log_ratio.sum(1) / (self._times.sum(1) + weight)
        correction: Floats = (self._log_ratio + weight * pooled[:, None]) / (self._times + weight)
        return correction

    def step_ms(self) -> Floats:
        """Expected step time of every tier for the newest batch, shape (N, MAX_NUM_STEPS + 1)."""
        return self._profile_ms * np.exp(self.time_correction())

    def at_batch_sizes(self, batch_sizes: Ints) -> Features:
        """One engine's features if its batch had each of ``batch_sizes``, shape (M,): M engines to look at.

        Mean context, live share and all estimates stay as they are. Before the first step nothing is changed.

        Raises:
            ValueError: these are the features of more than one engine.

        """
        if len(self._rows) != 1:
            raise ValueError(f"at_batch_sizes is for one engine, and these are {len(self._rows)}")
        made, last = copy.copy(self), self._last
        scale = batch_sizes / np.maximum(last.batch_size, 1)
        made._last = StepSummaries(
            *(np.repeat(getattr(last, f.name), len(scale), axis=0) for f in fields(last))
        )
        if last.batch_size[0] > 0:
            made._last = replace(
                made._last,
                batch_size=batch_sizes,
                at_least=np.rint(made._last.at_least * scale[:, None]).astype(np.int64),
                sum_seq_len_tokens=np.rint(made._last.sum_seq_len_tokens * scale).astype(np.int64),
                padded_batch_size=np.where(scale == 1.0, last.padded_batch_size, 0),
            )
        made._rows, made._since = np.arange(len(scale)), np.repeat(self._since, len(scale))
        made._profile_ms = made._price_tiers()
        return made

    def observation(self) -> NDArray[np.float32]:
        """The observations, shape (N, OBSERVATION_SIZE), within the bounds of ``ENTRIES``."""
        acceptance = self.acceptance()
        accept_length = expected_accept_length(acceptance)
        correction = self.time_correction()
        step_ms = self._profile_ms * np.exp(correction)
        rate = self._has_tier * accept_length / step_ms
        out = np.empty((len(step_ms), OBSERVATION_SIZE), np.float32)
        self._describe_last_step(out)
        out[:, _AT["has_tier"]] = self._has_tier
        out[:, _AT["draft_stays_warm"]] = self._draft_stays_warm
        out[:, _AT["acceptance"]] = acceptance
        out[:, _AT["confidence"]] = self._trials / (self._trials + self._config.prior_trials)
        out[:, _AT["accept_length"]] = accept_length[:, 1:] / 8
        out[:, _AT["step_ms_0"]] = np.log2(1.0 + step_ms[:, :1]) / 8
        out[:, _AT["step_time_ratio"]] = step_ms[:, 1:] / step_ms[:, :1] - 1.0
        out[:, _AT["time_correction"]] = correction
        out[:, _AT["relative_rate"]] = rate / rate.max(axis=1, keepdims=True)
        return np.minimum(np.maximum(out, _LOW, out=out), _HIGH, out=out)

    def _describe_last_step(self, out: NDArray[np.float32]) -> None:
        last = self._last
        batch = np.maximum(last.batch_size, 1)
        reported = last.batch_size > 0
        padded, in_graph = self._padded(last)
        counts = (
            last.batch_size,
            padded,
            last.waiting_requests,
            last.sum_seq_len_tokens / batch,
            last.max_seq_len_tokens,
            self._since,
        )
        out[:, _LOGARITHMS] = np.log2(1.0 + np.array(counts).T) / _LOG_UNITS
        kv_known = last.kv_use_ratio >= 0
        out[:, _PLAIN] = np.array(
            (
                last.at_least[:, 0] / batch,
                np.where(kv_known, last.kv_use_ratio, 0.0),
                kv_known,
                reported,
                in_graph & reported,
                last.after_prefill,
                last.after_idle,
                last.step_ms > 0,
            )
        ).T
        out[:, _AT["num_steps"]] = (last.num_steps[:, None] == _TIERS) & reported[:, None]

    def _learn_acceptance(self, steps: StepSummaries, stepped: Flags) -> None:
        keep = np.where(stepped, self._keep_acceptance, 1.0)[:, None]
        tried = (steps.num_steps[:, None] >= _POSITIONS) & stepped[:, None]
        self._hits = self._hits * keep + steps.at_least[:, 1:] * tried
        self._trials = self._trials * keep + steps.at_least[:, :-1] * tried

    def _learn_times(self, steps: StepSummaries) -> None:
        timed = (steps.batch_size > 0) & (steps.step_ms > 0)
        if not timed.any():
            return
        expected = self._profile_ms[self._rows, steps.num_steps]
        ratio = np.where(timed, steps.step_ms, expected) / expected
        at_tier = (steps.num_steps[:, None] == _TIERS) & timed[:, None]
        keep = np.where(timed, self._keep_times, 1.0)[:, None]
        log_ratio = np.minimum(np.maximum(np.log(ratio), -1.0), 1.0)
        self._log_ratio = self._log_ratio * keep + at_tier * log_ratio[:, None]
        self._times = self._times * keep + at_tier

    def _price_tiers(self) -> Floats:
        """The profile's step time of every tier for the newest batch, shape (N, MAX_NUM_STEPS + 1)."""
        batch, tokens = self._last.batch_size, self._last.sum_seq_len_tokens
        return self._step_time.step_ms(np.maximum(batch, 1)[:, None], _TIERS, tokens[:, None])

    def _padded(self, last: StepSummaries) -> tuple[Ints, Flags]:
        """Padded batch size, as reported or else by the engine's graph sizes, and whether a graph fits."""
        if len(self._graph_sizes) == 0:
            return np.maximum(last.padded_batch_size, last.batch_size), np.zeros(
                len(last.batch_size), np.bool_
            )
        index = np.searchsorted(self._graph_sizes, last.batch_size)
        fits = index < len(self._graph_sizes)
        padded = np.where(fits, self._graph_sizes[np.where(fits, index, 0)], last.batch_size)
        return np.where(last.padded_batch_size > 0, last.padded_batch_size, padded), fits


def _where(condition: Flags, new: StepSummaries, old: StepSummaries) -> StepSummaries:
    """``new`` where ``condition`` (N,) holds, else ``old``."""

    def choose(name: str) -> NDArray[np.generic]:
        one, other = getattr(new, name), getattr(old, name)
        return np.asarray(np.where(condition if one.ndim == 1 else condition[:, None], one, other))

    return StepSummaries(*(choose(field.name) for field in fields(StepSummaries)))  # type: ignore[arg-type]
