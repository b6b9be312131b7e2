"""The store of bundles: what a push makes, what it refuses, and what a failed one leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bundle_bench import write_bundle

from specgov.controller.bundles import Bundles, push, stored_bundles
from specgov.controller.config import ServeConfig
from specgov.policies.bundle import BundleError


def test_a_push_makes_the_next_version_and_changes_none(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = push(write_bundle(tmp_path / "a", 3), store)
    second = push(write_bundle(tmp_path / "a", 5), store)
    other = push(tmp_path / "a", store, "other")
    assert [(s.name, s.version) for s in (first, second, other)] == [("mine", 1), ("mine", 2), ("other", 1)]
    assert stored_bundles(store) == [first, second, other]
    assert first.weights_sha256 != second.weights_sha256 == other.weights_sha256
    assert first.policy_text == "ppo:mine@1"
    assert {path.name for path in (store / "mine" / "1").iterdir()} == {
        "bundle.json",
        "policy.safetensors",
        "README.md",
    }
    assert [path.name for path in (store / "mine").iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_used_is_not_pushed(tmp_path: Path) -> None:
    source = write_bundle(tmp_path / "a", 3)
    card = json.loads((source / "bundle.json").read_text())
    (source / "bundle.json").write_text(json.dumps({**card, "schema_version": 0}))
    with pytest.raises(BundleError, match="export the bundle with this release"):
        push(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "x" * 65, "a@1", "a b", "-"])
def test_a_name_cannot_lead_out_of_the_store(tmp_path: Path, name: str) -> None:
    source = write_bundle(tmp_path / "a", 3)
    with pytest.raises(BundleError, match="is no name for a store"):
        push(source, tmp_path / "store", name)
    bundles = Bundles(ServeConfig.model_validate({"bundles": {"dir": str(tmp_path / "store")}}))
    assert not bundles.is_stored(f"ppo:{name}@1")
    with pytest.raises(BundleError):
        bundles.newest(name)


def test_a_push_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        push(write_bundle(tmp_path / "a", 3), tmp_path / "store")
    assert list((tmp_path / "store" / "mine").iterdir()) == []


def test_what_a_killed_push_left_is_cleared_later(tmp_path: Path) -> None:
    store = tmp_path / "store"
    push(write_bundle(tmp_path / "a", 3), store)
    old, under_way = store / "mine" / ".push-old", store / "mine" / ".push-now"
    for folder in (old, under_way):
        folder.mkdir()
    os.utime(old, (0, 0))
    push(tmp_path / "a", store)
    assert (old.exists(), under_way.exists()) == (False, True)
    assert [bundle.version for bundle in stored_bundles(store)] == [1, 2]


def test_a_damaged_bundle_is_listed_with_its_problem(tmp_path: Path) -> None:
    store = tmp_path / "store"
    push(write_bundle(tmp_path / "a", 3), store)
    (store / "mine" / "1" / "policy.safetensors").write_bytes(b"")
    (listed,) = stored_bundles(store)
    assert "the files do not belong together" in listed.problem
