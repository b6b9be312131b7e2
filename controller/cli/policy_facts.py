"""What ``specgov engines`` says of an engine's policy: where it came from, its trial, its canary."""

from __future__ import annotations

from specgov.proto.v1 import specgov_pb2


def policy_facts(engine: specgov_pb2.EngineState) -> list[tuple[str, object]]:
    """Names and values, for ``engines show``."""
    facts: list[tuple[str, object]] = []
    if engine.policy_text not in ("", engine.policy):
        facts.append(("  as given", engine.policy_text))
    if engine.restored_reports and not engine.previous_policy_text:  # else it was replaced since
        facts.append(("  restored", f"with what {engine.restored_reports} reports had taught it"))
    if engine.trial_steps_left:
        facts.append(("  on trial", f"for {engine.trial_steps_left} more steps"))
    if engine.previous_policy_text:
        facts.append(("  before it", f"{engine.previous_policy_text} (specgov policy rollback)"))
    if engine.rolled_back:
        facts.append(("  rolled back", engine.rolled_back))
    if engine.HasField("canary"):
        facts.append(("canary", canary_line(engine.canary)))
    return facts


def policy_lines(engine: specgov_pb2.EngineState) -> list[str]:
    """What an operator should see below the list of engines."""
    lines = []
    if engine.rolled_back:
        lines.append(f"{engine.info.engine_id}: rolled back {engine.rolled_back}")
    if engine.HasField("canary"):
        lines.append(f"{engine.info.engine_id}: canary {canary_line(engine.canary)}")
    return lines


def canary_line(canary: specgov_pb2.CanaryState) -> str:
    """A canary and what it has found."""
    share = f"{canary.policy} in {100 * canary.share:g} % of blocks of {canary.block_steps} steps"
    found = "too few blocks to compare"
    if canary.HasField("difference"):
        low, high = 100 * canary.difference_low, 100 * canary.difference_high
        found = f"{100 * canary.difference:+.2f} % output rate (95 % interval {low:+.2f} to {high:+.2f} %)"
    blocks = f"{canary.candidate_blocks} blocks against {canary.active_blocks}"
    ended = f"; ended: {canary.ended}" if canary.ended else ""
    return f"{share}: {found}, {blocks}{ended}"
