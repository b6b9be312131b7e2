"""The ``ema`` rule's options and its batch-size slots, from SGLang's table or a file like it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from specgov.policies.tiers import nearest_tier, require_tiers
from specgov.policies.types import EngineSpec, PolicyError

# SGLang 0.5.23, DEFAULT_ADAPTIVE_CONFIG in sglang/srt/speculative/adaptive_spec_params.py, without what is
# also SlotConfig's default.
_SGLANG_TABLE: Mapping[str, Mapping[str, Any]] = {
    "1": {"candidate_steps": [1, 3, 5, 7], "down_hysteresis": -0.25},
    "8": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
    "32": {"candidate_steps": [0, 1], "down_hysteresis": 0.0},
    "64": {"candidate_steps": [0], "down_hysteresis": 0.0},
}


@dataclass(frozen=True, slots=True)
class SlotConfig:
    """One slot: batches that pad to ``batch_size`` or more, and how it picks among ``tiers`` (ascending)."""

    batch_size: int
    tiers: tuple[int, ...]
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    ceiling_coeff: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ema_alpha", "up_hysteresis", "down_hysteresis", "ceiling_coeff"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value):
                raise PolicyError(f"{name} must be a finite number, not {value!r}")
        for name, least in (("update_interval", 1), ("warmup_batches", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise PolicyError(f"{name} must be a whole number from {least} on, not {value!r}")
        if not 0 <= self.ema_alpha <= 1:
            raise PolicyError(f"ema_alpha must lie in 0..1, not {self.ema_alpha}")


_SLOT_OPTIONS = tuple(f.name for f in fields(SlotConfig) if f.name not in ("batch_size", "tiers"))


@dataclass(frozen=True, slots=True)
class EmaConfig:
    """``config``: a file in the format of SGLang's ``--speculative-adaptive-config``; "" is SGLang's table.

    ``initial_num_steps`` is where slots start that have that tier, as SGLang's ``--speculative-num-steps``;
    None is the middle of the tiers of all slots. The other options are SGLang's own; one that is given here
    counts in every slot, whatever the table says. ``table`` follows from the options: the slots by batch
    size.
    """

    config: str = ""
    initial_num_steps: int | None = None
    ema_alpha: float | None = None
    update_interval: int | None = None
    warmup_batches: int | None = None
    up_hysteresis: float | None = None
    down_hysteresis: float | None = None
    ceiling_coeff: float | None = None
    table: tuple[SlotConfig, ...] = field(init=False)

    def __post_init__(self) -> None:
        document = _read(self.config) if self.config else _SGLANG_TABLE
        options = {name: getattr(self, name) for name in _SLOT_OPTIONS if getattr(self, name) is not None}
        object.__setattr__(self, "table", _slots(document, options))

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """The options of a document in the file's format.

        Raises:
            PolicyError: it is not one.

        """
        made = cls()
        object.__setattr__(made, "table", _slots(document, {}))
        return made

    def slots_for(self, engine: EngineSpec) -> tuple[SlotConfig, ...]:
        """The slots with the engine's tiers only.

        SGLang's table is cut to what the engine has, and a slot with nothing left gets the nearest tier; a
        user's file is taken at its word.

        Raises:
            PolicyError: the user's file has a tier that the engine lacks.

        """
        if self.config:
            require_tiers(engine, (tier for slot in self.table for tier in slot.tiers))
            return self.table
        return tuple(replace(slot, tiers=_cut(slot.tiers, engine)) for slot in self.table)


def _cut(tiers: tuple[int, ...], engine: EngineSpec) -> tuple[int, ...]:
    return tuple(tier for tier in tiers if tier in engine.tiers) or (nearest_tier(engine, tiers[0]),)


def _read(path: str) -> Mapping[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"config {path!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PolicyError(f"config {path!r} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise PolicyError(
            f"config {path!r} must hold a JSON object, as in {{'1': {{'candidate_steps': [1, 3]}}}}"
        )
    return document


def _slots(document: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[SlotConfig, ...]:
    """The slots of a table: whole numbers are batch sizes, the other keys count where a slot says nothing."""
    slots = {
        int(key): _slot(key, {**document, **_object(key, entry), **options})
        for key, entry in document.items()
        if key.isascii() and key.isdigit()
    }
    if not slots:
        raise PolicyError(
            "no slot: the table needs a key that is a batch size, as in {'1': {'candidate_steps': [1, 3]}}"
        )
    return tuple(slots[batch_size] for batch_size in sorted(slots))


def _object(key: str, entry: Any) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise PolicyError(f"slot {key}: must be an object with candidate_steps, not {entry!r}")
    return entry


def _slot(key: str, values: Mapping[str, Any]) -> SlotConfig:
    tiers = values.get("candidate_steps")
    if not isinstance(tiers, list) or not tiers or not all(type(tier) is int and tier >= 0 for tier in tiers):
        raise PolicyError(
            f"slot {key}: candidate_steps must be a list of whole numbers from 0 on, not {tiers!r}"
        )
    try:
        return SlotConfig(
            int(key),
            tuple(sorted(set(tiers))),
            **{name: values[name] for name in _SLOT_OPTIONS if name in values},
        )
    except PolicyError as error:
        raise PolicyError(f"slot {key}: {error}") from error
