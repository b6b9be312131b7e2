"""The wheel as a user gets it: built once, installed in an empty environment, every module imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
PLUGIN_NEEDS = ("grpcio", "protobuf", "numpy")

# Training, and commands that only load it, need the extra `train`; one module the extra `parquet`.
NEEDS_AN_EXTRA = (
    "specgov.controller.decision_log.parquet",
    "specgov.env.actor",
    "specgov.env.export",
    "specgov.env.sb3",
    "specgov.env.serving",
    "specgov.env.training",
    "specgov.env.training_env",
    "specgov.env.validation",
    "specgov.env.vector",
)

IMPORT_ALL = """
import importlib, pkgutil, sys
import importlib.util
skip = set(sys.argv[2:])
failed = []
for part in sys.argv[1].split(","):
    package = importlib.import_module(part)
    names = [part] + [m.name for m in pkgutil.walk_packages(package.__path__, part + ".")]
    for name in names:
        if name in skip:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            failed.append(f"{name}: {error!r}")
print("\\n".join(failed))
sys.exit(bool(failed))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path, *install: str | Path) -> Path:
    """A new virtual environment with ``install`` in it; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "-c",
        constraints,
        *install,
        cwd=folder,
    )
    return python


def python_files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*.py") if "__pycache__" not in p.parts}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy of what git tracks, so that a file that was not added is missed here too.
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    files = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--outdir", work, source, cwd=work)
    (path,) = work.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_every_part(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    tracked = set(filter(None, run("git", "ls-files", "-z", cwd=ROOT).split("\0")))
    wanted = {
        f"{part.replace('.', '/')}/{Path(name).relative_to(folder)}"
        for part, folder in FOLDERS.items()
        for name in tracked
        if Path(name).is_relative_to(folder)
        and Path(name).suffix in (".py", ".pyi", ".proto", ".json", ".toml", ".css", ".csv", ".typed")
    }
    assert wanted - held == set()
    for part in FOLDERS:
        assert f"{part.replace('.', '/')}/py.typed" in held
    assert "specgov/__init__.py" not in held, "specgov is a namespace"
    assert {name for name in held if not name.startswith("specgov")} == set()


def test_every_module_imports_from_the_wheel_with_the_base_install(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "base", wheel)
    run(python, "-c", IMPORT_ALL, ",".join(FOLDERS), *NEEDS_AN_EXTRA, cwd=tmp_path)
    version = run(tmp_path / "base" / "bin" / "specgov", "--version", cwd=tmp_path)
    assert PYPROJECT["project"]["version"] in version
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path).lower()
    for heavy in ("torch", "gymnasium", "stable-baselines3", "matplotlib"):
        assert f"\n{heavy}==" not in installed


@pytest.mark.parametrize("protobuf", ["protobuf>=6.31.1,<7", "protobuf>=7,<8"])
def test_the_plugin_parts_need_numpy_grpcio_and_protobuf_only(
    wheel: Path, tmp_path: Path, protobuf: str
) -> None:
    # Not under the constraints file, which names one protobuf.
    folder = tmp_path / "plugin"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, "grpcio", "numpy", protobuf, cwd=tmp_path)
    run(*pip, "--no-deps", wheel, cwd=tmp_path)
    parts = ("specgov.proto", "specgov.client", "specgov.policies", "specgov.sglang_plugin")
    run(python, "-c", IMPORT_ALL, ",".join(parts), cwd=tmp_path)
    check = (
        "import google.protobuf as p; from specgov.proto.v1 import specgov_pb2 as pb;"
        "m = pb.EngineMessage(report=pb.StepReport(step_id=7, accepted_drafts=bytes([0, 3])));"
        "assert pb.EngineMessage.FromString(m.SerializeToString()) == m; print(p.__version__)"
    )
    major = run(python, "-c", check, cwd=tmp_path).split(".")[0]
    assert major == protobuf.removeprefix("protobuf>=").split(".")[0].split(",")[0]


def test_setuptools_lists_every_package_that_exists() -> None:
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    found = {
        ".".join([part, *init.parent.relative_to(ROOT / folder).parts])
        for part, folder in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == found
    assert set(PLUGIN_NEEDS) <= {d.split(">")[0] for d in PYPROJECT["project"]["dependencies"]}
