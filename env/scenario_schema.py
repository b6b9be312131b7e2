"""What a scenario file may hold: pydantic models, one for each table.

``env/scenarios.toml`` shows every table in use; docs/simulator.md explains them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from specgov.env.acceptance_classes import CLASSES


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


Positive = Annotated[float, Field(gt=0)]
Weights = Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(_listed), Field(min_length=1)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_listed), Field(min_length=1)]


class FieldError(ValueError):
    """Fields of a table do not go together; ``path`` leads from the table to the one to look at."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


class Table(BaseModel):
    """A table of a scenario file: unknown keys are errors, numbers are numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineTable(Table):
    """``[engine]``: the engine's limits and lags; graph sizes are the profile's."""

    max_running_requests: int = Field(256, ge=1, le=65_535)
    kv_capacity_tokens: int = Field(0, ge=0, description="0 = no limit")
    tiers: tuple[Annotated[int, Field(ge=0, le=7)], ...] | None = Field(
        None, min_length=1, description="ascending num_steps; none = the profile's"
    )
    decision_lag_steps: int = Field(
        2, ge=1, le=64, description="within the engine: 2 in an overlap loop, else 1"
    )
    transport_lag_steps: int = Field(1, ge=0, le=64, description="what a round trip to the sidecar adds")
    draft_kv_stays_warm: bool = True
    prefill_chunk_tokens: int = Field(8192, ge=1)
    switch_ms: float = Field(0.0, ge=0, description="what a step costs more whose tier is a new one")

    @model_validator(mode="after")
    def _tiers_ascend(self) -> EngineTable:
        if self.tiers is not None and list(self.tiers) != sorted(set(self.tiers)):
            raise FieldError(f"must ascend and be distinct, got {list(self.tiers)}", "tiers")
        return self


class LengthTable(Table):
    """A length in tokens: lognormal with this median and sigma, clipped; sigma 0 = always the median."""

    median_tokens: float = Field(gt=0, le=1e6)
    sigma: float = Field(0.0, ge=0, le=4)
    min_tokens: int = Field(1, ge=1)
    max_tokens: int = Field(131_072, ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> LengthTable:
        if self.min_tokens > self.max_tokens:
            raise FieldError(f"{self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens")
        return self


class ClassTable(Table):
    """``[[classes]]``: requests of one kind.

    ``acceptance`` names a class of ``env/acceptance_classes.py``; ``conditional_acceptance`` states one of
    your own, P(draft i accepted | those before it were), the last value held for deeper drafts.
    """

    acceptance: str = ""
    conditional_acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(None, min_length=1)
    share: Weights = Field(
        (1.0,), description="weight among the classes; a list has one for each mix.start_s"
    )
    prompt: LengthTable
    output: LengthTable

    @field_validator("acceptance")
    @classmethod
    def _is_a_class(cls, name: str) -> str:
        if name not in CLASSES:
            raise ValueError(f"no acceptance class {name!r}; there are {', '.join(sorted(CLASSES))}")
        return name

    @model_validator(mode="after")
    def _one_acceptance(self) -> ClassTable:
        if (self.conditional_acceptance is None) == (not self.acceptance):
            raise ValueError("give one of acceptance (a name) and conditional_acceptance (numbers)")
        return self


class MixTable(Table):
    """``[mix]``: when the shares of the classes change. ``period_s`` repeats the pattern."""

    start_s: Numbers = (0.0,)
    period_s: Positive | None = None


class ShiftTable(Table):
    """``[[acceptance.shifts]]``: the server's log hazard changes at a time; ln 2 = 0.69 squares every p."""

    at_s: float = Field(ge=0)
    log_hazard: float
    ramp_s: float = Field(0.0, ge=0)


class AcceptanceTable(Table):
    """``[acceptance]``: what moves acceptance of the whole server, and the loss of a cold draft."""

    shifts: tuple[ShiftTable, ...] = ()
    regime_spread: float = Field(0.0, ge=0)
    regime_s: Positive = 60.0
    cold_log_hazard: float = Field(0.7, ge=0)


class HiccupTable(Table):
    """``[hiccups]``: the host holds up the engine for some steps; see ``env/hiccups.py``."""

    per_s: float = Field(0.0, ge=0, description="that begin in a second of decoding; 0 = never")
    most_steps: int = Field(10, ge=1, le=1000)
    ms: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = Field(
        (10.0, 40.0), description="what their steps take at least: least and most of a hiccup"
    )
    caught_up: float = Field(0.5, ge=0, le=1, description="share that the steps after make up for")

    @model_validator(mode="after")
    def _ascends(self) -> HiccupTable:
        if self.ms[0] > self.ms[1]:
            raise FieldError(f"must be the least and the most, got {list(self.ms)}", "ms")
        return self


class GapTable(Table):
    """Burstiness: ``gaps`` poisson, or gamma or weibull with the coefficient of variation ``cv``."""

    gaps: Literal["poisson", "gamma", "weibull"] = "poisson"
    cv: float = Field(1.0, ge=0.2, le=10)
    random_phase: bool = Field(False, description="begin each episode at a random time of the period")


class SteadyTable(GapTable):
    """``arrivals.kind = "steady"``: one rate."""

    kind: Literal["steady"]
    rate_rps: Positive

    @model_validator(mode="after")
    def _makes_sense(self) -> SteadyTable:
        _check_phase(self.random_phase, None)
        return self


class DiurnalTable(GapTable):
    """``arrivals.kind = "diurnal"``: mean_rps * (1 + amplitude * cos(2 pi (t - peak_s) / period_s))."""

    kind: Literal["diurnal"]
    mean_rps: Positive
    amplitude: float = Field(0.8, ge=0, le=1)
    period_s: Positive = 86_400.0
    peak_s: float = 0.0


class PiecesTable(GapTable):
    """``arrivals.kind = "pieces"``: ``rate_rps`` from each ``start_s`` on, repeated each ``period_s``."""

    kind: Literal["pieces"]
    start_s: Numbers = (0.0,)
    rate_rps: Numbers
    period_s: Positive | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> PiecesTable:
        _check_script(self.start_s, self.rate_rps, "rate_rps", self.period_s)
        _check_phase(self.random_phase, self.period_s)
        return self


class FlashCrowdTable(GapTable):
    """``arrivals.kind = "flash_crowd"``: ``peak_rps`` for a while, ``base_rps`` before and after."""

    kind: Literal["flash_crowd"]
    base_rps: Positive
    peak_rps: Positive
    at_s: Positive
    crowd_s: Positive
    period_s: Positive | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> FlashCrowdTable:
        if self.period_s is not None and self.period_s <= self.at_s + self.crowd_s:
            raise FieldError("must be above at_s + crowd_s", "period_s")
        _check_phase(self.random_phase, self.period_s)
        return self


class ClosedTable(Table):
    """``arrivals.kind = "closed"``: so many clients, each with one request in the system at a time."""

    kind: Literal["closed"]
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=0, le=65_535)], ...], BeforeValidator(_listed), Field(min_length=1)
    ]
    start_s: Numbers = (0.0,)
    interpolate: bool = Field(False, description="in straight lines from value to value")
    period_s: Positive | None = None
    random_phase: bool = False

    @model_validator(mode="after")
    def _makes_sense(self) -> ClosedTable:
        _check_script(self.start_s, self.concurrency, "concurrency", self.period_s)
        _check_phase(self.random_phase, self.period_s)
        return self


class TraceTable(Table):
    """``arrivals.kind = "trace"``: the requests of a file; see ``env/traces.py`` for the formats."""

    kind: Literal["trace"]
    path: str = Field(min_length=1, description="relative to the scenario's file")
    time_scale: Positive = Field(1.0, description="0.5 = twice the rate")
    prompt_scale: Positive = 1.0
    output_scale: Positive = 1.0
    repeat: bool = True
    random_start: bool = False
    own_lengths: bool = Field(True, description="the trace's lengths, not those of the classes")


class ServeGenTable(Table):
    """``arrivals.kind = "servegen"``: rate and burstiness of a ServeGen table's windows."""

    kind: Literal["servegen"]
    path: str = Field(min_length=1, description="relative to the scenario's file")
    category: str = Field(min_length=1)
    rate_scale: Positive = 1.0
    time_scale: Positive = 1.0
    random_phase: bool = False


Arrivals = Annotated[
    SteadyTable | DiurnalTable | PiecesTable | FlashCrowdTable | ClosedTable | TraceTable | ServeGenTable,
    Field(discriminator="kind"),
]


class ScenarioTable(Table):
    """One scenario."""

    tests: str = Field(min_length=1, description="a sentence: what the scenario tests")
    profile: str = Field(
        "h200-llama-3.1-8b", min_length=1, description="a step-time profile: a name, or a file"
    )
    duration_s: Positive = Field(120.0, description="simulated time of an episode")
    engine: EngineTable = EngineTable.model_validate({})
    arrivals: Arrivals
    classes: tuple[ClassTable, ...] = Field(min_length=1)
    mix: MixTable = MixTable()
    acceptance: AcceptanceTable = AcceptanceTable.model_validate({})
    hiccups: HiccupTable = HiccupTable.model_validate({})

    @model_validator(mode="after")
    def _shares_match(self) -> ScenarioTable:
        pieces = len(self.mix.start_s)
        for number, table in enumerate(self.classes):
            if len(table.share) not in (1, pieces):
                given = len(table.share)
                raise FieldError(
                    f"{given} values, but mix.start_s has {pieces}: give as many, or one",
                    *("classes", number, "share"),
                )
        if not _ascends_from_zero(self.mix.start_s, self.mix.period_s):
            raise FieldError("must ascend from 0 and not pass period_s", "mix", "start_s")
        columns = [c.share if len(c.share) == pieces else c.share * pieces for c in self.classes]
        if any(sum(weights) <= 0 for weights in zip(*columns, strict=True)):
            raise FieldError("the shares of the classes must not all be 0 at the same time", "classes")
        return self


def _check_script(
    start_s: tuple[float, ...], values: tuple[float, ...], name: str, period_s: float | None
) -> None:
    """A script of values over time; ``name`` is that of the values.

    Raises:
        FieldError: it makes no sense.

    """
    if len(values) != len(start_s):
        raise FieldError(f"{len(values)} values, but start_s has {len(start_s)}: give as many", name)
    if not _ascends_from_zero(start_s, period_s):
        raise FieldError("must ascend from 0 and not pass period_s", "start_s")
    if min(values) < 0 or max(values) <= 0:
        raise FieldError("must not be negative, and one must be above 0", name)


def _ascends_from_zero(start_s: tuple[float, ...], period_s: float | None) -> bool:
    ascends = start_s[0] == 0 and all(first < second for first, second in pairwise(start_s))
    return ascends and (period_s is None or start_s[-1] <= period_s)


def _check_phase(random_phase: bool, period_s: float | None) -> None:
    if random_phase and period_s is None:
        raise FieldError("needs period_s", "random_phase")
