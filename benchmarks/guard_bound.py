"""Whether the guard keeps its bound, and what it costs: estimated against true losses, in the simulator.

    python benchmarks/guard_bound.py -o out/guard_bound.json [--quick] [--markdown docs/guard.md]
    python benchmarks/guard_bound.py -o out/late.json --rules static:7,worst,liar --seed 1 --lag-steps 5

Every bundled scenario, hurried, is played to each rule with the guard and without, on the same requests. The
simulator knows what the tier that ran and the baseline's tier bring in the batch at hand, so that the true
loss of each step is exact. The guard's promise is about estimated losses: over any stretch of steps at most
the allowance beyond the share of the baseline's output. Here the same is counted in true losses.

Rules: good ones, which the guard should not touch; bandits that explore blindly; a fixed tier; and two that
are here to do harm. ``worst`` takes the tier that truly is the worst at every step. ``liar`` takes the
largest tier and claims that all its drafts will be accepted: what its steps are measured to bring shows that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import machine
import numpy as np

from specgov.controller.guard.config import GuardConfig
from specgov.controller.guard.guard import Guard
from specgov.controller.guard.guarded import Guarded
from specgov.env.oracle import truth_of
from specgov.env.scenario import Scenario, load_scenario, scenario_names
from specgov.env.server import Server
from specgov.env.suite import faster
from specgov.env.true_loss import TrueLoss, play_against
from specgov.policies.registry import make_policy
from specgov.policies.tiers import tier_ranges
from specgov.policies.types import BatchView, Choice, Policy, PolicyContext, StepObservation

RULES = ("greedy", "greedy@none", "thompson", "ppo", "exp3", "static:7", "worst", "liar")
"""``@none``: the rule and the guard know no step times at the start."""


@dataclass(frozen=True)
class Plan:
    """``time_scale``: how much of a scenario's time is played, its script hurried by as much.

    ``lag_steps``: the decision lag, transport included; None is each scenario's own.
    """

    time_scale: float = 0.08
    scenarios: tuple[str, ...] = tuple(scenario_names())
    seed: int = 0
    lag_steps: int | None = None


QUICK = Plan(0.03, ("poor_drafter", "saturated_batch", "quiet_chat"))


class Harmful:
    """A rule of this benchmark's own: what it shares with the other."""

    version: ClassVar[str] = "1"

    def __init__(self, context: PolicyContext, server: Server) -> None:
        self.engine = context.engine
        self.truth = truth_of(server)

    def one_tier(self, num_steps: int) -> Choice:
        return Choice(tier_ranges(self.engine, [(1, num_steps)]), propensity=1.0)

    def observe(self, step: StepObservation) -> None:
        pass

    def forget(self) -> None:
        pass

    def estimates(self) -> dict[str, float]:
        return {}


@final
class Worst(Harmful):
    name: ClassVar[str] = "worst"

    def choose(self, batch: BatchView) -> Choice:  # noqa: ARG002 the truth is of the real batch
        tokens, ms = self.truth()
        rate = np.divide(tokens, ms, out=np.zeros_like(tokens), where=ms > 0)
        return self.one_tier(self.engine.tiers[int(np.argmin(rate))])


@final
class Liar(Harmful):
    name: ClassVar[str] = "liar"

    def choose(self, batch: BatchView) -> Choice:
        tokens, ms = self.truth()
        if not ms.all():
            return self.one_tier(self.engine.tiers[-1])
        claimed = tokens.copy()
        claimed[-1] = max(batch.batch_size, 1) * (self.engine.tiers[-1] + 1)
        return dataclasses.replace(
            self.one_tier(self.engine.tiers[-1]), expected_tokens=claimed, expected_ms=ms.copy()
        )


HARMFUL: dict[str, Callable[[PolicyContext, Server], Policy]] = {"worst": Worst, "liar": Liar}


@dataclass(frozen=True)
class Row:
    """One rule in one scenario; tokens and shares are of the baseline's output, and true unless said.

    ``gain_share`` is below 0 where the rule loses. ``worst_stretch_tokens`` is what it lost beyond the loss
    share over the worst stretch. The estimates are the guard's; without it there are none.
    """

    scenario: str
    rule: str
    guard: bool
    steps: int
    output_tokens_per_s: float
    gain_share: float
    worst_stretch_tokens: float
    estimated_gain_share: float
    least_budget_tokens: float
    stepped_in: dict[str, int]
    fallbacks: dict[str, int]


def hurried(name: str, plan: Plan) -> Scenario:
    scenario = load_scenario(name)
    table = faster(scenario.table, plan.time_scale)
    if plan.lag_steps is not None:
        lag = {"decision_lag_steps": plan.lag_steps, "transport_lag_steps": 0}
        table = table.model_copy(update={"engine": table.engine.model_copy(update=lag)})
    return dataclasses.replace(scenario, table=table)


def play(scenario: Scenario, text: str, config: GuardConfig, seed: int) -> Row:
    """Play a scenario to a rule."""
    rule, _, known = text.partition("@")
    server = scenario.build(1, seed)
    context = PolicyContext(
        scenario.engine,
        np.random.default_rng(seed),
        lambda: float(server.time_ns[0]) * 1e-9,
        None if known == "none" else scenario.profile.step_time,
    )
    guard = Guard(config, "engine", context)
    policy = HARMFUL[rule](context, server) if rule in HARMFUL else make_policy(rule, context)
    watched = Watched(Guarded(policy, guard))
    loss = play_against(guard.baseline, watched, server, scenario.duration_s)
    return row(scenario.name, text, guard, watched, loss)


class Watched(Harmful):
    """A guarded rule, and the least that its budget ever was."""

    def __init__(self, guarded: Guarded) -> None:
        self.guarded = guarded
        self.least_budget_tokens = guarded.guard.budget_tokens

    def observe(self, step: StepObservation) -> None:
        self.guarded.observe(step)
        self.least_budget_tokens = min(self.least_budget_tokens, self.guarded.guard.budget_tokens)

    def choose(self, batch: BatchView) -> Choice:
        return self.guarded.choose(batch)


def row(scenario: str, rule: str, guard: Guard, watched: Watched, loss: TrueLoss) -> Row:
    state = guard.state()
    estimated = state.estimated_gain_tokens / max(state.estimated_baseline_tokens, 1.0)
    return Row(
        scenario,
        rule,
        guard.config.enabled,
        len(loss.loss_tokens),
        round(loss.output_tokens / loss.decode_s, 1),
        round(-loss.share, 4),
        round(loss.worst_stretch_tokens(guard.config.loss_share), 1),
        round(estimated, 4),
        round(watched.least_budget_tokens, 1),
        {cause.word: times for cause, times in sorted(guard.interventions.items())},
        {cause.word: times for cause, times in sorted(guard.alarms.items()) if times},
    )


def markdown(rows: list[Row], facts: dict[str, Any], config: GuardConfig) -> str:
    """One line a rule, over all scenarios."""
    lines = [
        "| rule | true gain without guard | with guard | worst stretch without | with guard | "
        "decisions changed | fallbacks |",
        "|---|---|---|---|---|---|---|",
    ]
    for rule in dict.fromkeys(one.rule for one in rows):
        free = [one for one in rows if one.rule == rule and not one.guard]
        kept = [one for one in rows if one.rule == rule and one.guard]
        stretch = [max(one.worst_stretch_tokens for one in some) for some in (free, kept)]
        changed = sum(sum(one.stepped_in.values()) for one in kept) / sum(one.steps for one in kept)
        fallbacks = sum(sum(one.fallbacks.values()) for one in kept)
        lines.append(
            f"| `{rule}` | {_range(free)} | {_range(kept)} | {stretch[0]:.0f} | {stretch[1]:.0f} | "
            f"{100 * changed:.2f} % | {fallbacks} |"
        )
    kept = [one for one in rows if one.guard]
    over = [one for one in kept if one.worst_stretch_tokens > config.allowance_tokens]
    names = ", ".join(f"`{one.rule}` in `{one.scenario}` ({one.worst_stretch_tokens:.0f})" for one in over)
    overdrawn = [-one.least_budget_tokens for one in kept if one.least_budget_tokens < 0]
    share = f"{100 * config.loss_share:g} %"
    lines += [
        "",
        "Gains over the baseline: median over the scenarios (lowest to highest). Worst stretch: tokens truly",
        f"lost beyond {share} of the baseline's output, over the worst stretch of any scenario; the bound",
        f"is the allowance, {config.allowance_tokens:g}. The true loss went beyond it in {len(over)} of "
        f"{len(kept)} runs{f': {names}' if over else ''}.",
        f"By its own figures the guard overdrew it in {len(overdrawn)}"
        f"{f', by at most {max(overdrawn):.0f} tokens' if overdrawn else ''}.",
        "",
        machine.describe(facts),
        "",
    ]
    return "\n".join(lines)


def _range(rows: list[Row]) -> str:
    gains = [100 * one.gain_share for one in rows]
    return f"{np.median(gains):+.1f} % ({min(gains):+.1f} to {max(gains):+.1f})"


def main() -> None:
    """Play and write."""
    parser = argparse.ArgumentParser(description="The guard's bound on losses against the truth.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--rules", default=",".join(RULES), help="rules, separated by commas")
    parser.add_argument("--markdown", type=Path, help="page whose table is replaced")
    parser.add_argument("--quick", action="store_true", help="three scenarios, shorter")
    parser.add_argument("--seed", type=int, default=0, help="of requests and rules")
    parser.add_argument("--lag-steps", type=int, help="decision lag; default: each scenario's own")
    arguments = parser.parse_args()
    facts, plan = machine.facts(("numpy",)), QUICK if arguments.quick else Plan()
    plan = dataclasses.replace(plan, seed=arguments.seed, lag_steps=arguments.lag_steps)
    rows: list[Row] = []
    for name in plan.scenarios:
        scenario = hurried(name, plan)
        for rule in arguments.rules.split(","):
            for enabled in (False, True):
                rows.append(one := play(scenario, rule, GuardConfig(enabled=enabled), plan.seed))
                print(
                    f"{one.scenario:30} {one.rule:12} guard {'on ' if enabled else 'off'} {one.steps:6} "
                    f"steps {100 * one.gain_share:+7.2f} %, worst stretch {one.worst_stretch_tokens:8.0f}, "
                    f"least budget {one.least_budget_tokens:7.0f}, {one.stepped_in} {one.fallbacks}",
                    flush=True,
                )
    config = GuardConfig()
    document = {
        "machine": facts,
        "plan": dataclasses.asdict(plan),
        "guard": config.model_dump(),
        "rows": [dataclasses.asdict(one) for one in rows],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = markdown(rows, facts, config)
    print(table)
    if arguments.markdown:
        write_markdown(arguments.markdown, table)


def write_markdown(page: Path, table: str) -> None:
    """Put the table between the page's two marks."""
    text = page.read_text(encoding="utf-8")
    begin, end = "<!-- guard_bound -->\n", "<!-- /guard_bound -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page}: has no {begin.strip()} ... {end} to write into")
    page.write_text(before + begin + table + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
