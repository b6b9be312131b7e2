"""Real SGLang servers on a CPU, over tiny models whose every token is known, and sidecars of all kinds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the modules of these tests


@pytest.fixture(autouse=True, scope="session")
def _sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: use make test-sglang")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models ``target`` and ``draft``."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, HERE / "make_models.py", folder], check=True)
    return folder


@pytest.fixture
def socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path for a sidecar's socket, short enough for one."""
    return tmp_path_factory.mktemp("s") / "s"
