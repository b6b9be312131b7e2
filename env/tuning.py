"""The best parameters that the simulator finds for rules that cannot learn them: peers in their best form.

Every candidate is played on the same requests (`parallel_play`), those of a round at once in one vectorised
server, so that comparisons are exact. The search is deterministic: all of a grid for the threshold; for the
others, coordinate after coordinate (the tier of an octave of batch sizes, the tiers of a slot, an option) the
best value is taken, until a sweep changes nothing. The spaces are small and discrete and the comparisons
carry no noise, which leaves a general optimiser little to add.

A candidate's score is the mean over scenarios of ``log(tokens per request-second)`` (`Played.score`). Tuned
on one scenario it is the rule in hindsight, on several the rule of a training split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from specgov.env.parallel_play import Played, play_policies, play_tables, tier_table
from specgov.env.scenario import Scenario
from specgov.policies.ema import Ema
from specgov.policies.ema_config import EmaConfig
from specgov.policies.registry import make_policy
from specgov.policies.types import BatchView, EngineSpec, Policy, PolicyContext

Floats = NDArray[np.float64]
T = TypeVar("T")

Document: TypeAlias = dict[str, Any]
"""A configuration of SGLang's adaptive rule, as its JSON file holds it."""

LEAST_GAIN = 1e-4
"""A smaller gain in score changes nothing."""
MOST_SWEEPS = 4
LEAST_SHARE = 0.005
"""An octave of batch sizes that sees less of the time takes its neighbour's tier."""

_EMA_OPTIONS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("ema_alpha", (0.05, 0.2)),
    ("update_interval", (5, 20)),
    ("up_hysteresis", (-0.25, 0.0, 0.25)),
    ("down_hysteresis", (-0.5, -0.25, 0.0, 0.25)),
)


class TuningError(ValueError):
    """Nothing can be tuned on this; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Tuned(Generic[T]):
    """The best parameters, their score, and how many candidates were played."""

    parameters: T
    score: float
    plays: int


@dataclass(frozen=True)
class Tuner:
    """What parameters are tuned on.

    Attributes:
        scenarios: one for hindsight, several for a training split; all of the same tiers.
        seed: of the requests.
        duration_s: simulated time of a play; None is each scenario's.
        advance: called with the number of candidates played since.

    Raises:
        TuningError: no scenario, or engines of different tiers.

    """

    scenarios: Sequence[Scenario]
    seed: int = 0
    duration_s: float | None = None
    advance: Callable[[int], None] = field(default=lambda _: None)

    def __post_init__(self) -> None:
        if not self.scenarios:
            raise TuningError("there is no scenario to tune on: name at least one")
        if len({scenario.engine.tiers for scenario in self.scenarios}) > 1:
            raise TuningError("the scenarios' engines have different tiers: tune them one by one")

    @property
    def engine(self) -> EngineSpec:
        """The engine with the largest batch."""
        return max((s.engine for s in self.scenarios), key=lambda engine: engine.largest_batch_size)

    def threshold(self) -> Tuned[str]:
        """The best ``threshold:B:K``, of all tiers K and batch sizes B in half octaves.

        Raises:
            TuningError: the engine has no tier 0.

        """
        tiers = self.engine.tiers
        if tiers[0] != 0:
            raise TuningError(f"a threshold needs tier 0, and the engine's tiers are {tiers}")
        sizes = [size for size in _half_octaves(self.engine) if size > 1]
        rules = ["threshold:1", *(f"threshold:{size}:{tier}" for tier in tiers[1:] for size in sizes)]
        scores = self.scores(rules)
        best = int(np.argmax(scores))
        return Tuned(rules[best], float(scores[best]), len(rules))

    def schedule(self) -> Tuned[str]:
        """The best ``schedule:1=K:...``, with one tier for each octave of batch sizes."""
        rules = [_schedule(self._octaves, found) for found in self._statics_and_rates]
        scores = self.scores(rules)
        start = self._statics_and_rates[int(np.argmax(scores))]
        found = _sweep(
            Tuned(start, float(scores.max()), len(rules)),
            [_tiers_at(place, self.engine.tiers) for place in self._visited],
            lambda candidates: self.scores([_schedule(self._octaves, tiers) for tiers in candidates]),
        )
        return Tuned(_schedule(self._octaves, found.parameters), found.score, found.plays)

    def ema(self) -> Tuned[Document]:
        """The best configuration of SGLang's adaptive rule.

        A slot for every octave of batch sizes, with any run of neighbouring tiers; SGLang's options. One
        search begins with all tiers in every slot, another with the tuned schedule's tier alone in each.
        """
        tiers = self.engine.tiers
        by_octave = self.schedule()
        rule = make_policy(by_octave.parameters, self._context(self.engine)).choose(BatchView(1))
        starts: list[Document] = [
            {str(first): {"candidate_steps": list(tiers)} for first in self._octaves},
            {str(first): {"candidate_steps": [rule.num_steps_for(first)]} for first in self._octaves},
        ]
        scores = self.ema_scores(starts)
        runs = [list(tiers[i:j]) for i in range(len(tiers)) for j in range(i + 1, len(tiers) + 1)]
        slots = [{"candidate_steps": run} for run in runs]
        coordinates = [_values_of(str(self._octaves[place]), slots) for place in self._visited]
        coordinates += [_values_of(name, values) for name, values in _EMA_OPTIONS]
        found = [
            _sweep(Tuned(start, float(score), 1), coordinates, self.ema_scores)
            for start, score in zip(starts, scores, strict=True)
        ]
        best = max(found, key=lambda tuned: tuned.score)
        return Tuned(best.parameters, best.score, by_octave.plays + sum(tuned.plays for tuned in found))

    def scores(self, rules: Sequence[str]) -> Floats:
        """The score of each rule whose tier depends on the batch size alone, shape (len(rules),)."""
        played = [self._play_tables(scenario, rules) for scenario in self.scenarios]
        return np.asarray(np.mean([np.log(p.score) for p in played], axis=0))

    def ema_scores(self, documents: Sequence[Document]) -> Floats:
        """The score of SGLang's adaptive rule with each configuration, shape (len(documents),)."""
        logs = []
        for scenario in self.scenarios:
            context = self._context(scenario.engine)
            rules: list[Policy] = [Ema(context, EmaConfig.from_document(d)) for d in documents]
            logs.append(np.log(play_policies(scenario, rules, self.seed, self._duration_s(scenario)).score))
            self.advance(len(documents))
        return np.asarray(np.mean(logs, axis=0))

    @cached_property
    def _octaves(self) -> list[int]:
        """First batch sizes: 1, 2, 3, 5, 9, 17, ..., so that an octave ends with a power of two."""
        largest = self.engine.largest_batch_size
        return [1, *(2**power + 1 for power in range((largest - 1).bit_length()))]

    @cached_property
    def _static_plays(self) -> tuple[Floats, Floats]:
        """Tokens and ms of every static tier by octave, scenarios weighing alike; shape (tiers, octaves)."""
        tokens, ms = 0.0, 0.0
        for scenario in self.scenarios:
            played = self._play_tables(scenario, [f"static:{tier}" for tier in self.engine.tiers])
            weight = 1.0 / played.ms_by_batch.sum()
            tokens = tokens + weight * self._by_octave(played.tokens_by_batch)
            ms = ms + weight * self._by_octave(played.ms_by_batch)
        return np.asarray(tokens), np.asarray(ms)

    @cached_property
    def _visited(self) -> list[int]:
        """The octaves in which the static tiers spent more than a trifling share of their time."""
        share = self._static_plays[1].sum(axis=0) / self._static_plays[1].sum()
        return [int(octave) for octave in np.flatnonzero(share > LEAST_SHARE)]

    @cached_property
    def _statics_and_rates(self) -> list[tuple[int, ...]]:
        """Tiers by octave: each tier throughout, and the one with the best output rate in each octave."""
        tokens, ms = self._static_plays
        rates = np.divide(tokens, ms, out=np.zeros_like(ms), where=ms > 0)
        near = np.array(self._visited)
        nearest = near[np.argmin(np.abs(near[:, None] - np.arange(len(self._octaves))), axis=0)]
        best = np.argmax(rates[:, nearest], axis=0)
        tiers = self.engine.tiers
        return [*((tier,) * len(self._octaves) for tier in tiers), tuple(tiers[index] for index in best)]

    def _by_octave(self, by_batch: Floats) -> Floats:
        edges = [0, *self._octaves[1:], self.engine.largest_batch_size + 1]
        return np.stack([by_batch[:, a:b].sum(axis=1) for a, b in pairwise(edges)], axis=1)

    def _play_tables(self, scenario: Scenario, rules: Sequence[str]) -> Played:
        context = self._context(scenario.engine)
        choices = [make_policy(rule, context).choose(BatchView(1)) for rule in rules]
        tables = np.stack([tier_table(choice, scenario.engine) for choice in choices])
        played = play_tables(scenario, tables, self.seed, self._duration_s(scenario))
        self.advance(len(rules))
        return played

    def _duration_s(self, scenario: Scenario) -> float:
        return scenario.duration_s if self.duration_s is None else self.duration_s

    @staticmethod
    def _context(engine: EngineSpec) -> PolicyContext:
        return PolicyContext(engine, np.random.default_rng(0), lambda: 0.0)


def _sweep(
    start: Tuned[T], coordinates: Sequence[Callable[[T], list[T]]], scores: Callable[[list[T]], Floats]
) -> Tuned[T]:
    """Take the best value of one coordinate after the other, until a sweep over them changes nothing.

    Args:
        start: where to begin.
        coordinates: each gives all candidates that differ in it alone.
        scores: of candidates.

    """
    best, score, plays = start.parameters, start.score, start.plays
    for _ in range(MOST_SWEEPS):
        before = score
        for coordinate in coordinates:
            candidates = coordinate(best)
            if not candidates:
                continue
            found = scores(candidates)
            plays += len(candidates)
            place = int(np.argmax(found))
            if found[place] > score + LEAST_GAIN:
                best, score = candidates[place], float(found[place])
        if score == before:
            break
    return Tuned(best, score, plays)


def _tiers_at(place: int, tiers: Sequence[int]) -> Callable[[tuple[int, ...]], list[tuple[int, ...]]]:
    def others(found: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(*found[:place], tier, *found[place + 1 :]) for tier in tiers if tier != found[place]]

    return others


def _values_of(key: str, values: Sequence[Any]) -> Callable[[Document], list[Document]]:
    def others(document: Document) -> list[Document]:
        return [{**document, key: value} for value in values if document.get(key) != value]

    return others


def _schedule(firsts: Sequence[int], tiers: Sequence[int]) -> str:
    """The rule's text; octaves that repeat the tier before them are left out."""
    changes = [
        f"{first}={tier}"
        for index, (first, tier) in enumerate(zip(firsts, tiers, strict=True))
        if index == 0 or tier != tiers[index - 1]
    ]
    return ":".join(["schedule", *changes])


def _half_octaves(engine: EngineSpec) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to the first that no batch reaches."""
    largest = engine.largest_batch_size
    sizes = {2**power for power in range(18)} | {3 * 2**power for power in range(17)}
    return [size for size in sorted(sizes) if size <= largest] + [largest + 1]
