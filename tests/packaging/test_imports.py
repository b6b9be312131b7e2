"""What a part may import: checked on what Python really loads, in a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "gymnasium", "stable_baselines3", "sb3_contrib", "matplotlib", "sglang", "opentelemetry")

# DESIGN: nothing imports against this table.
MAY_IMPORT = {
    "proto": {"proto"},
    "client": {"client", "proto"},
    "policies": {"policies"},
    "env": {"env", "policies", "client", "proto"},
    "sglang_plugin": {"sglang_plugin", "client", "policies", "proto"},
}


@pytest.mark.parametrize("part", ["controller", "client", "policies", "sglang_plugin", "proto"])
def test_importing_a_part_loads_nothing_heavy(part: str) -> None:
    code = (
        "import importlib, pkgutil, sys;"
        f"p = importlib.import_module('specgov.{part}');"
        "found = pkgutil.walk_packages(p.__path__, p.__name__ + '.');"
        "names = [m.name for m in found if '.cli.' not in m.name];"
        "[importlib.import_module(n) for n in names];"
        f"print([h for h in {HEAVY!r} if h in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("part", ["client", "policies", "sglang_plugin"])
def test_the_plugin_parts_load_only_numpy_grpc_and_protobuf(part: str) -> None:
    unwanted = ("pydantic", "structlog", "rich", "tyro", "safetensors", "prometheus_client")
    code = (
        "import importlib, pkgutil, sys;"
        f"p = importlib.import_module('specgov.{part}');"
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.')];"
        f"print([h for h in {unwanted!r} if h in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def imported_parts(path: Path) -> set[str]:
    """The parts of specgov that a file names in any import, also inside functions."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "specgov" else [f"specgov.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("specgov.")}
    return parts


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_no_part_imports_against_the_layout(part: str) -> None:
    against = {
        str(path.relative_to(ROOT)): sorted(imported_parts(path) - MAY_IMPORT[part])
        for path in (ROOT / part).rglob("*.py")
    }
    assert {path: parts for path, parts in against.items() if parts} == {}
