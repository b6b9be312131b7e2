"""What fixed rules would have given on the batches of a log.

By the model always, and labelled so. From what happened (inverse propensities, doubly robust) only where
chance decided: the log must hold the probability of the tier that ran, the rule's tier must have been
possible, and enough must be left. Otherwise it cannot be known from the log, and the reason is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specgov.controller.report.estimators import (
    Estimate,
    Outcomes,
    Predictions,
    dr_terms,
    effective_sample_size,
    estimate,
    ips_terms,
    mean_weight,
    strata_of,
    weights,
)
from specgov.controller.report.model import Model, spent_ms
from specgov.controller.report.steps import Steps

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CERTAIN = 0.999
"""A propensity from which on nothing was left to chance."""
LEAST_CHANCE = 0.2
"""Share of the usable steps at which chance must have decided."""
LEAST_EFFECTIVE = 200.0
LEAST_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Evidence:
    """What chance says of a rule: its output rate, and its gain over what ran on the same steps.

    ``doubly_robust`` is None without a model; ``share`` is that of the timed steps which could be used, and
    ``effective_steps`` what they are worth.
    """

    ips: Estimate
    doubly_robust: Estimate | None
    effective_steps: float
    share: float

    @property
    def best(self) -> Estimate:
        """Doubly robust where there is a model."""
        return self.doubly_robust or self.ips


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A rule.

    ``modelled`` is its output rate by the model, None where that does not know its tiers. Without
    ``evidence``, ``why_not`` says why there is none.
    """

    name: str
    note: str
    modelled: float | None
    evidence: Evidence | None
    why_not: str


@dataclass(frozen=True, slots=True)
class WhatIfs:
    """All rules beside what ran by the model, in tokens per second.

    ``known_share`` is that of the steps at whose tier the model says something: of them alone it speaks.
    """

    modelled: float | None
    rules: tuple[WhatIf, ...]
    known_share: float = 1.0


def what_ifs(steps: Steps, model: Model | None, rng: np.random.Generator) -> WhatIfs:
    """Static tiers, the best threshold and batch schedule in hindsight, and the model's best at each step."""
    outcomes = Outcomes(steps.num_steps, steps.propensity, steps.tokens.astype(float), steps.ms)
    targets = _statics(steps)
    modelled = None
    if model is not None:
        hindsight = _Hindsight(steps, model)
        modelled = hindsight.rate(steps.tier_index)
        targets += hindsight.threshold() + hindsight.schedule()
    rules = []
    for name, note, index in targets:
        value = None if model is None else hindsight.rate(index)
        evidence, why_not = _evidence(steps, outcomes, model, index, rng)
        rules.append(WhatIf(name, note, value, evidence, why_not))
    if model is not None:
        best = hindsight.best_rate()
        why = "the model's best tier is the model's: what happened cannot say it"
        rules.append(WhatIf(BEST_EACH_STEP, "by the model, with hindsight", best, None, why))
    return WhatIfs(modelled, tuple(rules), 1.0 if model is None else hindsight.known_share)


BEST_EACH_STEP = "best tier at each step"

Target = tuple[str, str, Ints]
"""A rule's name, a note, and the index of its tier at each step, (S,)."""


def _statics(steps: Steps) -> list[Target]:
    ones = np.ones(len(steps), dtype=np.int64)
    return [(f"static:{tier}", "", index * ones) for index, tier in enumerate(steps.tiers)]


class _Hindsight:
    """Output rates by the model, in the time that each step took: ``sum(ms_i rate_i) / sum(ms_i)``.

    So the load is held by the clock, as in ``estimators``. For rules that are functions of the batch size
    the sums over the steps of each size suffice.
    """

    def __init__(self, steps: Steps, model: Model) -> None:
        self._steps, self._rate = steps, model.rate
        spent = spent_ms(steps, model)
        ran = np.arange(len(steps)), steps.tier_index
        self._at = np.flatnonzero(np.isfinite(spent) & np.isfinite(model.rate[ran]))
        self._ms = spent[self._at]
        self.sizes, of_size = np.unique(steps.batch_size, return_inverse=True)
        self._of_size = of_size
        self._gained = np.zeros((len(self.sizes), len(steps.tiers)))
        np.add.at(self._gained, of_size[self._at], self._ms[:, None] * self._rate[self._at])

    @property
    def known_share(self) -> float:
        """The share of the steps that count here."""
        return len(self._at) / len(self._steps)

    def rate(self, index: Ints) -> float | None:
        """Tokens per second of the rule whose tiers are ``index``; None where one of them is not known."""
        return self._mean(float((self._ms * self._rate[self._at, index[self._at]]).sum()))

    def best_rate(self) -> float | None:
        """With the largest rate at each step."""
        rate = self._rate[self._at]
        return self._mean(float((self._ms * np.max(np.nan_to_num(rate), axis=1, initial=0.0)).sum()))

    def threshold(self) -> list[Target]:
        """The best of all thresholds at powers of two, if there is a tier 0 and another."""
        tiers = self._steps.tiers
        if tiers[0] != 0:
            return []
        rows = np.arange(len(self.sizes))
        limits = [2**power for power in range(1, int(self.sizes[-1]).bit_length() + 1)]
        tried = [(limit, index) for limit in limits for index in range(1, len(tiers))]
        gained = [self._gained[rows, np.where(self.sizes < limit, index, 0)].sum() for limit, index in tried]
        if not np.isfinite(gained).any():
            return []
        limit, index = tried[int(np.nanargmax(gained))]
        chosen = np.where(self._steps.batch_size < limit, index, 0).astype(np.int64)
        return [(f"threshold:{limit}:{tiers[index]}", f"the best of {len(tried)} in hindsight", chosen)]

    def schedule(self) -> list[Target]:
        """The best tier for each batch size."""
        known = np.where(np.isfinite(self._gained), self._gained, -np.inf)
        choice = np.argmax(known, axis=1)
        return [("best tier by batch size", "in hindsight", choice[self._of_size].astype(np.int64))]

    def _mean(self, gained: float) -> float | None:
        return gained / float(self._ms.sum()) if np.isfinite(gained) and len(self._ms) else None


def _evidence(
    steps: Steps, outcomes: Outcomes, model: Model | None, index: Ints, rng: np.random.Generator
) -> tuple[Evidence | None, str]:
    """What chance says of the rule whose tiers are ``index``; else why it says nothing."""
    timed = steps.timed
    known = timed & np.isfinite(steps.propensity) & (steps.propensity > 0)
    target = np.array(steps.tiers)[index]
    if not known.any():
        return None, "the log has no probabilities of the tiers that ran"
    by_chance = known & (steps.propensity < CERTAIN)
    usable = by_chance | (known & (steps.num_steps == target))
    if by_chance.sum() < max(LEAST_CHANCE * usable.sum(), 1):
        share = _percent(by_chance.sum() / timed.sum())
        return None, (
            f"chance decided {share} of the steps, and only such steps show what another tier brings; a "
            "canary makes some"
        )
    if usable.sum() < LEAST_STEPS:
        return None, f"only {usable.sum()} steps could be used"
    picked = _pick(outcomes, usable)
    weight = weights(picked, target[usable])
    if not weight.any():
        return None, "where chance decided, its tier never ran"
    balance = mean_weight(weight, rng)
    if not balance.holds(1.0):
        return None, (
            "its tiers were not all possible where chance decided: the weights' mean is "
            f"{balance.value:.2f}, not 1"
        )
    effective = effective_sample_size(weight)
    if effective < LEAST_EFFECTIVE:
        return None, f"the steps are worth {effective:.0f} of this rule's, too few"
    stratum = strata_of(steps.batch_size[usable], weight)
    by_ips = estimate(ips_terms(picked, weight), picked, stratum, rng)
    if not np.isfinite(by_ips.rate.low):
        return None, "the rule's tier ran too seldom at some of the batch sizes"
    robust = None if model is None else _robust(steps, model, picked, index, usable, rng)
    return Evidence(by_ips, robust, effective, float(usable.sum() / timed.sum())), ""


def _robust(
    steps: Steps,
    model: Model,
    picked: Outcomes,
    index: Ints,
    usable: NDArray[np.bool_],
    rng: np.random.Generator,
) -> Estimate | None:
    """None where the model knows too little of the steps."""
    at = np.flatnonzero(usable)
    ran, target = steps.tier_index[at], index[at]
    columns = (model.tokens[at, ran], model.ms[at, ran], model.tokens[at, target], model.ms[at, target])
    known = np.asarray(np.isfinite(np.stack(columns)).all(axis=0), dtype=np.bool_)
    if known.mean() < 1 - LEAST_CHANCE:
        return None
    picked = _pick(picked, known)
    weight = weights(picked, np.array(steps.tiers)[target[known]])
    terms = dr_terms(picked, weight, Predictions(*(column[known] for column in columns)))
    found = estimate(terms, picked, strata_of(steps.batch_size[at[known]], weight), rng)
    return found if np.isfinite(found.rate.low) else None


def _pick(outcomes: Outcomes, where: NDArray[np.bool_]) -> Outcomes:
    return Outcomes(
        outcomes.num_steps[where], outcomes.propensity[where], outcomes.tokens[where], outcomes.ms[where]
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.01 else "less than 1 %"
