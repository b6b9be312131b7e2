"""``specgov report``: a page from a log that the sidecar's own writer wrote."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgov.controller.config import DecisionLogConfig
from specgov.controller.decision_log import DecisionLog
from specgov.controller.step_record import StepRecord
from specgov.policies.types import StepObservation
from specgov.proto.v1 import specgov_pb2 as pb

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects the page's text and elements, and checks that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def write_log(
    path: Path, engines: tuple[str, ...] = ("a",), steps: int = 300, estimated: int = 300, **info: Any
) -> Path:
    """Each engine's steps at batch size 8, ten a second, tier 3 and 0 in turns of 50.

    The first ``estimated`` have the policy's estimates.
    """
    now_s = [1_700_000_000.0]
    log = DecisionLog(path, DecisionLogConfig(), wall_clock=lambda: now_s[0])
    rng = np.random.default_rng(0)
    for name in engines:
        log.stream(pb.EngineInfo(engine_id=name, tiers=[0, 3], **info), "greedy")
    for step_id in range(1, steps + 1):
        now_s[0] += 0.1
        tier = 3 if step_id // 50 % 2 == 0 else 0
        decision = pb.Decision(decision_id=step_id, num_steps=tier, reason=pb.REASON_POLICY, policy="greedy")
        decision.propensity = 1.0
        for k, tokens, ms in ((0, 8.0, 5.0), (3, 16.0, 7.0)) if step_id <= estimated else ():
            decision.estimates.add(num_steps=k, expected_tokens=tokens, expected_ms=ms)
        if step_id == 200:
            decision.guard_cause, decision.reason = pb.GUARD_CAUSE_BUDGET, pb.REASON_GUARD
        for name in engines:
            step = StepObservation(
                step_id=step_id,
                batch_size=8,
                num_steps=tier,
                accepted=rng.integers(0, tier + 1, 8).astype(np.uint8),
                slots=np.zeros(0, np.uint16),
                generations=np.zeros(0, np.uint8),
                sum_seq_len_tokens=4096,
                max_seq_len_tokens=512,
                step_ms=5.0 + tier,
            )
            log.steps(name, [StepRecord(step, step_id - 1, 1, None, 0)], decision, pb.MODE_ACTIVE)
    log.flush(final=True)
    return path


@pytest.fixture
def made(run: Callable[..., Any], tmp_path: Path) -> Callable[..., Page]:
    def make(*arguments: str) -> Page:
        ran = run("report", *arguments, "-o", str(tmp_path / "page.html"))
        assert (ran.code, ran.err) == (0, "")
        assert "page.html" in ran.out
        return Page((tmp_path / "page.html").read_text(encoding="utf-8"))

    return make


@pytest.mark.parametrize("name", ["log.jsonl", "log.parquet"])
def test_one_page_that_needs_nothing_else(made: Callable[..., Page], tmp_path: Path, name: str) -> None:
    page = made(str(write_log(tmp_path / name, model="llama<3>")))
    assert "script" not in page.tags
    assert [link for link in page.links if not link.startswith("#")] == []
    assert "http" not in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.tags.count("svg") == 12  # six plots, each for a desk and for a phone
    assert "llama<3>" in page.text  # escaped in the source, since the parser gives it back
    assert "14 Nov 2023 22:13:20" in page.text  # 1,700,000,000 s after 1970, and 0.1 s
    assert "budget" in page.text
    for rule in ("static:0", "static:3", "threshold:16:3", "best tier at each step"):
        assert rule in page.text
    assert "none of this can be known from this log" in page.text


def test_each_engine_has_a_section_and_one_may_be_picked(made: Callable[..., Page], tmp_path: Path) -> None:
    path = str(write_log(tmp_path / "log.jsonl", ("a", "b")))
    both = made(path)
    assert both.links == ["#engine-1", "#engine-2"]
    assert both.tags.count("section") == 2
    assert made(path, "--engine", "b").tags.count("section") == 1


@pytest.mark.parametrize(("estimated", "says"), [(300, False), (240, True)])
def test_estimates_of_a_part_of_the_log_say_so(
    made: Callable[..., Page], tmp_path: Path, estimated: int, says: bool
) -> None:
    """240 of 300 steps are 80 %."""
    page = made(str(write_log(tmp_path / "log.jsonl", estimated=estimated)))
    assert ("They exist for 80 % of the steps and speak of those alone" in page.text) == says


def test_what_an_engine_calls_itself_is_text(made: Callable[..., Page], tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x>"
    page = made(str(write_log(tmp_path / "log.jsonl", (hostile,), gpu=hostile, model="</style>")))
    assert not {"script", "img"} & set(page.tags)
    assert page.tags.count("style") == 1
    assert hostile in page.text


def test_the_same_log_gives_the_same_page(made: Callable[..., Page], tmp_path: Path) -> None:
    path = str(write_log(tmp_path / "log.jsonl"))
    texts = []
    for _ in range(2):
        made(path)
        texts.append((tmp_path / "page.html").read_bytes())
    assert texts[0] == texts[1]


def test_an_empty_log_and_a_single_step(
    run: Callable[..., Any], made: Callable[..., Page], tmp_path: Path
) -> None:
    made(str(write_log(tmp_path / "one.jsonl", steps=1)))
    path = write_log(tmp_path / "none.jsonl", steps=0)
    ran = run("report", str(path), "-o", str(tmp_path / "none.html"))
    assert (ran.code, ran.err) == (1, "specgov: report: the log holds no steps\n")
    assert not (tmp_path / "none.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "name at least one decision log"),
        (("missing.jsonl",), 1, "missing.jsonl: No such file or directory"),
        (("log.jsonl", "--engine", "c"), 1, "no steps of 'c'; there are a"),
        (("log.jsonl", "-o", "no/such/page.html"), 2, "there is no folder no/such"),
        (("log.jsonl", "--profile", "nonsense"), 1, "nonsense"),
        (("notes.jsonl",), 1, "notes.jsonl, line 1: not a decision log"),
    ],
)
def test_mistakes_are_one_line(
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(Path("log.jsonl"), steps=3)
    Path("notes.jsonl").write_text("{}\n", encoding="utf-8")
    ran = run("report", *arguments)
    assert ran.code == code
    assert said in ran.err
    assert ran.err.count("\n") == 1
