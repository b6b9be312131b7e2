"""Who competes: decision rules with what they are given to know, by name.

A contender's text is ``RULE[@KNOWN]``. RULE is a rule as the registry reads it, or one that exists here only:

- ``oracle``: the rate-optimal tier by the simulator's truth, without decision lag.
- ``threshold_tuned``, ``schedule_tuned``, ``ema_tuned``: the best parameters on the training scenarios of the
  server's own profile; ``..._moved``: those that were best on another model's profile.
- ``threshold_hindsight``, ``schedule_hindsight``: the best parameters for this very condition and its first
  seed.

KNOWN says what the rule knows of step times: ``own`` (the server's profile, the default), ``none``, ``other``
(the profile of the other bundled model), ``errNN`` (its own profile, but each tier's times are off by a
random factor, lognormal with a standard deviation of NN %). ``learnt`` is ``none`` with estimates that have
converged: the rule has been through an episode of the same condition and another seed before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from specgov.env.scenario import Scenario
from specgov.policies.ema import Ema
from specgov.policies.ema_config import EmaConfig
from specgov.policies.profile import load_profile, profile_names
from specgov.policies.registry import make_policy, parse_policy
from specgov.policies.types import Policy, PolicyContext, PolicyError, StepTime

ORACLE = "oracle"
KNOWN = ("own", "none", "other", "learnt")
_TUNED_FILE = "tuned_peers.json"
_TUNABLE = ("threshold", "schedule", "ema")


class ContenderError(ValueError):
    """There is no such contender, or it cannot take part here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A rule and what it knows.

    Raises:
        ContenderError: its text names nothing.

    """

    text: str

    def __post_init__(self) -> None:
        if self.known not in KNOWN and self.cost_error is None:
            raise ContenderError(
                f"{self.text}: after @ comes one of {', '.join(KNOWN)} or errNN, not {self.known!r}"
            )
        if self.is_oracle or self.tuned_for:
            if self.known != "own":
                raise ContenderError(f"{self.text}: {self.rule} knows no profile, so nothing goes after @")
            return
        try:
            parse_policy(self.rule)
        except PolicyError as error:
            raise ContenderError(f"{self.text}: {error}") from error

    @property
    def rule(self) -> str:
        """The rule's text."""
        return self.text.partition("@")[0]

    @property
    def known(self) -> str:
        """What the rule knows of step times."""
        return self.text.partition("@")[2] or "own"

    @property
    def is_oracle(self) -> bool:
        """Whether the simulator itself decides."""
        return self.rule == ORACLE

    @property
    def has_learnt(self) -> bool:
        """Whether it comes with estimates of an episode before."""
        return self.known == "learnt"

    @property
    def cost_error(self) -> float | None:
        """Relative standard deviation of its profile's error by tier; None where it is not given one."""
        digits = self.known.removeprefix("err")
        return int(digits) / 100 if self.known.startswith("err") and digits.isdigit() else None

    @property
    def tuned_for(self) -> str:
        """``tuned``, ``moved`` or ``hindsight``; "" for a rule that is not tuned."""
        kind, _, suffix = self.rule.rpartition("_")
        found = kind in _TUNABLE and suffix in ("tuned", "moved", "hindsight")
        return suffix if found and (kind, suffix) != ("ema", "hindsight") else ""

    @property
    def tuned_kind(self) -> str:
        """``threshold``, ``schedule`` or ``ema``."""
        return self.rule.rpartition("_")[0]


@final
class PerturbedStepTime:
    """Step times that are wrong by a constant factor for each tier.

    Args:
        true: the real ones.
        factors: by num_steps, shape (largest tier + 1,).

    """

    def __init__(self, true: StepTime, factors: NDArray[np.float64]) -> None:
        self._true = true
        self._factors = factors

    def step_ms(
        self,
        batch_size: NDArray[np.int64] | int,
        num_steps: NDArray[np.int64] | int,
        sum_seq_len_tokens: NDArray[np.int64] | NDArray[np.float64] | float,
    ) -> NDArray[np.float64]:
        """See ``StepTime.step_ms``."""
        right = self._true.step_ms(batch_size, num_steps, sum_seq_len_tokens)
        return np.asarray(right * self._factors[np.asarray(num_steps)])


Hindsight = Mapping[str, str]
"""Rules tuned on the condition itself, by kind."""


def make_contender(
    contender: Contender,
    scenario: Scenario,
    seed: int,
    clock: Callable[[], float],
    hindsight: Hindsight | None = None,
) -> Policy:
    """The decision rule (not for the oracle, which is none).

    Args:
        contender: who.
        scenario: the server.
        seed: of the rule's own chance and of the error in what it is given to know.
        clock: simulated time in s.
        hindsight: rules that were tuned on the condition.

    Raises:
        ContenderError: it cannot take part here.

    """
    context = PolicyContext(
        scenario.engine, np.random.default_rng(seed), clock, known_step_time(contender, scenario, seed)
    )
    try:
        if contender.tuned_for == "hindsight":
            return make_policy((hindsight or {})[contender.tuned_kind], context)
        if contender.tuned_for:
            return _tuned(contender, scenario, context)
        return make_policy(contender.rule, context)
    except PolicyError as error:
        raise ContenderError(f"{contender.text} on {scenario.name}: {error}") from error


def known_step_time(contender: Contender, scenario: Scenario, seed: int) -> StepTime | None:
    """What the contender is told of step times."""
    if contender.known in ("none", "learnt"):
        return None
    if contender.known == "other":
        return load_profile(other_profile(scenario.profile.name)).step_time
    if contender.cost_error is None:
        return scenario.profile.step_time
    # ln(1 + x^2) is the variance of the log of a lognormal with relative standard deviation x.
    sd = np.sqrt(np.log1p(contender.cost_error**2))
    draws = np.random.default_rng([seed, 1]).normal(size=scenario.engine.tiers[-1] + 1)
    return PerturbedStepTime(scenario.profile.step_time, np.exp(sd * draws))


def other_profile(name: str) -> str:
    """The bundled profile after this one, in turn: another model's.

    Raises:
        ContenderError: the profile is none of those bundled, so that none is known to be another model's.

    """
    names = profile_names()
    if name not in names:
        raise ContenderError(f"{name} is no bundled profile, so no other model's is known: use @none")
    return names[(names.index(name) + 1) % len(names)]


def _tuned(contender: Contender, scenario: Scenario, context: PolicyContext) -> Policy:
    own = scenario.profile.name
    profile = own if contender.tuned_for == "tuned" else other_profile(own)
    parameters = tuned_parameters(profile)[contender.tuned_kind]
    if contender.tuned_kind == "ema":
        return Ema(context, EmaConfig.from_document(parameters))
    return make_policy(parameters, context)


def tuned_parameters(profile: str) -> dict[str, Any]:
    """What ``specgov tune peers`` found on the training scenarios of a profile, by kind.

    Raises:
        ContenderError: nothing was tuned for that profile.

    """
    path = files("specgov.env") / _TUNED_FILE
    if not path.is_file():
        raise ContenderError(f"{path} is not there: make it with specgov tune peers -o {path}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if profile not in found["profiles"]:
        raise ContenderError(
            f"no rule was tuned for the profile {profile}, only for {', '.join(found['profiles'])}"
        )
    parameters: dict[str, Any] = found["profiles"][profile]
    return parameters
