"""reality.py   What the simulator says of a contest that was played on a real server.

    python benchmarks/gpu/reality.py governed.json plain.json --profile mine.json --tuned tuned.json -o o.json

plays every load and contestant of the contests' runs in the simulator, on the same requests with the same
texts and the step times of the profile, and writes both side by side. The real runs' medians over repeats
stand against the simulator's over the same seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from contestants import NO_PROFILE, Tuned  # noqa: E402
from loads import FILE, Load, get_load  # noqa: E402

from specgov.env.emulated import EngineStep, run_in_process  # noqa: E402
from specgov.env.oracle import truth_of  # noqa: E402
from specgov.env.scenario import Scenario  # noqa: E402
from specgov.policies.oracle import Oracle  # noqa: E402
from specgov.policies.profile import Profile, load_profile  # noqa: E402
from specgov.policies.registry import make_policy  # noqa: E402
from specgov.policies.step_time.noise import PrefillCost  # noqa: E402
from specgov.policies.types import Policy, PolicyContext  # noqa: E402

SGLANG_DEFAULT = {
    "1": {"candidate_steps": [1, 3, 7], "down_hysteresis": -0.25},
    "8": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
    "32": {"candidate_steps": [0, 1], "down_hysteresis": 0.0},
    "64": {"candidate_steps": [0], "down_hysteresis": 0.0},
}
"""DEFAULT_ADAPTIVE_CONFIG of sglang/srt/speculative/adaptive_spec_params.py in 0.5.17."""


def simulated(load: Load, entry: dict[str, Any], profile: Profile, tuned: Tuned) -> dict[str, Any]:
    """The run of ``entry`` (a contest's) in the simulator: output rate and share of decode time by tier."""
    scenario = load.on(profile).scenario
    if entry["contestant"] == "no-speculation":
        if profile.no_spec_grid is None:
            raise SystemExit(
                f"{profile.name} has no server without speculation: give calibrate its recording"
            )
        scenario = load.on(dataclasses.replace(profile, grid=profile.no_spec_grid)).scenario
    if not entry[
        "profile"
    ]:  # decided in the engine: no way to a sidecar, and for a rule by batch size no lag
        lag = 2 if entry["rule"].startswith("sglang:") else 1
        engine = scenario.table.engine.model_copy(
            update={"decision_lag_steps": lag, "transport_lag_steps": 0}
        )
        scenario = dataclasses.replace(scenario, table=scenario.table.model_copy(update={"engine": engine}))
    server = scenario.build(1, entry["seed"])
    policy = _policy(entry, scenario, server, profile, tuned)
    steps: list[EngineStep] = []
    for step in run_in_process(policy, server):
        if step.result.time_ns[0] * 1e-9 >= load.duration_s:
            break
        steps.append(step)
    counted = [s for s in steps if s.result.time_ns[0] * 1e-9 >= load.count_from_s]
    tokens = sum(int(s.result.output_tokens[0]) for s in counted)
    spent: dict[int, float] = defaultdict(float)
    for s in counted:
        spent[s.observation.num_steps] += float(s.result.step_ms[0])
    total = sum(spent.values())
    return {
        "output_tokens_per_s": tokens / (load.duration_s - load.count_from_s),
        "tier_time_shares": {str(tier): round(ms / total, 4) for tier, ms in sorted(spent.items())},
    }


def _policy(entry: dict[str, Any], scenario: Scenario, server: Any, profile: Profile, tuned: Tuned) -> Policy:
    started_with = None if entry["profile"] == NO_PROFILE else profile
    graphs = scenario.engine.graph_batch_sizes
    context = PolicyContext(
        scenario.engine,
        np.random.default_rng(entry["seed"]),
        lambda: float(server.time_ns[0]) * 1e-9,
        None if started_with is None else started_with.step_time.with_graph_batch_sizes(graphs),
    )
    rule = entry["rule"]
    if rule.startswith("oracle:"):
        return Oracle(context, truth_of(server))
    if rule == "none":
        return make_policy("static:0", context)
    if rule.startswith("sglang:"):
        kind = rule.removeprefix("sglang:")
        if kind == "default":
            config = SGLANG_DEFAULT
        elif kind == "server":
            config = {"1": {"candidate_steps": list(profile.tiers)}}
        else:
            config = tuned.by_load[entry["load"]]["sglang-adaptive"]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            return make_policy(f"ema:config={file.name}", context)
    return make_policy(rule, context)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contests", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--prefill-ms", type=float, nargs=2, metavar=("CHUNK", "TOKEN"), help="in place of the profile's"
    )
    options = parser.parse_args()
    profile = load_profile(options.profile)
    if options.prefill_ms:
        profile = dataclasses.replace(profile, prefill=PrefillCost(*options.prefill_ms))
    rows: dict[tuple[str, str], dict[str, list[Any]]] = defaultdict(lambda: {"real": [], "simulated": []})
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        tuned = Tuned.read(options.tuned, folder)
        file = Path(shutil.copy(FILE, folder))
        if options.trace:
            shutil.copy(options.trace, folder / "trace.csv")
        for entry in (run for path in options.contests for run in json.loads(path.read_text())["runs"]):
            load = get_load(entry["load"], file, entry["duration_s"], entry["at_most"])
            row = rows[entry["load"], entry["contestant"]]
            row["real"].append(entry)
            row["simulated"].append(simulated(load, entry, profile, tuned))
    table = [
        {
            "load": load,
            "contestant": who,
            "repeats": len(row["real"]),
            **{
                f"{side}_output_tokens_per_s": statistics.median(r["output_tokens_per_s"] for r in row[side])
                for side in ("real", "simulated")
            },
            **{
                f"{side}_tier_time_shares": row[side][0]["tier_time_shares"] for side in ("real", "simulated")
            },
        }
        for (load, who), row in rows.items()
    ]
    options.output.write_text(
        json.dumps(
            {
                "command": "reality",
                "profile": profile.name,
                "prefill": dataclasses.asdict(profile.prefill),
                "rows": table,
            },
            indent=1,
        )
        + "\n"
    )
    for row in table:
        real, simulation = (row[f"{side}_output_tokens_per_s"] for side in ("real", "simulated"))
        more = simulation / real - 1
        print(f"{row['load']:12} {row['contestant']:26} {real:8.0f} {simulation:8.0f} {more:+.1%}")


if __name__ == "__main__":
    main()
