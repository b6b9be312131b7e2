"""What an evaluation runs: suites of conditions from ``suites.toml`` or a user's file.

A condition is a server and its load: a scenario, a profile, tiers, lag and so on. A suite crosses them in
grids. docs/policies.md explains the fields; ``suites.toml`` shows every one in use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from specgov.env.contenders import Contender
from specgov.env.scenario import Scenario, load_scenario
from specgov.env.scenario_schema import (
    ClosedTable,
    FlashCrowdTable,
    PiecesTable,
    Positive,
    ScenarioTable,
    Table,
)
from specgov.env.toml_lines import line_of
from specgov.policies.profile import load_profile

_BUNDLED = "suites.toml"


class SuiteError(ValueError):
    """A suite cannot be found or used; the message names file, line and field."""


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Tiers = tuple[Annotated[int, Field(ge=0, le=7)], ...]


class GridTable(Table):
    """``[[NAME.grids]]``: every combination of the lists."""

    name: str = Field(min_length=1, description="in the conditions' names and above tables")
    about: str = ""
    scenarios: Texts = Field(min_length=1)
    profiles: Texts = Field((), description="none = the scenario's own")
    tiers: tuple[Tiers, ...] = Field((), description="sets of num_steps; none = the scenario's")
    lag_steps: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], BeforeValidator(_listed)] = Field(
        (), description="decision lag in all; none = the scenario's"
    )
    switch_ms: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(_listed)] = ()
    hiccups_per_s: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(_listed)] = ()
    noise_scale: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(_listed)] = ()
    draft_kv_stays_warm: Annotated[tuple[bool, ...], BeforeValidator(_listed)] = ()
    time_scale: Positive = Field(1.0, description="0.5 = the scenario's script in half the time")
    rules: Texts = Field((), description="contenders or groups; none = the suite's")


class SuiteTable(Table):
    """``[NAME]``: a suite."""

    about: str = Field(min_length=1)
    seeds: int = Field(2, ge=1)
    train_scenarios: Texts = Field((), description="on which the tuned rules were tuned")
    slo_tpot_ms: Positive = 15.0
    slo_ttft_ms: Positive = 1000.0
    rules: Texts = Field(min_length=1, description="contenders, or names of [groups]")
    grids: tuple[GridTable, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Condition:
    """A server and its load, in which contenders are compared.

    Attributes:
        grid: the grid that it comes from.
        setting: what the grid varies beside scenario and profile, as in ``lag_steps=5``; may be empty.
        scenario: everything, the changes applied.
        is_training: whether tuned rules saw the scenario.
        rules: who takes part.
        slo_tpot_ms, slo_ttft_ms: the latency targets of goodput.

    """

    grid: str
    setting: str
    scenario: Scenario
    is_training: bool
    rules: tuple[Contender, ...]
    slo_tpot_ms: float
    slo_ttft_ms: float

    @property
    def name(self) -> str:
        """Unlike that of any other condition of the suite."""
        parts = (self.grid, self.scenario.name, self.scenario.profile.name, self.setting)
        return "/".join(part for part in parts if part)

    @property
    def is_closed_loop(self) -> bool:
        """Whether a rule decides how much is served, or only how soon."""
        return isinstance(self.scenario.table.arrivals, ClosedTable)

    @property
    def changes_s(self) -> tuple[float, ...]:
        """When the scenario's script jumps: clients, rates, mix of classes, acceptance."""
        return _changes_s(self.scenario.table)


@dataclass(frozen=True)
class Suite:
    """A named list of conditions."""

    name: str
    about: str
    seeds: int
    train_scenarios: tuple[str, ...]
    conditions: tuple[Condition, ...]

    @cached_property
    def hash(self) -> str:
        """Of all that decides a result, rules and seeds aside."""
        said = [
            [
                c.name,
                c.scenario.table.model_dump(mode="json"),
                c.scenario.profile.hash,
                c.scenario.profile.noise.sigma,
                c.slo_tpot_ms,
                c.slo_ttft_ms,
                c.is_training,
            ]
            for c in self.conditions
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def with_rules(self, rules: Sequence[str]) -> Suite:
        """The same conditions for other contenders.

        Raises:
            ContenderError: a text names none.

        """
        contenders = tuple(Contender(text) for text in rules)
        conditions = (dataclasses.replace(c, rules=contenders) for c in self.conditions)
        return dataclasses.replace(self, conditions=tuple(conditions))


def suite_names() -> list[str]:
    """The bundled suites."""
    return [name for name in tomllib.loads(_bundled_text()) if name != "groups"]


def load_suite(name_or_path: str) -> Suite:
    """A bundled suite by name, or one of a user's file: ``FILE`` where it holds one, else ``FILE:NAME``.

    Raises:
        SuiteError: there is no such suite or it is wrong.
        ScenarioError, ProfileError, ContenderError: so is something that it names.

    """
    if name_or_path in suite_names():
        return parse_suite(_bundled_text(), _BUNDLED, name_or_path)
    file, _, name = name_or_path.rpartition(":") if ".toml:" in name_or_path else (name_or_path, "", "")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(suite_names())
        raise SuiteError(
            f"no suite {name_or_path!r}: name a TOML file or one of {known} ({error})"
        ) from error
    return parse_suite(text, file, name)


def parse_suite(text: str, where: str, name: str = "") -> Suite:
    """One suite of a TOML text; ``name`` may be empty where the text holds only one.

    Raises:
        SuiteError, ScenarioError, ProfileError, ContenderError: as for ``load_suite``.

    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{where}: not TOML: {error}") from error
    groups = tables.pop("groups", {})
    if not name and len(tables) == 1:
        name = next(iter(tables))
    if name not in tables:
        raise SuiteError(f"{where}: no suite [{name}]; there are {', '.join(tables) or 'none'}")
    try:
        table = SuiteTable.model_validate(tables[name])
    except ValidationError as error:
        first = error.errors()[0]
        location = (name, *first["loc"])
        field = ".".join(str(part) for part in location)
        raise SuiteError(f"{where}:{line_of(text, location)}: {field}: {first['msg']}") from error
    conditions = tuple(condition for grid in table.grids for condition in _cross(table, grid, groups))
    names = [condition.name for condition in conditions]
    if len(set(names)) < len(names):
        raise SuiteError(f"{where}: {name}: two conditions are alike: give the grids other names")
    return Suite(name, table.about, table.seeds, table.train_scenarios, conditions)


_ENGINE_AXES = ("tiers", "lag_steps", "switch_ms", "draft_kv_stays_warm")


def _cross(suite: SuiteTable, grid: GridTable, groups: dict[str, list[str]]) -> list[Condition]:
    rules = tuple(Contender(text) for text in _members(grid.rules or suite.rules, groups))
    axes = [name for name in (*_ENGINE_AXES, "hiccups_per_s", "noise_scale") if getattr(grid, name)]
    crossed = itertools.product(
        grid.scenarios, grid.profiles or ("",), *(getattr(grid, name) for name in axes)
    )
    return [
        Condition(
            grid.name,
            ",".join(f"{axis}={_shown(value)}" for axis, value in zip(axes, values, strict=True)),
            _changed(load_scenario(name), profile, dict(zip(axes, values, strict=True)), grid.time_scale),
            name in suite.train_scenarios,
            rules,
            suite.slo_tpot_ms,
            suite.slo_ttft_ms,
        )
        for name, profile, *values in crossed
    ]


def _members(rules: Sequence[str], groups: dict[str, list[str]]) -> list[str]:
    """The contenders that rules and groups name, each once."""
    return list(dict.fromkeys(text for rule in rules for text in groups.get(rule, [rule])))


def _shown(value: Any) -> str:
    return "-".join(str(tier) for tier in value) if isinstance(value, tuple) else f"{value:g}"


def _changed(scenario: Scenario, profile: str, values: dict[str, Any], time_scale: float) -> Scenario:
    loaded = load_profile(profile) if profile else scenario.profile
    if "noise_scale" in values:
        noise = dataclasses.replace(loaded.noise, sigma=loaded.noise.sigma * values["noise_scale"])
        loaded = dataclasses.replace(loaded, noise=noise)
    engine = {name: values[name] for name in _ENGINE_AXES if name in values and name != "lag_steps"}
    if "lag_steps" in values:
        engine |= {"decision_lag_steps": values["lag_steps"], "transport_lag_steps": 0}
    table = faster(scenario.table, time_scale)
    changed = table.model_copy(update={"engine": table.engine.model_copy(update=engine)})
    if "hiccups_per_s" in values:
        hiccups = table.hiccups.model_copy(update={"per_s": values["hiccups_per_s"]})
        changed = changed.model_copy(update={"hiccups": hiccups})
    return dataclasses.replace(scenario, table=changed, profile=loaded)


def faster(table: ScenarioTable, time_scale: float) -> ScenarioTable:
    """The scenario with all times of its script multiplied; rates, lengths and latencies stay."""

    def scaled(part: Table, *names: str) -> dict[str, Any]:
        return {name: _times(getattr(part, name, None), time_scale) for name in names if hasattr(part, name)}

    script = ("start_s", "period_s", "peak_s", "at_s", "crowd_s", "ramp_s", "regime_s")
    shifts = tuple(s.model_copy(update=scaled(s, *script)) for s in table.acceptance.shifts)
    return table.model_copy(
        update={
            "duration_s": table.duration_s * time_scale,
            "arrivals": table.arrivals.model_copy(update=scaled(table.arrivals, *script)),
            "mix": table.mix.model_copy(update=scaled(table.mix, *script)),
            "acceptance": table.acceptance.model_copy(
                update=scaled(table.acceptance, *script) | {"shifts": shifts}
            ),
        }
    )


def _times(value: Any, scale: float) -> Any:
    if isinstance(value, tuple):
        return tuple(number * scale for number in value)
    return None if value is None else value * scale


def _changes_s(table: ScenarioTable) -> tuple[float, ...]:
    arrivals = table.arrivals
    times = _repeated(table.mix.start_s, table.mix.period_s, table.duration_s)
    times += [shift.at_s for shift in table.acceptance.shifts]
    if isinstance(arrivals, FlashCrowdTable):
        crowd = (arrivals.at_s, arrivals.at_s + arrivals.crowd_s)
        times += _repeated(crowd, arrivals.period_s, table.duration_s)
    elif isinstance(arrivals, PiecesTable) or (
        isinstance(arrivals, ClosedTable) and not arrivals.interpolate
    ):
        times += _repeated(arrivals.start_s, arrivals.period_s, table.duration_s)
    return tuple(sorted({time for time in times if 0 < time < table.duration_s}))


def _repeated(start_s: Sequence[float], period_s: float | None, duration_s: float) -> list[float]:
    if period_s is None:
        return list(start_s)
    if len(start_s) == 1:
        return []
    rounds = int(duration_s // period_s) + 1
    return [time + period_s * turn for turn in range(rounds) for time in start_s]


def _bundled_text() -> str:
    return (files("specgov.env") / _BUNDLED).read_text(encoding="utf-8")
