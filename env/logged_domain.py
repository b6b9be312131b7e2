"""A domain to train on out of a decision log: its step times, batches over time, and acceptance.

- Step times: calibrated from the log where it has enough settled steps of tier 0 and another, else those of
  the profile that its engine names. They are what the policy's estimates start from too.
- Load: a closed loop with as many clients as there were running and waiting requests, in straight lines
  through ``PIECES`` stretches of the log; it repeats, and an episode begins anywhere in it.
- Acceptance by position: that of ``STRETCHES`` stretches, each a class of requests which arrives in its time.
  A position that was not drafted in a stretch has the whole log's value, one that never was the deepest's.
- Assumed, since no log says it: how long outputs are (a median of ``OUTPUT_TOKENS``), and prompts such that
  the mean context is the log's.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgov.env.calibration import CalibrationError, Setup, calibrate
from specgov.env.domains import Domain
from specgov.env.logged_rows import read_rows
from specgov.env.logged_steps import read_decision_log
from specgov.env.recording import RecordingError
from specgov.env.scenario import Scenario
from specgov.env.scenario_schema import ScenarioTable
from specgov.policies.network import NUM_TIERS
from specgov.policies.profile import Profile, load_profile, profile_names

PIECES = 48
STRETCHES = 6
OUTPUT_TOKENS = 200.0
LEAST_DRAFTS = 50
"""Drafts at a position of a stretch that make an acceptance of its own."""
LEAST_STEPS = 200

Floats = NDArray[np.float64]


@dataclass
class _Load:
    """A log's steps, as far as a domain needs them."""

    engine: dict[str, Any] = field(default_factory=dict)
    time_s: array[float] = field(default_factory=lambda: array("d"))
    requests: array[int] = field(default_factory=lambda: array("i"))
    largest_batch: int = 1
    tokens_in_context: float = 0.0
    request_steps: float = 0.0
    num_steps: array[int] = field(default_factory=lambda: array("h"))
    survived: list[array[int]] = field(default_factory=list)


@lru_cache(maxsize=16)
def domain_of_log(path: str) -> Domain:
    """The domain.

    Raises:
        RecordingError: the log cannot be read, or it holds too little; the message says what is missing.

    """
    load = _read(path)
    profile = _profile(path, load.engine)
    table = ScenarioTable.model_validate(_table(path, load, profile))
    return Domain(Scenario(f"log:{path}", table, profile, Path()), profile.step_time)


def _read(path: str | Path) -> _Load:
    load = _Load(survived=[array("i") for _ in range(NUM_TIERS)])
    for where, row in read_rows([path]):
        try:
            if row["kind"] == "engine":
                load.engine = row
            elif row["kind"] == "step" and "warm_up" not in row["flags"]:
                _add(load, row)
        except (KeyError, TypeError) as error:
            raise RecordingError(f"{where}: not a row of a decision log ({error})") from error
    if len(load.time_s) < LEAST_STEPS:
        raise RecordingError(
            f"{path}: {len(load.time_s)} steps are too few for a load: {LEAST_STEPS} or more"
        )
    tiers = load.engine.get("tiers") or []
    if not tiers or max(tiers) >= NUM_TIERS:
        raise RecordingError(
            f"{path}: a policy network knows num_steps up to {NUM_TIERS - 1}, the engine's tiers are {tiers}"
        )
    return load


def _add(load: _Load, row: dict[str, Any]) -> None:
    load.time_s.append(row["time_s"])
    load.requests.append(row["batch_size"] + row["waiting_requests"])
    load.largest_batch = max(load.largest_batch, row["batch_size"])
    load.tokens_in_context += row["sum_seq_len_tokens"]
    load.request_steps += row["batch_size"]
    load.num_steps.append(row["num_steps"])
    accepted = row["accepted"]
    for depth, column in enumerate(load.survived):
        column.append(sum(accepted[depth:]))


def _profile(path: str | Path, engine: dict[str, Any]) -> Profile:
    try:
        return calibrate([read_decision_log(path)], Setup(name=f"log:{Path(str(path)).name}"))
    except CalibrationError as error:
        if engine.get("profile") in profile_names():
            return load_profile(str(engine["profile"]))
        raise RecordingError(
            f"{path}: {error}; and its engine names no bundled profile to use instead"
        ) from error


def _table(path: str | Path, load: _Load, profile: Profile) -> dict[str, Any]:
    time_s = np.array(load.time_s) - load.time_s[0]
    duration_s = max(float(time_s.max()), 1.0)
    engine = load.engine
    warm = engine.get("draft_kv_stays_warm")
    mean_context = max(load.tokens_in_context / max(load.request_steps, 1.0), 2.0)
    output_tokens = min(OUTPUT_TOKENS, mean_context)
    lengths = {"sigma": 0.6, "max_tokens": 16_384}
    stretches = _acceptance(load, time_s, duration_s)
    return {
        "tests": f"The load of the decision log {path}.",
        "profile": profile.name,
        "duration_s": 1e6,
        "engine": {
            "max_running_requests": int(engine.get("max_running_requests") or load.largest_batch),
            "kv_capacity_tokens": int(engine.get("kv_capacity_tokens") or 0),
            "tiers": tuple(engine["tiers"]),
            "decision_lag_steps": int(engine.get("decision_lag_steps") or 2),
            "draft_kv_stays_warm": True if warm is None else bool(warm),
        },
        "arrivals": _arrivals(load, time_s, duration_s),
        "mix": {
            "start_s": [duration_s * index / len(stretches) for index in range(len(stretches))],
            "period_s": duration_s,
        },
        "classes": [
            {
                "conditional_acceptance": acceptance.tolist(),
                "share": [1.0 if index == own else 0.0 for index in range(len(stretches))],
                "prompt": {"median_tokens": max(mean_context - output_tokens / 2, 1.0)} | lengths,
                "output": {"median_tokens": output_tokens} | lengths,
            }
            for own, acceptance in enumerate(stretches)
        ],
    }


def _arrivals(load: _Load, time_s: Floats, duration_s: float) -> dict[str, Any]:
    edges = np.linspace(0.0, duration_s, PIECES + 1)
    piece = np.clip(np.searchsorted(edges, time_s, "right") - 1, 0, PIECES - 1)
    counts = np.bincount(piece, minlength=PIECES)
    sums = np.bincount(piece, np.array(load.requests), PIECES)
    used = np.flatnonzero(counts)
    mean = np.interp(np.arange(PIECES), used, sums[used] / counts[used])
    return {
        "kind": "closed",
        "concurrency": [max(1, round(float(value))) for value in mean],
        "start_s": edges[:-1].tolist(),
        "interpolate": True,
        "period_s": duration_s,
        "random_phase": True,
    }


def _acceptance(load: _Load, time_s: Floats, duration_s: float) -> list[Floats]:
    """P(draft accepted | those before it were) by position, for each stretch."""
    survived = np.array([np.array(column) for column in load.survived], dtype=np.float64).T
    positions = max(int(load.engine["tiers"][-1]), 1)
    drafted = np.arange(1, positions + 1)[None, :] <= np.array(load.num_steps)[:, None]
    at_risk, accepted = survived[:, :positions] * drafted, survived[:, 1 : positions + 1] * drafted
    overall = _held(accepted.sum(axis=0), at_risk.sum(axis=0), np.full(positions, np.nan))
    stretch = np.clip((time_s / duration_s * STRETCHES).astype(int), 0, STRETCHES - 1)
    return [
        _held(accepted[stretch == each].sum(axis=0), at_risk[stretch == each].sum(axis=0), overall)
        for each in range(STRETCHES)
    ]


def _held(accepted: Floats, at_risk: Floats, otherwise: Floats) -> Floats:
    """Shares, ``otherwise`` where too little was drafted, and the deepest known beyond what is known."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(at_risk >= LEAST_DRAFTS, accepted / at_risk, otherwise)
    known = np.flatnonzero(np.isfinite(shares))
    if not len(known):
        raise RecordingError(f"fewer than {LEAST_DRAFTS} drafts in the log: nothing is known of acceptance")
    return np.interp(np.arange(len(shares)), known, shares[known])
