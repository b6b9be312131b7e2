"""Bundles: what was saved is read back, and whatever does not fit is refused with one clear error."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from specgov.policies.bundle import Bundle, BundleError, Card, load_bundle, readable, save_bundle
from specgov.policies.features import OBSERVATION_VERSION
from specgov.policies.network import Network, expected_shapes
from specgov.policies.registry import make_policy
from specgov.policies.types import EngineSpec, PolicyContext, PolicyError

HIDDEN = (6, 5)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=s).astype(np.float32) for n, s in expected_shapes(HIDDEN).items()}
    arrays["sd"] = np.abs(arrays["sd"]) + np.float32(0.1)
    card = Card("mine", HIDDEN, 5.0, {"seed": 3}, {"p": "abc"}, {"quiet_chat": {"share": 99.5}})
    save_bundle(Bundle(card, Network.from_tensors(arrays, len(HIDDEN), 5.0)), tmp_path / "mine")
    return tmp_path / "mine"


def change_card(folder, **changes):
    path = folder / "bundle.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def change_weights(folder, change, *, rehash=True):
    path = folder / "policy.safetensors"
    arrays = load(path.read_bytes())
    change(arrays)
    path.write_bytes(save(arrays))
    if rehash:
        change_card(folder, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_bundle_is_read_back_as_it_was_saved(folder, tmp_path):
    bundle = load_bundle(folder)
    assert bundle.card.hidden == HIDDEN
    assert bundle.card.training == {"seed": 3}
    assert (
        bundle.card.weights_sha256 == hashlib.sha256((folder / "policy.safetensors").read_bytes()).hexdigest()
    )
    save_bundle(bundle, tmp_path / "again")
    for name in ("policy.safetensors", "bundle.json", "README.md"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_the_card_can_be_read(folder):
    text = readable(load_bundle(folder).card)
    assert "# Policy bundle mine" in text
    assert "| quiet_chat | 99.5 |" in text
    assert "- Seed: 3" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "other"}, "is other version 1"),
        ({"schema_version": 2}, "specgov.policy version 2"),
        ({"observation_version": OBSERVATION_VERSION + 1}, "observation_version is"),
        ({"observation_size": 5}, "observation_size is 5"),
        ({"tiers": [0, 1, 2]}, "tiers is"),
        ({"activation": "relu"}, "activation is relu"),
        ({"surprise": 1}, "unknown keys surprise"),
        ({"training": None}, "missing keys training"),
        ({"hidden": [6, 4]}, "must be float32"),
        ({"hidden": [6]}, "and the network of bundle.json needs"),
        ({"hidden": [6, True]}, "hidden must list widths"),
        ({"hidden": "6"}, "hidden must list widths"),
        ({"clip": 0}, "clip must be a number above 0"),
        ({"name": 5}, "name must be a text"),
        ({"scores": []}, "scores must be an object"),
        ({"weights_sha256": "0" * 64}, "the files do not belong together"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(folder, changes, message):
    change_card(folder, **changes)
    with pytest.raises(BundleError, match=message):
        load_bundle(folder)


def test_weights_that_were_changed_are_refused(folder):
    change_weights(folder, lambda arrays: arrays["head.bias"].__setitem__(0, 1.0), rehash=False)
    with pytest.raises(BundleError, match="sha256"):
        load_bundle(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(folder, value):
    change_weights(folder, lambda arrays: arrays["layer1.bias"].__setitem__(0, value))
    with pytest.raises(BundleError, match=r"layer1\.bias holds NaN or infinity"):
        load_bundle(folder)


def test_other_types_shapes_and_names_are_refused(folder):
    change_weights(
        folder, lambda arrays: arrays.update({"head.bias": arrays["head.bias"].astype(np.float64)})
    )
    with pytest.raises(BundleError, match=r"head\.bias is float64"):
        load_bundle(folder)
    change_weights(folder, lambda arrays: arrays.update({"head.bias": np.zeros(3, np.float32)}))
    with pytest.raises(BundleError, match=r"head\.bias is float32 \(3,\)"):
        load_bundle(folder)
    change_weights(folder, lambda arrays: arrays.update(extra=np.zeros(3, np.float32)))
    with pytest.raises(BundleError, match="extra"):
        load_bundle(folder)


def test_a_spread_of_zero_is_refused(folder):
    change_weights(folder, lambda arrays: arrays["sd"].__setitem__(0, 0.0))
    with pytest.raises(BundleError, match="sd must be above 0"):
        load_bundle(folder)


def test_no_pickle_is_read(folder):
    """A pickle in the place of the weights, with the right hash, is no safetensors file."""

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was executed",))

    weights = pickle.dumps(Bomb())
    (folder / "policy.safetensors").write_bytes(weights)
    change_card(folder, weights_sha256=hashlib.sha256(weights).hexdigest())
    with pytest.raises(BundleError, match="not a safetensors file"):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[]", "holds no object"), ('{"clip": NaN}', "NaN is no number")]
)
def test_a_card_that_is_no_card(folder, text, message):
    (folder / "bundle.json").write_text(text)
    with pytest.raises(BundleError, match=message):
        load_bundle(folder)


def test_files_that_are_missing_or_too_large(folder):
    (folder / "bundle.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(BundleError, match="larger than"):
        load_bundle(folder)
    (folder / "bundle.json").unlink()
    with pytest.raises(BundleError, match=r"^[^:]*bundle\.json: cannot be read: No such file"):
        load_bundle(folder)
    with pytest.raises(BundleError, match="name a folder"):
        load_bundle("nowhere")


def test_the_registry_says_which_policy_and_why(folder):
    change_card(folder, schema_version=9)
    context = PolicyContext(EngineSpec((0, 1)), np.random.default_rng(0), lambda: 0.0)
    with pytest.raises(PolicyError, match=r"policy 'ppo:.*mine': .*version 9"):
        make_policy(f"ppo:{folder}", context)


def test_writing_over_a_bundle_never_shows_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is killed before it renames leaves the older bundle, and the next nothing else."""
    folder = tmp_path / "bundle"
    save_bundle(load_bundle("default"), folder)
    before = load_bundle(folder).card
    with monkeypatch.context() as killed:

        def kill(self: Path, target: Path) -> Path:
            raise KeyboardInterrupt

        killed.setattr(Path, "replace", kill)
        with pytest.raises(KeyboardInterrupt):
            save_bundle(load_bundle("default"), folder)
    assert load_bundle(folder).card == before
    save_bundle(load_bundle("default"), folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "bundle.json",
        "policy.safetensors",
    ]
