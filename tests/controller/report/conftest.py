"""The helpers of ``logs.py``, which tests in importlib mode cannot import by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session", name="logs")
def _logs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_logs", Path(__file__).with_name("logs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
