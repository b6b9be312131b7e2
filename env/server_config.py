"""What a simulated server is: the engine's limits, what its steps cost, and how its drafts fare."""

from __future__ import annotations

from dataclasses import dataclass

from specgov.env.acceptance import AcceptanceModel
from specgov.env.hiccups import NO_HICCUPS, Hiccups
from specgov.env.server_types import SimulationError
from specgov.policies.step_time import PrefillCost, StepNoise
from specgov.policies.types import EngineSpec, StepTime

UNLIMITED_TOKENS = 1 << 60
"""Stands for a KV capacity that is not known."""


NO_NOISE = StepNoise(sigma=0.0, stall_probability=0.0)
FREE_PREFILL = PrefillCost(fixed_ms=0.0, ms_per_token=0.0)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A server; the same for all environments.

    Attributes:
        engine: tiers, graph sizes, largest batch, KV capacity (0 = unlimited), whether drafts stay warm.
        step_time: expected duration of a step.
        acceptance: classes of requests and the server's drift.
        noise: scatter of single steps.
        hiccups: how the host holds up the engine.
        prefill: what a chunk of prompt costs.
        prefill_chunk_tokens: prompt tokens between two decode steps, at most, while requests are running.
        kv_headroom: share of the KV capacity that stays free when a request joins a running batch, so
            that it is not retracted at once.
        switch_ms: what a step takes longer whose num_steps is not that of the step before it.

    Raises:
        SimulationError: a value that cannot be simulated.

    """

    engine: EngineSpec
    step_time: StepTime
    acceptance: AcceptanceModel
    noise: StepNoise = NO_NOISE
    hiccups: Hiccups = NO_HICCUPS
    prefill: PrefillCost = FREE_PREFILL
    prefill_chunk_tokens: int = 8192
    kv_headroom: float = 0.05
    switch_ms: float = 0.0

    def __post_init__(self) -> None:
        tiers = self.engine.tiers
        if not tiers or list(tiers) != sorted(set(tiers)) or tiers[0] < 0 or tiers[-1] > 250:
            raise SimulationError(f"tiers must ascend within 0..250 and be distinct, got {tiers}")
        if self.engine.max_running_requests < 1:
            raise SimulationError(
                "max_running_requests must be known, and at least 1: set it in the EngineSpec"
            )
        if self.engine.max_running_requests > 65_535:
            raise SimulationError(
                "max_running_requests must be at most 65,535: reports hold slots in two bytes"
            )
        if not self.acceptance.classes:
            raise SimulationError("the acceptance model has no class of requests: name at least one")
        if self.prefill_chunk_tokens < 1:
            raise SimulationError(
                f"prefill_chunk_tokens is {self.prefill_chunk_tokens}: it must be at least 1"
            )
        if not 0.0 <= self.kv_headroom < 1.0:
            raise SimulationError(f"kv_headroom is {self.kv_headroom}: it must be at least 0 and below 1")
        if not 0.0 <= self.switch_ms < float("inf"):
            raise SimulationError(f"switch_ms is {self.switch_ms}: it must be at least 0")

    @property
    def largest_num_steps(self) -> int:
        """The largest tier."""
        return self.engine.tiers[-1]

    @property
    def verify_width(self) -> int:
        """KV slots that the engine keeps free for each request in a step: the largest tier's verify width."""
        return self.largest_num_steps + 1

    @property
    def kv_capacity_tokens(self) -> int:
        """KV capacity; a very large number where it is unlimited."""
        return self.engine.kv_capacity_tokens or UNLIMITED_TOKENS
