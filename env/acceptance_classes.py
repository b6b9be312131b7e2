"""The named classes of requests: published acceptance where there is some, labelled assumptions elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AcceptanceClass:
    """How drafts of one class of requests are accepted.

    Attributes:
        name: the class.
        survival: P(drafts 1..i all accepted), i = 1.., over all requests of the class with warm drafts
            and short contexts. Not increasing. Beyond its end the last conditional probability is held.
        source_url: where ``survival`` was published; None: an assumption.
        assumed_range: for an assumption, the range of its first entry that we think possible.
        spread: standard deviation of the logarithm of a request's hazard (see `acceptance`). Assumed for
        all.
        between_requests: share of that variance that stays with a request; the rest moves along its text.
        Assumed.
        block_correlation: correlation of the moving part from one block of text to the next. Assumed.
        context_hazard: growth of the log hazard per 1,000 tokens of context. Assumed; 0 = none.

    """

    name: str
    survival: tuple[float, ...]
    source_url: str | None = None
    assumed_range: tuple[float, float] | None = None
    spread: float = 0.4
    between_requests: float = 0.6
    block_correlation: float = 0.8
    context_hazard: float = 0.0

    def hazard(self, positions: int) -> NDArray[np.float64]:
        """``-log survival`` at positions 1..``positions``, shape (positions,); inf where survival is 0."""
        with np.errstate(divide="ignore"):
            known = -np.log(np.array(self.survival[:positions], float))
        last = known[-1] - (known[-2] if len(known) > 1 else 0.0) if np.isfinite(known[-1]) else np.inf
        beyond = np.arange(1, positions - len(known) + 1)
        return np.concatenate([known, known[-1] + last * beyond])


def assumed(
    name: str,
    conditional: float,
    low: float,
    high: float,
    *,
    context_hazard: float = 0.0,
    spread: float = 0.4,
) -> AcceptanceClass:
    """A class without a source: ``conditional`` at every position, thought possible from low to high."""
    return AcceptanceClass(
        name, (conditional,), None, (low, high), context_hazard=context_hazard, spread=spread
    )


# Published figures are MTP and DSpark drafts; no EAGLE draft, code or creative text is among them.
CHAT = AcceptanceClass(
    "chat",
    (0.844, 0.599, 0.385, 0.271),
    "https://github.com/eugr/spark-vllm-docker/issues/343",  # gemma4-26b-a4b, MTP, K=4, chat, DGX Spark
)
MATHS = AcceptanceClass(
    "maths",
    (0.7568, 0.6011, 0.4976, 0.4113, 0.3538, 0.298, 0.2608, 0.2229),
    "https://github.com/vllm-project/vllm/pull/48892",  # multi-layer MTP, K=8, GSM8K, temperature 0
)
AGENTIC = AcceptanceClass(
    "agentic",
    (0.957, 0.876, 0.751),
    "https://github.com/noonghunna/club-3090/issues/347",  # Qwen3.6-27B-FP8, MTP, K=3, agentic
)
# fmt: off
MIXED = AcceptanceClass(
    "mixed",
    (
        0.7123, 0.517, 0.3904, 0.3051, 0.2437, 0.2, 0.1685, 0.1441,
        0.1246, 0.1094, 0.0964, 0.0856, 0.0758, 0.0667, 0.0582, 0.0498,
    ),
    "https://github.com/vllm-project/vllm/pull/52992",  # GLM-5.2-NVFP4, DSpark, K=16 static, SPEED-Bench, T=1
)
# fmt: on

# Assumptions: no published per-position figure was found for these.
CODE = assumed("code", 0.86, 0.75, 0.93)
REASONING = assumed("reasoning", 0.75, 0.65, 0.85)
CREATIVE = assumed("creative", 0.55, 0.40, 0.70)
LONG_CONTEXT = assumed("long_context", 0.72, 0.55, 0.80, context_hazard=0.06)
POOR_DRAFTER = assumed("poor_drafter", 0.35, 0.20, 0.50)
USELESS_DRAFTER = assumed("useless_drafter", 0.03, 0.0, 0.10, spread=0.1)

CLASSES = {
    c.name: c
    for c in (
        CODE, CHAT, MATHS, AGENTIC, MIXED, REASONING, CREATIVE, LONG_CONTEXT, POOR_DRAFTER, USELESS_DRAFTER,
    )
}  # fmt: skip
"""Every named class, by name."""
