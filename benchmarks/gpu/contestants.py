"""Who is compared: by name, what decides the tier, and what it starts from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NO_PROFILE = "none"
"""What a rule starts from where no such server was ever measured, as by default."""


class ContestantError(ValueError):
    """A contestant cannot take part; the message says what it lacks."""


@dataclass(frozen=True)
class Contestant:
    """``rule``: what decides, see the plugin's ``rules.py``. With ``specgov`` there is a sidecar with
    ``policy`` and the step-time profile ``profile`` ("own": that of this server).
    """

    name: str
    rule: str
    policy: str = ""
    profile: str = ""


_BY_NAME = {
    c.name: c
    for c in (
        Contestant("specgov-greedy", "specgov", "greedy", "own"),
        Contestant("sglang-adaptive-default", "sglang:default"),
        Contestant("threshold-tuned", "TUNED"),
        Contestant("oracle", "oracle:PROFILE"),
        Contestant("static-3", "static:3"),
        Contestant("sglang-adaptive-all-tiers", "sglang:server"),
        Contestant("specgov-thompson", "specgov", "thompson", "own"),
        Contestant("schedule-tuned", "TUNED"),
        Contestant("specgov-greedy-cold", "specgov", "greedy", NO_PROFILE),
        Contestant("sglang-adaptive-tuned", "sglang:TUNED"),
        Contestant("specgov-ppo", "specgov", "ppo", "own"),
        Contestant("static-1", "static:1"),
        Contestant("static-5", "static:5"),
        Contestant("static-7", "static:7"),
        Contestant("static-0", "static:0"),
        Contestant("specgov-thompson-cold", "specgov", "thompson", NO_PROFILE),
        Contestant("static-2", "static:2"),
        Contestant("specgov-static-3", "specgov", "static:3", NO_PROFILE),
        Contestant("specgov-random", "specgov", "random", NO_PROFILE),
    )
}
"""In the order in which they are played first and kept where time is short."""

ALL = [name for name in _BY_NAME if name not in ("static-2", "specgov-static-3", "specgov-random")]


@dataclass(frozen=True)
class Tuned:
    """What ``tune.py`` wrote: rules by load, and the profile that they were tuned with."""

    by_load: dict[str, dict[str, Any]]
    folder: Path

    @classmethod
    def read(cls, path: Path | None, folder: Path) -> Tuned:
        """From a file; without one nothing is tuned."""
        return cls(json.loads(path.read_text())["loads"] if path else {}, folder)

    def rule(self, contestant: str, load: str) -> str:
        """The rule of a tuned contestant on a load.

        Raises:
            ContestantError: nothing was tuned for it.

        """
        kind = contestant.removesuffix("-tuned")
        if kind not in self.by_load.get(load, {}):
            raise ContestantError(f"{contestant} needs to be tuned for it: see tune.py and --tuned")
        found = self.by_load[load][kind]
        if isinstance(found, str):
            return found
        path = self.folder / f"{kind}-{load}.json"
        path.write_text(json.dumps(found))
        return f"sglang:{path}"


def contestant(name: str, load: str, tuned: Tuned, profile: Path | None) -> Contestant:
    """A contestant as it plays ``load``.

    Raises:
        ContestantError: there is no such contestant, or it lacks something.

    """
    if name not in _BY_NAME:
        raise ContestantError(f"no contestant {name!r}; there are {', '.join(_BY_NAME)}")
    found = _BY_NAME[name]
    rule, own = found.rule, found.profile
    if rule.endswith("TUNED"):
        rule = tuned.rule(name, load)
    if (rule.endswith(":PROFILE") or own == "own") and profile is None:
        raise ContestantError(f"{name} needs this server's profile: see --profile")
    rule = rule.replace(":PROFILE", f":{profile}")
    return Contestant(name, rule, found.policy, str(profile) if own == "own" else own)
