"""Rank 0's connection to the sidecar: who the engine is, and what the newest decision asks for."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import threading
import uuid
from collections.abc import Sequence
from typing import Any, final

from specgov.client import Decision, RelayClient, StreamClient
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.sglang_plugin import versions
from specgov.sglang_plugin.orders import ENGINES_RULE, OWN_RULE, Kind, Order
from specgov.sglang_plugin.settings import Settings
from specgov.sglang_plugin.versions import Ranks, ServerFacts


def engine_info(
    settings: Settings,
    facts: ServerFacts,
    ranks: Ranks,
    scheduler: Any,
    tiers: Sequence[int],
    graph_batch_sizes: Sequence[int],
) -> pb.EngineInfo:
    """What the sidecar is told first. Data-parallel replicas are engines of their own, by their ids."""
    engine_id = settings.engine_id or f"sglang-{socket.gethostname()}-{facts.port}"
    if ranks.dp_rank is not None:
        engine_id += f"-dp{ranks.dp_rank}"
    return pb.EngineInfo(
        engine_id=engine_id,
        boot_id=uuid.uuid4().hex,
        engine="sglang",
        engine_version=versions.installed_version(),
        model=facts.model[-512:],
        draft=facts.draft[-512:],
        gpu=versions.gpu_name()[:512],
        tensor_parallel_size=ranks.tp_size,
        tiers=sorted(tiers),
        graph_batch_sizes=graph_batch_sizes,
        max_running_requests=min(int(getattr(scheduler, "max_running_requests", 0) or 0), 65_535),
        decision_lag_steps=2 if getattr(scheduler, "enable_overlap", False) else 1,
        draft_kv_stays_warm=versions.draft_kv_stays_warm(os.environ),
        kv_capacity_tokens=int(getattr(scheduler, "max_total_num_tokens", 0) or 0),
        profile=settings.profile,
        client_version=importlib.metadata.version("specgov"),
    )


def connect(settings: Settings, info: pb.EngineInfo) -> StreamClient | RelayClient:
    """A client, started."""
    kind = RelayClient if settings.client == "relay" else StreamClient
    client = kind(settings.target, info, tls=settings.tls)
    client.start()
    return client


@final
class Link:
    """A client whose newest decision is read as an order.

    A decision for the record only (the sidecar's mode is shadow) leaves the tiers to SGLang's own rule.
    """

    __slots__ = ("_content", "_order", "client")

    def __init__(self, client: StreamClient | RelayClient) -> None:
        self.client = client
        self._content: tuple[object, ...] = ()  # what of a decision ``_order`` was made of
        self._order = OWN_RULE

    def wanted(self, step_id: int) -> tuple[Order, int]:
        """The order for step ``step_id`` and the id of the decision in it, 0 where there is none."""
        decision = self.client.current(step_id)
        if decision is None:
            newest = self.client.newest()
            shadow = newest is not None and newest.reason == pb.REASON_SHADOW
            return (ENGINES_RULE if shadow else OWN_RULE), 0
        content = decision[2:6]  # num_steps, its batch sizes, and the neighbours
        if content != self._content:
            self._content, self._order = content, _order(decision)
        return self._order, decision.decision_id

    def event(self, kind: pb.EngineEvent.Kind.ValueType, step_id: int) -> None:
        """Queue an event; never waits."""
        self.client.event(kind, step_id)

    def close(self, step_id: int) -> None:
        """Say that the engine shuts down, and end the stream: half a second, at worst two more."""
        self.client.event(pb.EngineEvent.KIND_SHUTTING_DOWN, step_id)
        self.client.close()

    def close_aside(self, step_id: int) -> None:
        """``close`` without waiting for it."""
        threading.Thread(target=self.close, args=(step_id,), name="specgov-close", daemon=True).start()


def _order(decision: Decision) -> Order:
    own = (decision.batch_size_min, decision.batch_size_max, decision.num_steps)
    others = ((other.batch_size_min, other.batch_size_max, other.num_steps) for other in decision.neighbours)
    return Order(Kind.TABLE, (own, *others))
