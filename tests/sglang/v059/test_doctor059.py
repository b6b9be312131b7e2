"""The doctor on SGLang 0.5.9: which worker is live and by what, and what is refused; no model is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from servers059 import ENVIRONMENT, FLAGS

pytestmark = pytest.mark.sglang

DRIVER = """
import dataclasses, json, os, sys
from specgov.sglang_plugin.doctor import diagnose
reports = []
for arguments, variables in json.load(sys.stdin):
    os.environ.update(variables)  # SGLang reads them where they are
    reports.append([dataclasses.asdict(check) for check in diagnose(arguments, os.environ)])
    for name in variables:
        del os.environ[name]
json.dump(reports, open(sys.argv[1], "w"))
"""
OVERLAP = {"SGLANG_ENABLE_SPEC_V2": "1"}


@dataclass(frozen=True)
class Case:
    """Arguments beside the usual ones, and what a failed check says (the sidecar's aside; "" for none)."""

    name: str
    said: str
    arguments: str = ""
    variables: dict[str, str] = field(default_factory=dict)


CASES = (
    Case("v1", ""),
    Case("v2", "", variables=OVERLAP),
    # SGLang sets this flag itself, by the variable alone.
    Case("v1 with a flag that says nothing", "", "--disable-overlap-schedule"),
    Case("v2 against the flag", "", "--disable-overlap-schedule", OVERLAP),
    Case("topk", "--speculative-eagle-topk is 2", "--speculative-eagle-topk 2"),
    Case("standalone", "StandaloneWorker: ", "--speculative-algorithm STANDALONE"),
    Case("multi-layer EAGLE", "MultiLayerEagleWorkerV2: ", "--enable-multi-layer-eagle", OVERLAP),
    Case("plan stream", "PLAN_STREAM", variables=OVERLAP | {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}),
    Case("tiers", "SPECGOV_TIERS names 1", variables={"SPECGOV_TIERS": "0,1"}),
    Case("no such argument", "unrecognized arguments: --no-such", "--no-such"),
)


@pytest.fixture(scope="module")
def reports(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Every case's checks, made by one process, since importing SGLang takes long."""
    folder = tmp_path_factory.mktemp("doctor")
    files = f"--model-path {models}/target --speculative-draft-model-path {models}/draft"
    target = {"SPECGOV_TARGET": f"unix://{folder}/nobody"}
    asked = [(f"{FLAGS} {files} {c.arguments}".split(), target | c.variables) for c in CASES]
    out = folder / "reports.json"
    command = [sys.executable, "-c", DRIVER, str(out)]
    environment = {**os.environ, **ENVIRONMENT}
    subprocess.run(command, input=json.dumps(asked).encode(), env=environment, check=True, timeout=300)
    return dict(zip([case.name for case in CASES], json.loads(out.read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_doctor_finds(case: Case, reports: dict[str, list[dict[str, str]]]) -> None:
    failed = [c for c in reports[case.name] if c["outcome"] == "FAILED" and c["name"] != "sidecar"]
    if not case.said:
        assert failed == []
        return
    assert any(case.said in f"{c['found']}: {c['remedy']}" for c in failed), failed
    assert all(c["remedy"] for c in failed)


@pytest.mark.parametrize("name", ["v1", "v2", "v1 with a flag that says nothing", "v2 against the flag"])
def test_the_live_worker_is_named(name: str, reports: dict[str, list[dict[str, str]]]) -> None:
    found = {check["name"]: check["found"] for check in reports[name]}
    v1 = "EAGLEWorker: the overlap loop is off, since SGLANG_ENABLE_SPEC_V2 is not set"
    v2 = "EAGLEWorkerV2: the overlap loop is on, since SGLANG_ENABLE_SPEC_V2=1"
    assert found["worker"] == f"{v1 if 'v1' in name else v2}; the hooks go on it and on no other"
    assert found["governed"] == "tiers 0, 3, starting with 3"
    assert "run on a CPU only" in found["SGLang"]
