"""The simulated server."""

from specgov.env.server_types import (
    FinishedRequests,
    LiveRequests,
    RequestBatch,
    SimulationError,
    StepResult,
    Truth,
    Workload,
)

__all__ = [
    "FinishedRequests",
    "LiveRequests",
    "RequestBatch",
    "SimulationError",
    "StepResult",
    "Truth",
    "Workload",
]
