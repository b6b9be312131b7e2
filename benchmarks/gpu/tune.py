"""tune.py   The peers at their best on each load, in hindsight: tuned in the simulator on the load itself.

    python benchmarks/gpu/tune.py --profile mine.json --loads ramp,steady_64 -o tuned.json

With the step times of this very server (specgov sglang profile, specgov calibrate) and the same requests.
Writes for each load the threshold, the batch -> num_steps schedule and the configuration of SGLang's adaptive
policy with the largest output rate that ``specgov tune`` finds; adds to an output of the same profile.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from loads import FILE, Load, get_load, needs_trace  # noqa: E402

from specgov.env.tuning import Tuner  # noqa: E402
from specgov.policies.profile import Profile, load_profile  # noqa: E402

KINDS = ("threshold", "schedule", "sglang-adaptive")


def tuned(load: Load, profile: Profile, seed: int, kinds: list[str]) -> Iterator[tuple[str, Any]]:
    """The best of each kind on a load."""
    scenario = load.on(profile).scenario
    tuner = Tuner([scenario], seed)
    search = {"threshold": tuner.threshold, "schedule": tuner.schedule, "sglang-adaptive": tuner.ema}
    for kind in kinds:
        began_s = time.monotonic()
        best = search[kind]()
        print(
            f"{load.name}: {kind} {best.parameters}, {math.exp(best.score):.1f} tokens a request-second, "
            f"{best.plays} plays, {time.monotonic() - began_s:.0f} s",
            flush=True,
        )
        yield kind, best.parameters


def begun(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """What was tuned before with the same profile and seed, to be added to; else nothing yet."""
    if path.exists():
        before: dict[str, Any] = json.loads(path.read_text())
        if all(before.get(key) == value for key, value in head.items()):
            return before
    return {**head, "loads": {}}


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
    head = {"command": "tune", "profile": profile.name, "profile_hash": profile.hash, "seed": options.seed}
    document = begun(options.output, head)
    with tempfile.TemporaryDirectory() as folder:
        file = FILE
        if options.trace:
            file = Path(shutil.copy(FILE, folder))
            shutil.copy(options.trace, Path(folder) / "trace.csv")
        for name in options.loads.split(","):
            load = get_load(name, file)
            if needs_trace(load) and not options.trace:
                raise SystemExit(f"{name} needs --trace")
            for kind, found in tuned(load, profile, options.seed, options.kinds.split(",")):
                document["loads"].setdefault(name, {})[kind] = found
                options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
