"""Rounds of a sidecar's watchdog, and what health says after them."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc


def rounds(sidecar: Any, count: int) -> None:
    """Rounds of the watchdog in each of which the threads of the pool had their turn."""
    for _ in range(count):
        sidecar.sidecar.watchdog.check()
        for pool in sidecar.sidecar.watchdog._pools:
            pool._probe.result(60)


def health(sidecar: Any, service: str = "") -> str:
    stub = health_pb2_grpc.HealthStub(sidecar.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
