"""Scenarios: a server, its load and its requests under a name, from ``scenarios.toml`` or a user's file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from specgov.env import arrivals as rates
from specgov.env.acceptance import AcceptanceModel, Drift, Shift
from specgov.env.acceptance_classes import CLASSES, AcceptanceClass
from specgov.env.hiccups import Hiccups
from specgov.env.lengths import ClassMix, LogNormalLength, LogNormalLengths
from specgov.env.scenario_problems import not_toml, problems
from specgov.env.scenario_schema import (
    ClassTable,
    ClosedTable,
    DiurnalTable,
    FlashCrowdTable,
    GapTable,
    LengthTable,
    PiecesTable,
    ScenarioTable,
    ServeGenTable,
    SteadyTable,
    TraceTable,
)
from specgov.env.server import Server
from specgov.env.server_config import ServerConfig
from specgov.env.server_types import Workload
from specgov.env.toml_lines import line_of
from specgov.env.traces import TraceError, read_servegen_windows, read_trace
from specgov.env.workload import ClosedLoop, OpenLoop, Replay, RequestMix
from specgov.policies.profile import Profile, ProfileError, load_profile
from specgov.policies.types import EngineSpec

_BUNDLED = "scenarios.toml"


class ScenarioError(ValueError):
    """A scenario cannot be found or used; the message names the file, the line and the field."""


@dataclass(frozen=True)
class Scenario:
    """A named scenario: what the file says, and the profile that it names.

    ``folder`` is where the paths of trace files and profiles begin.
    """

    name: str
    table: ScenarioTable
    profile: Profile
    folder: Path

    @property
    def tests(self) -> str:
        """A sentence: what the scenario tests."""
        return self.table.tests

    @property
    def duration_s(self) -> float:
        """Simulated time of an episode."""
        return self.table.duration_s

    @property
    def engine(self) -> EngineSpec:
        """The engine as a rule sees it; the decision lag includes that of the transport."""
        table = self.table.engine
        return EngineSpec(
            tiers=table.tiers or self.profile.tiers,
            graph_batch_sizes=self.profile.graph_batch_sizes,
            max_running_requests=table.max_running_requests,
            decision_lag_steps=table.decision_lag_steps + table.transport_lag_steps,
            draft_kv_stays_warm=table.draft_kv_stays_warm,
            kv_capacity_tokens=table.kv_capacity_tokens,
        )

    def server_config(self) -> ServerConfig:
        """The simulated server."""
        acceptance = self.table.acceptance
        shifts = tuple(Shift(s.at_s, s.log_hazard, s.ramp_s) for s in acceptance.shifts)
        return ServerConfig(
            engine=self.engine,
            step_time=self.profile.step_time,
            acceptance=AcceptanceModel(
                tuple(_acceptance_class(number, c) for number, c in enumerate(self.table.classes)),
                Drift(shifts, acceptance.regime_spread, acceptance.regime_s),
                acceptance.cold_log_hazard,
            ),
            noise=self.profile.noise,
            hiccups=Hiccups(**self.table.hiccups.model_dump()),
            prefill=self.profile.prefill,
            prefill_chunk_tokens=self.table.engine.prefill_chunk_tokens,
            switch_ms=self.table.engine.switch_ms,
        )

    def workload(self) -> Workload:
        """The load, not yet started.

        Raises:
            ScenarioError: a trace file cannot be used.

        """
        table = self.table.arrivals
        mix = self._request_mix()
        try:
            if isinstance(table, ClosedTable):
                phase_s = (table.period_s or 0.0) if table.random_phase else 0.0
                return ClosedLoop(
                    mix, table.start_s, table.concurrency, table.interpolate, table.period_s, phase_s
                )
            if isinstance(table, TraceTable):
                trace = read_trace(self.folder / table.path)
                trace = trace.scaled(table.time_scale, table.prompt_scale, table.output_scale)
                return Replay(mix, trace, table.repeat, table.random_start, table.own_lengths)
            if isinstance(table, ServeGenTable):
                windows = read_servegen_windows(self.folder / table.path, table.category)
                intensity, gaps = rates.servegen(windows, table.rate_scale, table.time_scale)
                phase_s = windows.end_s * table.time_scale if table.random_phase else 0.0
                return OpenLoop(mix, intensity, gaps, phase_s)
            phase_s = (getattr(table, "period_s", None) or 0.0) if table.random_phase else 0.0
            return OpenLoop(mix, _intensity(table), _gaps(table), phase_s)
        except TraceError as error:
            raise ScenarioError(f"scenario {self.name}: {error}") from error

    def build(self, n_envs: int, seed: int) -> Server:
        """``n_envs`` simulated servers with the load; environment e has the seed ``seed`` + e."""
        return Server(self.server_config(), self.workload(), n_envs, seed)

    def _request_mix(self) -> RequestMix:
        classes, start_s = self.table.classes, self.table.mix.start_s
        weights = [c.share if len(c.share) == len(start_s) else c.share * len(start_s) for c in classes]
        return RequestMix(
            ClassMix(np.array(start_s), np.array(weights).T, self.table.mix.period_s),
            LogNormalLengths([_length(c.prompt) for c in classes], [_length(c.output) for c in classes]),
        )


def scenario_names() -> list[str]:
    """The bundled scenarios, in the order of their file."""
    return list(tomllib.loads(_bundled_text()))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A bundled scenario by name, or one of a user's file: ``FILE`` where it holds one, else ``FILE:NAME``.

    Raises:
        ScenarioError: there is no such scenario, or the file is wrong; the message names line and field.

    """
    text = str(name_or_path)
    if text in scenario_names():
        return parse_scenario(_bundled_text(), _BUNDLED, text)
    file, _, name = text.rpartition(":") if ".toml:" in text else (text, "", "")
    path = Path(file)
    if not path.suffix and not path.exists():
        raise ScenarioError(f"no scenario {text!r}: name a TOML file or one of {', '.join(scenario_names())}")
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from error
    return parse_scenario(content, str(path), name, path.parent)


def parse_scenario(text: str, where: str, name: str = "", folder: Path | None = None) -> Scenario:
    """One scenario of a TOML text; ``name`` may be empty where the text holds only one.

    Raises:
        ScenarioError: as for ``load_scenario``; ``where`` names the text in the message.

    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(not_toml(error, where)) from error
    name = name or _only_name(tables, where)
    if not isinstance(tables.get(name), dict):
        raise ScenarioError(f"{where}: no scenario [{name}]; there are {', '.join(tables) or 'none'}")
    try:
        table = ScenarioTable.model_validate(tables[name])
    except ValidationError as error:
        raise ScenarioError(problems(error, text, where, name)) from error
    folder = folder or Path()
    try:
        profile = load_profile(_beside(table.profile, folder))
    except ProfileError as error:
        line = line_of(text, (name, "profile"))
        raise ScenarioError(f"{where}:{line}: {name}.profile: {error}") from error
    return Scenario(name, table, profile, folder)


def scenario_text(name: str) -> str:
    """A bundled scenario as it stands in the file, to copy and change.

    Raises:
        ScenarioError: there is no bundled scenario of that name.

    """
    lines = _bundled_text().splitlines()
    names = scenario_names()
    if name not in names:
        raise ScenarioError(f"no bundled scenario {name!r}; there are {', '.join(names)}")
    starts = [number for number, line in enumerate(lines) if line.strip().strip("[]") in names]
    first = lines.index(f"[{name}]")
    last = min((start for start in starts if start > first), default=len(lines))
    return "\n".join(lines[first:last]).rstrip() + "\n"


def _bundled_text() -> str:
    return (files("specgov.env") / _BUNDLED).read_text(encoding="utf-8")


def _beside(profile: str, folder: Path) -> str:
    """A profile's file is looked for from the scenario's folder on; a name stays one."""
    return str(folder / profile) if profile.endswith(".json") or "/" in profile else profile


def _only_name(tables: Mapping[str, Any], where: str) -> str:
    if len(tables) != 1:
        raise ScenarioError(
            f"{where}: holds {len(tables)} tables ({', '.join(tables)}): say which, as in {where}:NAME"
        )
    return next(iter(tables))


def _acceptance_class(number: int, table: ClassTable) -> AcceptanceClass:
    if table.conditional_acceptance is None:
        return CLASSES[table.acceptance]
    survival = np.cumprod(table.conditional_acceptance)
    return AcceptanceClass(f"class_{number}", tuple(survival.tolist()))


def _length(table: LengthTable) -> LogNormalLength:
    return LogNormalLength(table.median_tokens, table.sigma, table.min_tokens, table.max_tokens)


def _intensity(table: SteadyTable | DiurnalTable | PiecesTable | FlashCrowdTable) -> rates.Intensity:
    if isinstance(table, SteadyTable):
        return rates.constant(table.rate_rps)
    if isinstance(table, DiurnalTable):
        return rates.diurnal(table.mean_rps, table.amplitude, table.period_s, table.peak_s)
    if isinstance(table, PiecesTable):
        return rates.Intensity(table.start_s, table.rate_rps, table.period_s)
    crowd = (0.0, table.at_s, table.at_s + table.crowd_s)
    return rates.Intensity(crowd, (table.base_rps, table.peak_rps, table.base_rps), table.period_s)


def _gaps(table: GapTable) -> rates.Gaps:
    if table.gaps == "gamma":
        return rates.GammaGaps(table.cv)
    if table.gaps == "weibull":
        return rates.WeibullGaps(table.cv)
    return rates.ExponentialGaps()
