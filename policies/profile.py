"""Profiles: what steps cost for one model on one engine and machine, as a JSON file.

A profile holds a table of step times with counts and spread, a parametric model fitted to it, the noise of
single steps, the cost of prefill, and the facts of the recording. ``specgov calibrate`` writes them; two are
bundled. A file carries a schema version and a hash over its contents, and nothing is read from a file that
has the wrong one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from specgov.policies.step_time import (
    Coefficients,
    HardwareSpec,
    ModelSpec,
    ParametricStepTime,
    PrefillCost,
    ResidualStepTime,
    StepGrid,
    StepNoise,
    StepTimeError,
    TableStepTime,
)

SCHEMA = "specgov.profile"
SCHEMA_VERSION = 1

_BUNDLED = "specgov.policies.profiles"


class ProfileError(ValueError):
    """A profile cannot be found or used; the message says which file, what is wrong and what to do."""


@dataclass(frozen=True)
class Profile:
    """What steps cost, and where that is known from.

    ``tiers`` are the num_steps that were recorded, ``graph_batch_sizes`` its CUDA-graph sizes (empty: no
    graphs). ``grid`` belongs to a server that can speculate, ``no_spec_grid`` to one started without
    speculation, None where that was not recorded. ``parametric`` was fitted to both. ``facts`` holds the rest
    of the recording's story, for people. ``hash`` is empty for a profile that was never written.
    """

    name: str
    hardware: str
    engine: str
    model: str
    draft: str
    tensor_parallel_size: int
    tiers: tuple[int, ...]
    graph_batch_sizes: tuple[int, ...]
    grid: StepGrid
    no_spec_grid: StepGrid | None
    noise: StepNoise
    prefill: PrefillCost
    parametric: ParametricStepTime
    eager_floor_ms: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    hash: str = ""

    @cached_property
    def step_time(self) -> TableStepTime:
        """Step times of a server that can speculate, tier 0 included."""
        return TableStepTime(self.grid, self.graph_batch_sizes, self.eager_floor_ms)

    @cached_property
    def no_spec_step_time(self) -> TableStepTime | None:
        """Step times of a server started without speculation; only num_steps 0 means anything."""
        if self.no_spec_grid is None:
            return None
        return TableStepTime(self.no_spec_grid, self.graph_batch_sizes, self.eager_floor_ms)

    @cached_property
    def parametric_step_time(self) -> ParametricStepTime:
        """The parametric model, padded as the table is."""
        return self.parametric.with_graph_batch_sizes(self.graph_batch_sizes)

    @cached_property
    def residual_step_time(self) -> ResidualStepTime:
        """The parametric model corrected by the table; at the table's cells both are equal."""
        return ResidualStepTime(self.parametric, self.grid, self.graph_batch_sizes)

    def tier_0_tax(self) -> dict[int, float]:
        """By batch size: how much slower tier 0 is than a server without speculation, 0.1 meaning 10 %.

        At the smallest measured context; empty where no such server was recorded.
        """
        if self.no_spec_grid is None or 0 not in self.grid.num_steps:
            return {}
        plane = int(np.flatnonzero(self.no_spec_grid.measured.any(axis=(1, 2)))[0])
        rows = self.no_spec_grid.measured[plane, :, 0]
        context, sizes = self.no_spec_grid.context_tokens[plane], self.no_spec_grid.batch_sizes[rows]
        with_spec = TableStepTime(self.grid).step_ms(sizes, 0, sizes * context)
        tax = with_spec / self.no_spec_grid.step_ms[plane, rows, 0] - 1
        return {int(size): round(float(value), 4) for size, value in zip(sizes, tax, strict=True)}

    def to_json(self) -> str:
        """The profile as the text of its file, hash included; equal profiles give equal text."""
        document = {
            "schema": SCHEMA,
            "schema_version": self.schema_version,
            "name": self.name,
            "hardware": self.hardware,
            "engine": self.engine,
            "model": self.model,
            "draft": self.draft,
            "tensor_parallel_size": self.tensor_parallel_size,
            "tiers": list(self.tiers),
            "graph_batch_sizes": list(self.graph_batch_sizes),
            "eager_floor_ms": self.eager_floor_ms,
            "step_time": _grid_to_json(self.grid),
            "no_spec_step_time": None if self.no_spec_grid is None else _grid_to_json(self.no_spec_grid),
            "noise": {
                "sigma": self.noise.sigma,
                "stall_probability_assumed": self.noise.stall_probability,
                "stall_ms_assumed": self.noise.stall_ms,
            },
            "prefill": {"fixed_ms": self.prefill.fixed_ms, "ms_per_token": self.prefill.ms_per_token},
            "parametric": {
                "model": asdict(self.parametric.model),
                "draft": asdict(self.parametric.draft),
                "hardware": asdict(self.parametric.hardware),
                "coefficients": self.parametric.coefficients.as_dict(),
            },
            "tier_0_tax": {str(size): tax for size, tax in self.tier_0_tax().items()},
            "facts": dict(self.facts),
        }
        document["hash"] = _hash_of(document)
        return _pretty(document)


def profile_names() -> list[str]:
    """Names of the bundled profiles."""
    return list(_profile_names())


@cache
def _profile_names() -> tuple[str, ...]:
    """Looked up once: names are asked for while decisions wait, and where no file can be opened any more."""
    names = (entry.name for entry in files(_BUNDLED).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_profile(name_or_path: str | Path) -> Profile:
    """A bundled profile by its name, or one from a path (anything that ends in ``.json`` or holds a slash).

    Raises:
        ProfileError: no such profile, or the file is not a whole, unchanged profile of this schema version.

    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text:
        try:
            content = Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"cannot read the profile {text}: {error}") from error
        return parse_profile(content, text)
    if text not in profile_names():
        raise ProfileError(
            f"there is no bundled profile {text!r}; there are {', '.join(profile_names())}, "
            "or give the path of a .json file that `specgov calibrate` wrote"
        )
    return parse_profile(files(_BUNDLED).joinpath(f"{text}.json").read_text(encoding="utf-8"), text)


def parse_profile(text: str, where: str = "profile") -> Profile:
    """A profile from the text of its file; ``where`` names it in errors.

    Raises:
        ProfileError: what is wrong with the text.

    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ProfileError(f"{where}: not valid JSON ({error}); the file may be cut short") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ProfileError(f'{where}: not a profile (its "schema" should be {SCHEMA!r})')
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ProfileError(
            f"{where}: schema version {version!r}, this release reads {SCHEMA_VERSION}; "
            "make the profile again with `specgov calibrate`"
        )
    stated = document.pop("hash", None)
    if stated != _hash_of(document):
        raise ProfileError(f"{where}: the hash does not fit the contents, so the file was changed or damaged")
    try:
        profile = _profile_from(document, str(stated))
        # Made here so that what cannot be used is refused here.
        _ = profile.step_time, profile.no_spec_step_time
        return profile
    except (KeyError, TypeError, ValueError) as error:
        what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ProfileError(f"{where}: {what}") from error


def _profile_from(document: dict[str, Any], stated_hash: str) -> Profile:
    noise, prefill, no_spec = document["noise"], document["prefill"], document["no_spec_step_time"]
    return Profile(
        name=str(document["name"]),
        hardware=str(document["hardware"]),
        engine=str(document["engine"]),
        model=str(document["model"]),
        draft=str(document["draft"]),
        tensor_parallel_size=int(document["tensor_parallel_size"]),
        tiers=tuple(int(tier) for tier in document["tiers"]),
        graph_batch_sizes=tuple(int(size) for size in document["graph_batch_sizes"]),
        grid=_grid_from_json(document["step_time"]),
        no_spec_grid=None if no_spec is None else _grid_from_json(no_spec),
        noise=StepNoise(
            float(noise["sigma"]), float(noise["stall_probability_assumed"]), float(noise["stall_ms_assumed"])
        ),
        prefill=PrefillCost(float(prefill["fixed_ms"]), float(prefill["ms_per_token"])),
        parametric=_parametric_from(document),
        eager_floor_ms=float(document["eager_floor_ms"]),
        facts=dict(document["facts"]),
        hash=stated_hash,
    )


def _parametric_from(document: dict[str, Any]) -> ParametricStepTime:
    values = document["parametric"]
    return ParametricStepTime(
        ModelSpec(**values["model"]),
        ModelSpec(**values["draft"]),
        HardwareSpec(**values["hardware"]),
        int(document["tensor_parallel_size"]),
        Coefficients(**values["coefficients"]),
    )


def _grid_to_json(grid: StepGrid) -> dict[str, Any]:
    values: dict[str, Any] = {
        "context_tokens": [round(float(value), 1) for value in grid.context_tokens],
        "batch_sizes": grid.batch_sizes.tolist(),
        "num_steps": grid.num_steps.tolist(),
        "count": grid.count.tolist(),
    }
    for name in ("step_ms", "median_ms", "p10_ms", "p90_ms"):
        values[name] = _without_nan(getattr(grid, name))
    return values


def _grid_from_json(values: dict[str, Any]) -> StepGrid:
    def numbers(name: str) -> NDArray[np.float64]:
        try:
            return np.asarray(values[name], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise StepTimeError(f"{name}: not a full grid of numbers ({error})") from error

    return StepGrid(
        numbers("context_tokens"),
        numbers("batch_sizes").astype(np.int64),
        numbers("num_steps").astype(np.int64),
        numbers("step_ms"),
        numbers("count").astype(np.int64),
        numbers("median_ms"),
        numbers("p10_ms"),
        numbers("p90_ms"),
    )


def _without_nan(values: NDArray[np.float64]) -> list[Any]:
    return [
        _without_nan(row) if isinstance(row, np.ndarray) else None if np.isnan(row) else round(float(row), 4)
        for row in values
    ]


def _hash_of(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _pretty(document: Mapping[str, Any]) -> str:
    """One line for each innermost list, so that a grid reads as a grid."""

    def render(value: Any, indent: int) -> str:
        pad = "\n" + " " * indent
        if isinstance(value, dict) and value:
            inner = ("," + pad + " ").join(
                f"{json.dumps(key)}: {render(item, indent + 1)}" for key, item in value.items()
            )
            return "{" + pad + " " + inner + pad + "}"
        if isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
            return (
                "["
                + pad
                + " "
                + ("," + pad + " ").join(render(item, indent + 1) for item in value)
                + pad
                + "]"
            )
        return json.dumps(value, allow_nan=False)

    return render(document, 0) + "\n"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a profile may hold")
