"""From a canary on a served engine to what the report says of it: sidecar, client, log and page together."""

from __future__ import annotations

import html
import re
from pathlib import Path

from specgov.controller.config import ServeConfig
from specgov.controller.server import Sidecar


def text_of(page: Path) -> str:
    """What a page says, without pictures and marks."""
    bare = re.sub(r"<(svg|style).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", bare)).split())


def test_a_canary_gives_the_report_what_it_needs_to_judge_its_candidate(run, tmp_path: Path) -> None:
    log, page = tmp_path / "decisions.jsonl", tmp_path / "report.html"
    # On this load tier 3 makes a sixth more tokens than tier 1, which is also the guard's baseline here.
    config = {
        "listen": f"unix://{tmp_path}/s.sock",
        "policy": "static:1",
        "guard": {"baseline": "static:1"},
        "decision_log": {"path": str(log), "flush_s": 0.05},
    }
    sidecar = Sidecar(ServeConfig.model_validate(config))
    sidecar.start()
    try:
        at = ("--target", sidecar.target)
        engine = ("--load", "quiet_chat", "--engine-id", "e1", "--fast", *at)
        assert run("emulate", *engine, "--duration-s", "0.5").code == 0  # so that the sidecar knows it
        assert run("engines", "canary", "e1", "--policy", "static:3", "--share", "0.5", *at).code == 0
        assert run("emulate", *engine, "--duration-s", "30").code == 0
        shown = run("engines", "show", "e1", *at).out
    finally:
        sidecar.stop()
    compared = re.search(r"static:3 in 50 % .*95 % interval (\S+) to", shown)
    assert compared, shown
    assert float(compared[1]) > 0.0

    assert run("report", str(log), "-o", str(page)).code == 0
    said = text_of(page)
    for tier in (1, 3):  # what chance decided between
        assert re.search(rf"static:{tier} [^:]* doubly robust, from \d+ % of the steps", said), said
    for tier in (0, 2):  # a model's estimate, and no evidence
        assert re.search(rf"static:{tier} \S+ \S+ % cannot be known from this log where chance", said), said
    assert re.search(r"the canary's candidate, static", said), said
