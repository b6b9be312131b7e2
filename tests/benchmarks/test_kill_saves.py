"""The soak that kills a saving process: a few kills of it, as a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks" / "kill_saves.py"


def test_what_is_left_after_kill_9_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--kills", "15", "--seed", "1", "-o", str(tmp_path / "out.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["kills"] == 15
    assert min(found[what] for what in ("reports", "log_rows", "bundles", "reloads")) > 0
