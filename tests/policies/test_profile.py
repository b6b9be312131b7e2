from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from specgov.policies.profile import ProfileError, load_profile, parse_profile, profile_names

NAME = "h200-llama-3.1-8b"


@pytest.fixture(scope="module")
def text() -> str:
    return load_profile(NAME).to_json()


def sealed(document: dict[str, object]) -> str:
    """A document with the hash that fits it: sha256 of its canonical JSON without the hash."""
    document.pop("hash", None)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["hash"] = "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps(document)


def test_the_bundled_profiles() -> None:
    assert profile_names() == ["h200-llama-3.1-8b", "h200-qwen3-30b-a3b"]
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.tiers == (0, 1, 2, 3, 5, 7)
        assert profile.hardware == "H200"
        # As the recordings' description says: 11 batch sizes of 6 tiers at context 512.
        assert profile.grid.measured[1].sum() == 66


def test_a_profile_survives_its_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert load_profile(path).to_json() == text
    assert load_profile(str(path)).hash == load_profile(NAME).hash


def test_tier_0_tax() -> None:
    # Medians at batch 1, context 512: 5.232 and 4.763 ms; at batch 256: 13.551 and 12.877.
    tax = load_profile(NAME).tier_0_tax()
    assert tax[1] == pytest.approx(5.232 / 4.763 - 1, abs=0.002)
    assert tax[256] == pytest.approx(13.551 / 12.877 - 1, abs=0.002)


def test_an_unknown_name() -> None:
    with pytest.raises(ProfileError, match=r"no bundled profile 'h300'; there are h200-llama-3\.1-8b"):
        load_profile("h300")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot read the profile"):
        load_profile(tmp_path / "none.json")


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_a_file_cut_short(text: str, keep: int) -> None:
    with pytest.raises(ProfileError, match="not valid JSON"):
        parse_profile(text[:keep], "cut.json")


def test_another_kind_of_file() -> None:
    for other in ("{}", "[1]", '{"schema": "specgov.decision_log"}'):
        with pytest.raises(ProfileError, match="not a profile"):
            parse_profile(other)


def test_another_schema_version(text: str) -> None:
    document = json.loads(text)
    document["schema_version"] = 2
    with pytest.raises(ProfileError, match=r"schema version 2, this release reads 1; make the profile again"):
        parse_profile(sealed(document))


def test_a_changed_value(text: str) -> None:
    document = json.loads(text)
    document["noise"]["sigma"] = 0.5
    with pytest.raises(ProfileError, match="hash does not fit"):
        parse_profile(json.dumps(document))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number(text: str, value: str) -> None:
    document = json.loads(text)
    sigma = document["noise"]["sigma"]
    broken = text.replace(f'"sigma": {sigma}', f'"sigma": {value}')
    with pytest.raises(ProfileError, match=f"{value} is not a number"):
        parse_profile(broken)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("step_time",), None, "."),
        (("step_time", "step_ms"), [[1, 2], [3]], "step_ms: not a full grid of numbers"),
        (("step_time", "batch_sizes"), [2, 1], "batch_sizes: expected ascending"),
        (("parametric", "coefficients"), {"speed": 1}, "speed"),
        (("tiers",), ["many"], "many"),
        (("graph_batch_sizes",), [4, 2], "graph batch sizes must ascend"),
    ],
)
def test_a_value_that_cannot_be(text: str, path: tuple[str, ...], value: object, message: str) -> None:
    document = json.loads(text)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ProfileError, match=message):
        parse_profile(sealed(document))


@pytest.mark.parametrize("field", ["noise", "prefill", "parametric", "step_time", "tiers", "name", "facts"])
def test_a_missing_field(text: str, field: str) -> None:
    document = json.loads(text)
    del document[field]
    with pytest.raises(ProfileError, match=f"the field '{field}' is missing"):
        parse_profile(sealed(document), "mine.json")
