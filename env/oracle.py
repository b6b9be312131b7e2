"""The oracle on a simulated server: true acceptance and costs of the step that comes, no decision lag."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specgov.env.server import Server
from specgov.policies.oracle import TruthSource, best_tiers


def oracle_num_steps(server: Server) -> NDArray[np.int64]:
    """The rate-optimal tier of every environment's coming step, shape (N,): what `Server.step` takes."""
    truth = server.truth()
    return best_tiers(np.asarray(server.config.engine.tiers), truth.expected_tokens, truth.expected_ms)


def truth_of(server: Server, env: int = 0) -> TruthSource:
    """The truth of one environment's coming step, for `specgov.policies.oracle.Oracle`."""

    def tell() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        truth = server.truth()
        return truth.expected_tokens[env], truth.expected_ms[env]

    return tell
