"""The entry point: declared, off by default at no cost, and clear where it cannot work."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

LOAD = "import sys; from specgov.sglang_plugin.plugin import load; load(); "


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False, timeout=60
    )


def test_sglang_finds_the_plugin() -> None:
    (entry,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "specgov"]
    assert entry.value == "specgov.sglang_plugin.plugin:load"


def test_off_it_imports_nothing() -> None:
    done = run(LOAD + "print([m for m in ('numpy', 'grpc', 'sglang') if m in sys.modules])")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"SPECGOV_TARGET": "x"},
            "specgov: SPECGOV_TARGET: target 'x' is neither unix:///path nor HOST:PORT",
        ),
        ({"SPECGOV_TARGET": "unix:///s"}, "specgov: SGLang is not installed in this environment"),
    ],
)
def test_what_cannot_work_ends_the_process_with_one_line(variables: dict[str, str], said: str) -> None:
    done = run(LOAD, **variables)
    assert done.returncode == 1
    assert done.stderr.strip() == said
