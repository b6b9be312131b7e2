"""Policy bundles: a trained network as files that can be read and checked, never executed.

A bundle is a folder of three files:

- ``policy.safetensors``: the network's arrays (``network.py``), float32, and nothing else.
- ``bundle.json``: what the network is and where it comes from; ``Card`` lists its keys.
- ``README.md``: the same for people.

Bundles in the package have a name (``bundle_names``); others are named by their folder. Reading rejects
whatever does not fit: schema, observation version, tiers, shapes, hash, numbers that are not finite, unknown
keys. No pickle is read or written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from specgov.policies.features import MAX_NUM_STEPS, OBSERVATION_SIZE, OBSERVATION_VERSION
from specgov.policies.network import Float32s, Network, expected_shapes
from specgov.policies.types import PolicyError

SCHEMA = "specgov.policy"
SCHEMA_VERSION = 1
WEIGHTS_FILE, CARD_FILE, README_FILE = "policy.safetensors", "bundle.json", "README.md"
LARGEST_WEIGHTS_BYTES = 16 * 2**20
LARGEST_CARD_BYTES = 2**20

_BUNDLED = "specgov.policies.bundles"
_TIERS = tuple(range(MAX_NUM_STEPS + 1))


class BundleError(PolicyError):
    """A bundle cannot be found or used; the message says which file, what is wrong and what to do."""


@dataclass(frozen=True)
class Card:
    """What ``bundle.json`` says.

    ``tiers`` are the num_steps of the network's outputs. ``profiles`` holds the hashes of the step-time
    profiles that training started from, by name, ``scores`` what the policy reached by scenario (free form).
    ``training`` is the recipe: command, seed, reward, steps.
    """

    name: str
    hidden: tuple[int, ...]
    clip: float
    training: Mapping[str, Any] = field(default_factory=dict)
    profiles: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    weights_sha256: str = ""
    tiers: tuple[int, ...] = _TIERS
    observation_version: int = OBSERVATION_VERSION
    observation_size: int = OBSERVATION_SIZE
    activation: str = "tanh"
    schema: str = SCHEMA
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Bundle:
    """A network and its card."""

    card: Card
    network: Network


def bundle_names() -> list[str]:
    """The bundles that come with the package."""
    return list(_bundle_names())


@cache
def _bundle_names() -> tuple[str, ...]:
    """Looked up once, as they cannot change while the package runs."""
    folder = files(_BUNDLED)
    return tuple(sorted(entry.name for entry in folder.iterdir() if (entry / CARD_FILE).is_file()))


def load_bundle(name_or_path: str | Path) -> Bundle:
    """A bundle of the package by name, or the one in a folder.

    Raises:
        BundleError: there is none, or it cannot be used.

    """
    text = str(name_or_path)
    if text in bundle_names():
        with as_file(files(_BUNDLED) / text) as folder:
            return _read(folder)
    folder = Path(text)
    if not folder.is_dir():
        known = ", ".join(bundle_names()) or "none"
        raise BundleError(f"no bundle {text!r}: name a folder that holds {CARD_FILE}, or one of {known}")
    return _read(folder)


def save_bundle(bundle: Bundle, folder: Path) -> Card:
    """Write the three files, over older ones; returns the card as written, with the weights' hash.

    Each is written beside its place and renamed, so that a sidecar that watches the folder, or starts, hardly
    ever meets half of a bundle.
    """
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    weights = save({name: np.ascontiguousarray(v) for name, v in bundle.network.tensors().items()})
    document = asdict(bundle.card) | {"weights_sha256": hashlib.sha256(weights).hexdigest()}
    card = _card_of(document, folder / CARD_FILE)
    contents = {
        README_FILE: readable(card).encode(),
        WEIGHTS_FILE: weights,
        CARD_FILE: (json.dumps(document, indent=1, sort_keys=True) + "\n").encode(),
    }
    for name, content in contents.items():
        (folder / f"{name}.tmp").write_bytes(content)
    for name in contents:
        (folder / f"{name}.tmp").replace(folder / name)
    return card


def readable(card: Card) -> str:
    """The card for people, as Markdown."""
    layers = " x ".join(map(str, (card.observation_size, *card.hidden, len(card.tiers))))
    lines = [
        f"# Policy bundle {card.name}",
        "",
        "Written by `specgov export`; use it with `--policy ppo:FOLDER`.",
        "",
        f"- Network: {layers}, {card.activation}, over the model's scores of the tiers",
        f"- Observation: version {card.observation_version}",
        f"- Tiers: {', '.join(map(str, card.tiers))}, masked to those of the engine",
        f"- Weights: {WEIGHTS_FILE}, sha256 {card.weights_sha256}",
        *(f"- Profile {name}: {digest}" for name, digest in card.profiles.items()),
        *(f"- {key.replace('_', ' ').capitalize()}: {_plain(value)}" for key, value in card.training.items()),
    ]
    return "\n".join([*lines, *_score_table(card.scores)]) + "\n"


def _score_table(scores: Mapping[str, Any]) -> list[str]:
    rows = {name: value for name, value in scores.items() if isinstance(value, Mapping)}
    if not rows:
        return []
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    head = ["", f"| scenario | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    body = [f"| {n} | {' | '.join(_plain(row.get(c, '-')) for c in columns)} |" for n, row in rows.items()]
    return head + body


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _read(folder: Path) -> Bundle:
    card = _card_of(_document(folder / CARD_FILE), folder / CARD_FILE)
    path = folder / WEIGHTS_FILE
    weights = _bytes(path, LARGEST_WEIGHTS_BYTES)
    digest = hashlib.sha256(weights).hexdigest()
    if digest != card.weights_sha256:
        raise BundleError(
            f"{path}: its sha256 is {digest[:12]}..., and {CARD_FILE} says {card.weights_sha256[:12]}...: "
            "the files do not belong together, or were changed; export the bundle again"
        )
    return Bundle(card, Network.from_tensors(_tensors(weights, card, path), len(card.hidden), card.clip))


def _document(path: Path) -> dict[str, Any]:
    data = _bytes(path, LARGEST_CARD_BYTES)
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except ValueError as error:
        raise BundleError(f"{path}: not JSON: {error}; export the bundle again") from error
    if not isinstance(document, dict):
        raise BundleError(f"{path}: holds no object; export the bundle again")
    return document


def _bytes(path: Path, largest: int) -> bytes:
    try:
        if path.stat().st_size > largest:
            raise BundleError(f"{path}: larger than {largest} bytes, which no policy of ours is")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be read: {error.strerror or error}; a bundle is a folder with {WEIGHTS_FILE} "
            f"and {CARD_FILE}"
        ) from error


def _card_of(document: Mapping[str, Any], path: Path) -> Card:
    schema = (document.get("schema"), document.get("schema_version"))
    if schema != (SCHEMA, SCHEMA_VERSION):
        raise BundleError(
            f"{path}: is {schema[0]} version {schema[1]}, and this release reads {SCHEMA} version "
            f"{SCHEMA_VERSION}: export the bundle with this release"
        )
    known = {item.name for item in fields(Card)}
    for problem, keys in (("unknown", set(document) - known), ("missing", known - set(document))):
        if keys:
            raise BundleError(f"{path}: {problem} keys {', '.join(sorted(keys))}: export the bundle again")
    expected = {
        "observation_version": OBSERVATION_VERSION,
        "observation_size": OBSERVATION_SIZE,
        "tiers": list(_TIERS),
        "activation": "tanh",
    }
    for key, value in expected.items():
        given = list(document[key]) if isinstance(document[key], tuple) else document[key]
        if given != value or isinstance(given, bool):
            raise BundleError(
                f"{path}: {key} is {given}, and this release has {value}: train and export again with it"
            )
    _check_types(document, path)
    return Card(**{**document, "hidden": tuple(document["hidden"]), "tiers": _TIERS})


def _check_types(document: Mapping[str, Any], path: Path) -> None:
    hidden, clip = document["hidden"], document["clip"]
    if not isinstance(hidden, list | tuple) or not all(type(w) is int and 1 <= w <= 4096 for w in hidden):
        raise BundleError(f"{path}: hidden must list widths in 1..4096, not {hidden}: export again")
    if type(clip) not in (int, float) or not clip > 0:
        raise BundleError(f"{path}: clip must be a number above 0, not {clip}: export again")
    for key in ("name", "weights_sha256"):
        if not isinstance(document[key], str):
            raise BundleError(f"{path}: {key} must be a text, not {document[key]!r}: export again")
    for key in ("training", "profiles", "scores"):
        if not isinstance(document[key], Mapping):
            raise BundleError(f"{path}: {key} must be an object, not {document[key]!r}: export again")


def _tensors(weights: bytes, card: Card, path: Path) -> dict[str, Float32s]:
    """The arrays of a safetensors file, checked against the card."""
    # Here, so that an engine's environment that runs other rules needs no safetensors.
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise BundleError(f"{path}: not a safetensors file: {error}; export the bundle again") from error
    expected = expected_shapes(card.hidden)
    if set(tensors) != set(expected):
        raise BundleError(
            f"{path}: holds {', '.join(sorted(tensors))}, and the network of {CARD_FILE} needs "
            f"{', '.join(sorted(expected))}: export the bundle again"
        )
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or tensor.shape != expected[name]:
            raise BundleError(
                f"{path}: {name} is {tensor.dtype} {tensor.shape}, and must be float32 {expected[name]}: "
                "export the bundle again"
            )
        if not np.isfinite(tensor).all():
            raise BundleError(f"{path}: {name} holds NaN or infinity: training diverged; use an earlier one")
    if not (tensors["sd"] > 0).all():
        raise BundleError(f"{path}: sd must be above 0 everywhere: export the bundle again")
    return tensors


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
