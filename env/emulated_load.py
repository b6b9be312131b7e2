"""The load of the demonstration: from one client to many and back, while the mix of classes changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specgov.env.acceptance_classes import CHAT, CODE, CREATIVE, AcceptanceClass
from specgov.env.lengths import ClassMix, LogNormalLength, LogNormalLengths
from specgov.env.workload import ClosedLoop, RequestMix

DEMO_CLASSES: tuple[AcceptanceClass, ...] = (CODE, CHAT, CREATIVE)
"""The acceptance model's classes that `ramp_load` draws from."""


def ramp_load(duration_s: float = 45.0, peak: int = 256, low: int = 1) -> ClosedLoop:
    """Concurrency ``low`` -> ``peak`` -> ``low``; mostly code at first, mostly creative text in the end.

    A sixth of the time each at the ends and at the peak, straight lines between. Concurrency 0 is never
    reached, so the load never ends: the caller stops after ``duration_s`` of simulated time. Lengths are
    assumptions, short so that the mix of the batch follows that of the requests.
    """
    share = duration_s / 6.0
    return ClosedLoop(
        RequestMix(
            ClassMix(
                np.array([0.0, 2.0, 4.0]) * share,
                np.array([[0.8, 0.2, 0.0], [0.3, 0.4, 0.3], [0.0, 0.2, 0.8]]),
            ),
            LogNormalLengths(
                _same_for_all(LogNormalLength(384, 0.6, 16, 2048)),
                _same_for_all(LogNormalLength(160, 0.5, 16, 640)),
            ),
        ),
        start_s=[0.0, share, 2.5 * share, 3.5 * share, 5.0 * share],
        concurrency=[low, low, peak, peak, low],
        interpolate=True,
    )


def _same_for_all(length: LogNormalLength) -> Sequence[LogNormalLength]:
    return [length] * len(DEMO_CLASSES)
