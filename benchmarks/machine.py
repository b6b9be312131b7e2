"""What a benchmark's figures depend on: the machine and the versions. Import it before numpy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

# As the command line does it: one BLAS thread, which must be said before numpy is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def facts(packages: tuple[str, ...]) -> dict[str, Any]:
    """Processor, cores for this process, load before the run, kernel, Python and package versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {package: importlib.metadata.version(package) for package in packages},
    }


def describe(machine: dict[str, Any]) -> str:
    """The facts in a sentence."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, load average before the run "
        f"{machine['load_average_1min']}, Linux {machine['kernel']}, Python {machine['python']}, {packages}."
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
