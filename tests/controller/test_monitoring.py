"""The Grafana dashboard and the alert rules: whole, and only of metrics and labels that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]

TARGET_LABELS = frozenset({"instance", "job"})
"""What Prometheus adds to every series that it scrapes."""
OF_OTHERS = {
    "up": frozenset[str](),
    "process_cpu_seconds_total": frozenset[str](),
    "process_resident_memory_bytes": frozenset[str](),
    "process_start_time_seconds": frozenset[str](),
}
"""Prometheus' own and its client library's."""
SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}


@pytest.fixture(scope="session")
def labels_by_series(documented_metrics: Any) -> dict[str, frozenset[str]]:
    """The labels of every series that Prometheus will know, by its name."""
    known = dict(OF_OTHERS)
    for name, row in documented_metrics.items():
        for suffix in SUFFIXES[row.kind]:
            known[name + suffix] = row.labels | ({"le"} if suffix == "_bucket" else frozenset())
    return {name: labels | TARGET_LABELS for name, labels in known.items()}


def panels() -> list[dict[str, Any]]:
    return list(DASHBOARD["panels"])


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression, with where it stands."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for page in ("metrics.md", "operations.md"):
        for query in re.findall(r"`([^`\n]*specgov_\w+[{\[][^`\n]*)`", (FOLDER.parent / page).read_text()):
            yield page, query


def series_in(expression: str) -> list[tuple[str, frozenset[str]]]:
    """Each series that an expression names, with the labels that its matchers name."""
    found = re.findall(r"\b((?:specgov|process)_\w+|up)\b(?:\{([^}]*)\})?", expression)
    return [(name, frozenset(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))) for name, matchers in found]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_name_what_there_is(
    where: str, expression: str, labels_by_series: dict[str, frozenset[str]]
) -> None:
    series = series_in(expression)
    assert series, f"{where}: no metric in {expression}"
    for name, matched in series:
        assert name in labels_by_series, f"{where}: there is no {name}"
        assert matched <= labels_by_series[name], f"{where}: {name} has no {matched - labels_by_series[name]}"
    grouped = {
        label.strip()
        for labels in re.findall(r"\b(?:by|on|without|group_left)\s*\(([^)]*)\)", expression)
        for label in labels.split(",")
    }
    if wanted := re.search(r"^label_values\(.*,\s*(\w+)\)$", expression):
        grouped.add(wanted[1])
    of_all = frozenset.union(*(labels_by_series[name] for name, _ in series))
    assert grouped <= of_all, f"{where}: nothing has {grouped - of_all}"


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ('rate(specgov_a_total{engine=~"$e", tier!="0"}[5m])', [("specgov_a_total", {"engine", "tier"})]),
        ("up == 0 and specgov_b", [("up", set()), ("specgov_b", set())]),
        ("sum(group_up)", []),
    ],
)
def test_series_in(expression: str, named: list[tuple[str, set[str]]]) -> None:
    assert series_in(expression) == [(name, frozenset(labels)) for name, labels in named]


def test_every_metric_of_an_engine_that_can_alarm_is_on_the_dashboard() -> None:
    shown = {
        name
        for panel in panels()
        for target in panel.get("targets", ())
        for name, _ in series_in(target["expr"])
    }
    alarming = {name for rule in RULES for name, _ in series_in(rule["expr"])} - {"up"}
    # What alarms by itself, and modes and times that qualify another alarm.
    of_alarms_alone = {
        "process_start_time_seconds",
        "specgov_engine_policy_failed",
        "specgov_engine_mode",
        "specgov_engine_connected",
        "specgov_last_report_timestamp_seconds",
        "specgov_guard_alarms_total",
        "specgov_decision_lag_steps_sum",
        "specgov_decision_lag_steps_count",
    }
    assert alarming - of_alarms_alone <= shown


# The dashboard, as Grafana wants it.


def test_the_dashboard_has_what_an_import_needs() -> None:
    assert DASHBOARD["id"] is None, "an id of another Grafana's keeps the import from making a new one"
    assert DASHBOARD["uid"] == "specgov"
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 38
    numbers = [panel["id"] for panel in panels()]
    assert len(set(numbers)) == len(numbers)
    assert {panel["type"] for panel in panels()} <= {
        "row",
        *(needed["id"] for needed in DASHBOARD["__requires"] if needed["type"] == "panel"),
    }


def test_the_data_source_is_the_importers_choice() -> None:
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r'"type": "prometheus", "uid": "([^"]*)"', text)) == {"${datasource}"}
    assert text.count('"datasource": {') == text.count('"uid": "${datasource}"')
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "instance", "engine"]
    used = set(re.findall(r"\$\{?(\w+)\}?", text)) - {"__rate_interval", "__all"}
    assert used == set(names)


def test_panels_lie_side_by_side() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_panels_explain_themselves() -> None:
    for panel in panels():
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs, panel["title"]
            assert len(set(refs)) == len(refs), panel["title"]


@pytest.mark.parametrize(
    "panel", [panel for panel in panels() if panel["type"] == "timeseries"], ids=lambda p: p["title"]
)
def test_legends_name_labels_that_are_left(
    panel: dict[str, Any], labels_by_series: dict[str, frozenset[str]]
) -> None:
    for target in panel["targets"]:
        left = re.search(r"sum by \(([^)]*)\)", target["expr"])
        (name, _), *_ = series_in(target["expr"])
        labels = {label.strip() for label in left[1].split(",")} if left else labels_by_series[name]
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]


# The rules.


def test_rules_say_how_bad_and_what() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]


def test_every_rule_has_a_case_that_fires_it_and_one_that_does_not() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fired == quiet == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("what", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_agrees(what: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *what], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
