"""``specgov health``: a probe for scripts and orchestrators."""

from __future__ import annotations

from specgov.controller.cli import output, remote


def health(*, target: remote.Target = None, service: str = "") -> int:
    """Ask the sidecar whether it serves, as a probe does.

    For example: specgov health --target unix:///run/specgov/specgov.sock

    It says SERVING while it makes progress, and NOT_SERVING while it starts, stops, decisions are stuck,
    or its socket's file is gone.
    Needs no token. Exit codes: 0 SERVING, 1 NOT_SERVING, 3 nothing answers.

    Args:
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.
        service: A service's full name, as in specgov.v1.SpeculationController; default: the sidecar as such.

    """
    from grpc_health.v1 import health_pb2

    status = remote.health_status(remote.target_or_default(target), service)
    output.print_line(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1
