"""Durations and deadlines rest on clocks that do not jump; the wall clock is for what people read."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNNING_PARTS = ("client", "controller", "policies", "sglang_plugin")

WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("date", "today"),
}
MAY_READ_THE_WALL_CLOCK = {
    "controller/decision_log/writer.py": "the time of a row",
    "controller/bundles.py": "how long ago a push was killed that left files behind, as their times say",
    "controller/engine_metrics.py": "the time of an engine's newest report",
    "controller/tracing.py": "the times of a span",
    "controller/cli/report.py": "the time zone of a page",
    "controller/cli/top.py": "the time on the screen",
}


def reads_wall_clock(path: Path) -> bool:
    """Whether a file names a wall clock, as in ``time.time`` or ``datetime.now``."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL_CLOCKS
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_who_reads_the_wall_clock_is_known() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for part in RUNNING_PARTS
        for path in (ROOT / part).rglob("*.py")
        if reads_wall_clock(path)
    }
    assert readers - set(MAY_READ_THE_WALL_CLOCK) == set(), (
        "pass a monotonic clock in, or name the file here with what it shows"
    )


def test_the_search_finds_one(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import time\ndef f(clock=time.time): ...\n")
    (tmp_path / "b.py").write_text("import time\nnow = time.monotonic()\n")
    assert [reads_wall_clock(tmp_path / name) for name in ("a.py", "b.py")] == [True, False]
