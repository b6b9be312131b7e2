"""``[guard]``: what the guard allows a policy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from specgov.policies.registry import parse_policy

BASELINE_RULES = ("static", "threshold", "schedule")
"""Rules that are a function of the batch size alone, and so a yardstick that cannot drift."""


class LatencyTargets(BaseModel):
    """Targets of time per output token; none = no target."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tpot_mean_ms: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="mean time per output token, in ms"
    )
    tpot_p99_ms: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="99th percentile of it: of a request none of whose drafts is accepted",
    )


class GuardConfig(LatencyTargets):
    """``[guard]``."""

    enabled: bool = Field(default=True, description="false = every choice of the policy is sent as it is")
    baseline: str | None = Field(
        default=None,
        min_length=1,
        description="rule to fall back to and to measure losses against: static:K, threshold:B:K or "
        "schedule:...; none = threshold:32:3, with the nearest tiers that the engine has",
    )
    loss_share: float = Field(
        default=0.01, ge=0, le=1, description="share of the baseline's output that may be lost to learning"
    )
    allowance_tokens: float = Field(
        default=5000.0, ge=0, le=1e12, description="output tokens that may be lost beyond that share"
    )
    rate_window_steps: int = Field(
        default=256, ge=32, le=100_000, description="timed steps over which the output rate is judged"
    )
    rate_margin: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="share by which the measured output rate may stay below the baseline's estimate",
    )
    first_backoff_steps: int = Field(
        default=256, ge=1, le=10_000_000, description="steps before another try; each failure doubles them"
    )
    largest_backoff_steps: int = Field(
        default=4096, ge=1, le=10_000_000, description="most steps before another try"
    )
    most_switches: int = Field(
        default=32, ge=1, le=10_000, description="switches of tier allowed within the window"
    )
    switch_window_steps: int = Field(default=64, ge=1, le=100_000, description="that window, in steps")
    dwell_steps: int = Field(default=1, ge=1, le=10_000, description="steps that a tier is kept at least")
    stale_s: float = Field(
        default=10.0, gt=0, le=86_400, description="age of the newest report at which it decides nothing more"
    )
    stale_steps: int = Field(
        default=50, ge=1, le=1_000_000, description="steps without a report that raise an alarm"
    )
    zero_acceptance_requests: int = Field(
        default=2000,
        ge=1,
        le=100_000_000,
        description="requests verified in a row without one accepted draft that raise an alarm",
    )
    step_time_factor: float = Field(
        default=20.0, gt=1, le=1e6, description="factor between like steps' times that counts as a jump"
    )
    clear_steps: int = Field(
        default=64, ge=1, le=1_000_000, description="sound reports in a row that end an alarm"
    )
    engines: dict[str, LatencyTargets] = Field(
        default={}, description="latency targets by engine id, in place of the two above"
    )

    @field_validator("baseline")
    @classmethod
    def _baseline_is_of_the_batch_alone(cls, text: str | None) -> str | None:
        if text is None:
            return None
        parse_policy(text)
        name = text.partition(":")[0].strip()
        if name not in BASELINE_RULES:
            raise ValueError(
                f"the baseline must depend on the batch size alone, so it is one of "
                f"{', '.join(BASELINE_RULES)}, not {name}"
            )
        return text

    @model_validator(mode="after")
    def _limits_agree(self) -> GuardConfig:
        if self.first_backoff_steps > self.largest_backoff_steps:
            raise ValueError(
                f"first_backoff_steps {self.first_backoff_steps} is above "
                f"largest_backoff_steps {self.largest_backoff_steps}"
            )
        return self

    def targets(self, engine_id: str) -> LatencyTargets:
        """The latency targets of an engine."""
        return self.engines.get(engine_id, self)
