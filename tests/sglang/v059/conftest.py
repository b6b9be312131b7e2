"""For SGLang 0.5.9 alone: nothing is collected here on other releases."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the modules of these tests
_INSTALLED = importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else ""
collect_ignore_glob = [] if _INSTALLED == "0.5.9" else ["test_*.py"]
