"""The loads, by name: scenarios of ``loads.toml``, some of them at several concurrencies (``steady_64``)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from specgov.env.scenario import Scenario, load_scenario
from specgov.env.scenario_schema import ClosedTable, TraceTable
from specgov.policies.profile import Profile

FILE = Path(__file__).parent / "loads.toml"
CONCURRENCIES = {
    "steady": (64, 8, 250, 1),
    "sweep": (1, 2, 5, 10, 30, 70, 100, 250),
    "steady_short": (64, 8, 250, 1),
}
FILL_S = 1.5
"""What a load of constant concurrency is given until its batch is full; not counted."""


@dataclass(frozen=True)
class Load:
    """``count_from_s``: seconds of the load that do not count."""

    name: str
    scenario: Scenario
    count_from_s: float

    @property
    def duration_s(self) -> float:
        """All of it, from empty."""
        return self.scenario.duration_s

    def on(self, profile: Profile) -> Load:
        """The load on a simulated server with this profile."""
        return replace(self, scenario=replace(self.scenario, profile=profile))


def load_names() -> list[str]:
    """Every load, in the order of weight."""
    names: list[str] = []
    for name in tomllib.loads(FILE.read_text()):
        sizes = CONCURRENCIES.get(name)
        names += [f"{name}_{size}" for size in sizes] if sizes else [name]
    return names


def get_load(
    name: str, file: Path = FILE, duration_s: float | None = None, at_most: int | None = None
) -> Load:
    """A load by name.

    Args:
        name: as in ``load_names``; any number may follow ``steady_``, ``sweep_`` and ``steady_short_``.
        file: another file than the bundled one; a trace is looked for beside it.
        duration_s: stretch or squeeze the load to this time.
        at_most: cut concurrency at this.

    Raises:
        specgov.env.scenario.ScenarioError: there is no such load.

    """
    match = re.fullmatch(rf"({'|'.join(CONCURRENCIES)})_(\d+)", name)
    scenario = load_scenario(f"{file}:{match[1] if match else name}")
    table = scenario.table
    arrivals = table.arrivals
    if isinstance(arrivals, ClosedTable):
        concurrency = (int(match[2]),) if match else arrivals.concurrency
        if at_most:
            concurrency = tuple(min(value, at_most) for value in concurrency)
        arrivals = arrivals.model_copy(update={"concurrency": concurrency})
    mix = table.mix
    if duration_s is not None:
        scale = duration_s / table.duration_s
        if isinstance(arrivals, ClosedTable):
            starts = tuple(start * scale for start in arrivals.start_s)
            arrivals = arrivals.model_copy(update={"start_s": starts})
        period_s = None if mix.period_s is None else mix.period_s * scale
        mix = mix.model_copy(update={"start_s": tuple(s * scale for s in mix.start_s), "period_s": period_s})
    table = table.model_copy(
        update={"arrivals": arrivals, "mix": mix, "duration_s": duration_s or table.duration_s}
    )
    constant = isinstance(arrivals, ClosedTable) and len(arrivals.concurrency) == 1
    count_from_s = min(FILL_S, table.duration_s / 3) if constant else 0.0
    return Load(name, replace(scenario, name=name, table=table), count_from_s)


def needs_trace(load: Load) -> bool:
    """Whether a trace file belongs to it."""
    return isinstance(load.scenario.table.arrivals, TraceTable)
