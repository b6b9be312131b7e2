"""tune.py   The peers at their best on each load, in hindsight: tuned in the simulator on the load itself.

    python benchmarks/gpu/tune.py --profile mine.json --loads ramp,steady_64 -o tuned.json

With the step times of this very server (specgov sglang profile, specgov calibrate) and the same requests.
Writes for each load the threshold, the batch -> num_steps schedule and the configuration of SGLang's adaptive
policy with the largest output rate that ``specgov tune`` finds.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from loads import FILE, Load, get_load, needs_trace  # noqa: E402

from specgov.env.tuning import Tuner  # noqa: E402
from specgov.policies.profile import Profile, load_profile  # noqa: E402

KINDS = ("threshold", "schedule", "sglang-adaptive")


def tuned(load: Load, profile: Profile, seed: int, kinds: list[str]) -> dict[str, Any]:
    """The best of each kind on a load, and the output rate that the simulator gives it."""
    scenario = load.on(profile).scenario
    tuner = Tuner([scenario], seed)
    search = {"threshold": tuner.threshold, "schedule": tuner.schedule, "sglang-adaptive": tuner.ema}
    found: dict[str, Any] = {"plays": 0}
    for kind in kinds:
        began_s = time.monotonic()
        best = search[kind]()
        found[kind] = best.parameters
        found["plays"] += best.plays
        print(
            f"{load.name}: {kind} {best.parameters}, {math.exp(best.score):.1f} tokens a request-second, "
            f"{best.plays} plays, {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--profile", required=True, help="a name or a file")
    parser.add_argument("--loads", default="ramp")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--trace", type=Path, help="for the open loops")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    profile = load_profile(options.profile)
    document: dict[str, Any] = {
        "command": "tune",
        "profile": profile.name,
        "profile_hash": profile.hash,
        "seed": options.seed,
        "loads": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = FILE
        if options.trace:
            file = Path(shutil.copy(FILE, folder))
            shutil.copy(options.trace, Path(folder) / "trace.csv")
        for name in options.loads.split(","):
            load = get_load(name, file)
            if needs_trace(load) and not options.trace:
                raise SystemExit(f"{name} needs --trace")
            document["loads"][name] = tuned(load, profile, options.seed, options.kinds.split(","))
            options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
