"""``check-wheel`` on wheels of SGLang as they were released, downloaded once into .cache/wheels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specgov.sglang_plugin.check_wheel import check_wheel

pytestmark = pytest.mark.sglang
FOLDER = Path(__file__).parents[2] / ".cache" / "wheels"


def wheel(release: str) -> Path:
    if not (found := sorted(FOLDER.glob(f"sglang-{release}-*.whl"))):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            f"sglang=={release}",
            "-d",
            FOLDER,
        ]
        subprocess.run(command, check=True)
        found = sorted(FOLDER.glob(f"sglang-{release}-*.whl"))
    return found[0]


@pytest.mark.parametrize("release", ["0.5.14", "0.5.17", "0.5.19", "0.5.21", "0.5.22"])
def test_a_released_wheel_passes(release: str) -> None:
    checks = check_wheel(wheel(release))
    assert [str(check) for check in checks if check.outcome != "ok"] == []
    assert len(checks) > 30
    # The signatures are those that were written down, to the letter.
    assert [str(check) for check in checks if "which was" in check.found] == []
