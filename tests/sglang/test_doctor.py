"""The doctor on the real SGLang: every misconfiguration is found, without a model being loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from servers import ENVIRONMENT, FLAGS, write_table

pytestmark = pytest.mark.sglang

DRIVER = """
import dataclasses, json, os, sys
from specgov.sglang_plugin import versions
from specgov.sglang_plugin.doctor import diagnose
installed = versions.installed_version()
reports = []
for arguments, variables, release in json.load(sys.stdin):
    versions.installed_version = lambda release=release: release or installed
    checks = diagnose(arguments, {**os.environ, **variables})
    reports.append([dataclasses.asdict(check) for check in checks])
json.dump(reports, open(sys.argv[1], "w"))
"""


# What SGLang chooses itself where it is not given: without adaptive, topk 4.
OPEN = (
    "--speculative-eagle-topk 1 --speculative-adaptive --speculative-num-steps 3 "
    "--speculative-num-draft-tokens 4 "
)


@dataclass(frozen=True)
class Case:
    """Arguments beside the usual ones, and what the failed check says (the sidecar's aside; "" for none)."""

    name: str
    said: str
    arguments: str = ""
    without: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    release: str = ""


CASES = (
    Case("good", ""),
    Case("not speculating", "the server does not speculate", without="--speculative-algorithm EAGLE"),
    Case("adaptive not on", "add --speculative-adaptive", without="--speculative-adaptive "),
    Case("nothing but the algorithm", "give --speculative-adaptive and", without=OPEN),
    Case("topk", "--speculative-eagle-topk is 2", "--speculative-eagle-topk 2"),
    Case("DP attention", "--enable-dp-attention", "--tp 2 --dp 2 --enable-dp-attention"),
    Case("multi-layer EAGLE", "--enable-multi-layer-eagle", "--enable-multi-layer-eagle"),
    Case("two-batch overlap", "--enable-two-batch-overlap", "--enable-two-batch-overlap"),
    Case("pdmux", "--enable-pdmux", "--enable-pdmux --chunked-prefill-size -1"),
    Case("pipeline", "--pp-size is 2", "--pp-size 2"),
    Case("LoRA", "LoRA", "--enable-lora --lora-paths a=/nowhere"),
    Case("n-gram", "--speculative-algorithm NGRAM", "--speculative-algorithm NGRAM"),
    Case("tiers", "SPECGOV_TIERS names 2", variables={"SPECGOV_TIERS": "0,2"}),
    Case("initial steps", "--speculative-num-steps is 1", "--speculative-num-steps 1", release="0.5.17"),
    Case("initial steps elsewhere", "", "--speculative-num-steps 1", release="0.5.19"),
    Case("steps that are no tier", "--speculative-num-steps=2 is not in", "--speculative-num-steps 2"),
    Case("no such file", "none.json", "--speculative-adaptive-config /nowhere/none.json"),
    Case("no such argument", "unrecognized arguments: --no-such", "--no-such"),
    Case("plugin not allowed", "SGLANG_PLUGINS", variables={"SGLANG_PLUGINS": "other"}),
    Case("one token", "REAL-DRAFT-TOKEN", variables={"SGLANG_SIMULATE_ACC_LEN": "2"}),
)  # fmt: skip


@pytest.fixture(scope="module")
def reports(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Every case's checks: one process, since importing SGLang takes far longer than a diagnosis."""
    folder = tmp_path_factory.mktemp("doctor")
    files = f"--model-path {models}/target --speculative-draft-model-path {models}/draft"
    usual = f"{' '.join(FLAGS.split())} {files} --speculative-adaptive-config {write_table(folder)}"
    asked = []
    for case in CASES:
        assert case.without in usual
        line = f"{usual.replace(case.without, '') if case.without else usual} {case.arguments}"
        target = {"SPECGOV_TARGET": f"unix://{folder}/nobody"}
        asked.append((line.split(), target | case.variables, case.release))
    out = folder / "reports.json"
    environment = {**os.environ, **ENVIRONMENT}
    command = [sys.executable, "-c", DRIVER, str(out)]
    subprocess.run(command, input=json.dumps(asked).encode(), env=environment, check=True, timeout=300)
    return dict(zip([case.name for case in CASES], json.loads(out.read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_doctor_finds(case: Case, reports: dict[str, list[dict[str, str]]]) -> None:
    failed = [c for c in reports[case.name] if c["outcome"] == "FAILED" and c["name"] != "sidecar"]
    if not case.said:
        assert failed == []
        return
    assert any(case.said.lower() in f"{c['found']}: {c['remedy']}".lower() for c in failed), failed
    assert all(c["remedy"] for c in failed)


def test_what_is_fine_is_said_too(reports: dict[str, list[dict[str, str]]]) -> None:
    found = {check["name"]: check for check in reports["good"]}
    assert found["worker"]["found"].startswith("EAGLEWorkerV2 (sglang.srt.speculative.eagle_worker_v2)")
    assert found["governed"]["found"] == "adaptive is live: tiers 0, 1, 3, starting with 3"
    assert sum(check["name"] in ("hook", "policy") for check in reports["good"]) == 10
    # Nobody listens there.
    assert found["sidecar"]["remedy"].startswith("start one: specgov serve")
    worker = next(check for check in reports["multi-layer EAGLE"] if check["name"] == "worker")
    assert worker["found"].startswith("MultiLayerEagleWorkerV2")
