"""From a training run to a bundle: the best policy, with its scores by scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specgov.env.domains import domain_of
from specgov.env.validation import EvaluationSplit
from specgov.policies.bundle import Bundle, Card, load_bundle, save_bundle
from specgov.policies.network import following_the_model

_SEED = 11
_ENVS = 8


def export_run(
    run: Path,
    output: Path,
    scenarios: Sequence[str],
    steps: int = 300,
    advance: Callable[[], None] = lambda: None,
) -> Card:
    """Write the run's best policy to ``output``; ``advance`` is called after every scenario.

    Raises:
        BundleError: the run has no policy yet, or ``output`` could not be read back.
        ScenarioError: there is no such scenario.

    """
    best = load_bundle(run / "best")
    follow = following_the_model(best.card.hidden)
    scores = {}
    for name in scenarios:
        split = EvaluationSplit([domain_of(name)], _ENVS, _SEED, steps, "rate")
        shares = [100 * float(np.exp(split.scores(n.best)[0])) for n in (best.network, follow)]
        scores[name] = dict(zip(("share_of_best_rate", "following_the_model"), shares, strict=True))
        advance()
    save_bundle(Bundle(replace(best.card, name=output.name, scores=scores), best.network), output)
    return load_bundle(output).card
