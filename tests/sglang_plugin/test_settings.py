"""Every variable, every kind of mistake, and the file beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specgov.client import TlsFiles
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.settings import Settings, read_settings

TARGET = {"SPECGOV_TARGET": "unix:///run/specgov.sock"}


def test_off_unless_a_target_or_a_file_is_named() -> None:
    assert read_settings({}) is None
    assert read_settings({"SPECGOV_TARGET": " ", "SPECGOV_TIERS": "0,1"}) is None
    assert read_settings({**TARGET, "SPECGOV_MODE": "off"}) is None


def test_a_target_alone_is_enough() -> None:
    assert read_settings(TARGET) == Settings("unix:///run/specgov.sock")


def test_every_variable_is_read() -> None:
    given = {
        "SPECGOV_TARGET": "127.0.0.1:7000",
        "SPECGOV_TIERS": "3, 0,1",
        "SPECGOV_FALLBACK": "threshold:8:3",
        "SPECGOV_MODE": "shadow",
        "SPECGOV_MIN_STEPS_BETWEEN_SWITCHES": "4",
        "SPECGOV_ENGINE_ID": "left",
        "SPECGOV_PROFILE": "h200-qwen3-30b-a3b",
        "SPECGOV_MAX_ERRORS": "1",
        "SPECGOV_CLIENT": "thread",
        "SPECGOV_TLS_CA": "/ca.pem",
        "SPECGOV_TLS_CERTIFICATE": "/me.pem",
        "SPECGOV_TLS_KEY": "/me.key",
        "SPECGOV_TLS_SERVER_NAME": "sidecar.example",
    }
    tls = ("/ca.pem", "/me.pem", "/me.key", "sidecar.example")
    settings = read_settings(given)
    assert settings == Settings(
        "127.0.0.1:7000",
        (0, 1, 3),
        "threshold:8:3",
        "shadow",
        4,
        "left",
        "h200-qwen3-30b-a3b",
        1,
        "thread",
        *tls,
    )
    assert settings.tls == TlsFiles(*tls)
    assert read_settings(TARGET).tls is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("TARGET", "nowhere", "SPECGOV_TARGET: target 'nowhere' is neither unix:///path nor HOST:PORT"),
        ("TIERS", "0,x", "SPECGOV_TIERS: must be a whole number from 0 on, not 'x'"),
        ("TIERS", "1,1", "SPECGOV_TIERS: names a tier twice"),
        ("TIERS", "-1", "SPECGOV_TIERS: must be a whole number from 0 on"),
        ("FALLBACK", "greedy", "SPECGOV_FALLBACK: must be one of static:K, threshold:B:K and ema"),
        (
            "FALLBACK",
            "threshold:0:3",
            "SPECGOV_FALLBACK: policy 'threshold:0:3': batch_size must be 1 or more",
        ),
        ("FALLBACK", "static:3:4", "SPECGOV_FALLBACK: policy 'static:3:4': there are too many values"),
        ("MODE", "on", "SPECGOV_MODE: must be one of active, shadow, off, not 'on'"),
        ("MIN_STEPS_BETWEEN_SWITCHES", "0", "must be a whole number from 1 on, not 0"),
        ("MAX_ERRORS", "many", "SPECGOV_MAX_ERRORS: must be a whole number from 1 on, not 'many'"),
        ("TLS_CERTIFICATE", "/me.pem", "name its file in SPECGOV_TLS_CA"),
        ("TLS_SERVER_NAME", "a\nb", "SPECGOV_TLS_SERVER_NAME: must be at most 100 printable"),
        ("ENGINE_ID", "a\nb", "SPECGOV_ENGINE_ID: must be at most 100 printable characters"),
    ],
)
def test_a_mistake_is_named_with_its_variable(name: str, value: str, problem: str) -> None:
    with pytest.raises(PluginError) as error:
        read_settings({**TARGET, f"SPECGOV_{name}": value})
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_and_variables_before_it(tmp_path: Path) -> None:
    path = tmp_path / "plugin.toml"
    path.write_text('target = "unix:///a"\ntiers = [0, 3]\nfallback = "static:3"\nmax_errors = 5\n')
    environment = {"SPECGOV_CONFIG": str(path), "SPECGOV_FALLBACK": "ema"}
    assert read_settings(environment) == Settings("unix:///a", (0, 3), "ema", max_errors=5)
    assert read_settings({**environment, "SPECGOV_MODE": "off"}) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('target = "unix:///a"\ntier = [0]', "unknown key tier: the keys are target, tiers"),
        ('tiers = "0,1"', "target is missing"),
        ("target = 3", "target: must be a text, not 3"),
        ('target = "unix:///a"\ntiers = 3', "tiers: must list whole numbers"),
        ('target = "unix:///a"\nmax_errors = true', "max_errors: must be a whole number from 1 on, not True"),
        ("target = ", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_key(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "plugin.toml"
    path.write_text(text)
    with pytest.raises(PluginError) as error:
        read_settings({"SPECGOV_CONFIG": str(path)})
    assert problem in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"SPECGOV_CONFIG: .*nothing\.toml cannot be read"):
        read_settings({"SPECGOV_CONFIG": str(tmp_path / "nothing.toml")})
