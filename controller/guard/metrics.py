"""The guard's metrics, read when the endpoint is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from specgov.controller.guard.causes import GuardCause
from specgov.controller.guard.guard import Guard


def guard_families(guards: Mapping[str, Guard]) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """What the guards did and hold, by engine; every cause has its series from the start."""
    interventions = CounterMetricFamily(
        "specgov_guard_interventions",
        "Decisions that were not the policy's own, by cause",
        labels=["engine", "cause"],
    )
    alarms = CounterMetricFamily(
        "specgov_guard_alarms",
        "Times that a signal was broken or the output rate fell short, so that the policy was not asked",
        labels=["engine", "cause"],
    )
    standing = GaugeMetricFamily(
        "specgov_guard_standing",
        "1 for the cause for which the policy is not asked now",
        labels=["engine", "cause"],
    )
    budget = GaugeMetricFamily(
        "specgov_guard_budget_tokens",
        "Estimated output tokens that may still be lost against the baseline",
        labels=["engine"],
    )
    for name, guard in guards.items():
        times, now = guard.alarms, guard.standing
        for cause in GuardCause:
            if cause:
                interventions.add_metric([name, cause.word], guard.interventions[cause])
            if cause.is_alarm or cause is GuardCause.OUTPUT_RATE:
                alarms.add_metric([name, cause.word], times[cause])
            if cause.stands:
                standing.add_metric([name, cause.word], cause is now)
        budget.add_metric([name], guard.budget_tokens)
    yield from (interventions, alarms, standing, budget)
