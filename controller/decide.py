"""One question without a session: which tier for this batch, at this acceptance, by this profile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specgov.controller.bundles import Bundles
from specgov.controller.config import ServeConfig
from specgov.controller.decision import DecisionBuilder, add_estimates
from specgov.controller.profiles import profile_from_wire
from specgov.controller.validation import (
    MAX_NUM_STEPS,
    MAX_SEQ_LEN_TOKENS,
    Cause,
    RejectedMessage,
    check_policy_text,
    check_tiers,
)
from specgov.policies.model import acceptance_from_accept_length, expected_accept_length, rate_optimal_tier
from specgov.policies.profile import Profile
from specgov.policies.registry import make_policy
from specgov.policies.types import (
    MAX_BATCH_SIZE,
    BatchView,
    EngineSpec,
    PolicyContext,
    Reason,
    StepObservation,
)
from specgov.proto.v1 import specgov_pb2 as pb

RATE_OPTIMAL = "rate_optimal"
"""Name of the answer where no policy is asked for: the tier with the largest expected output rate."""
DEFAULT_SEQ_LEN_TOKENS = 512
"""Length of each request where the question names none."""
WARM_UP_STEPS = 256
"""Steps with the acceptance of the question that a named policy observes before it is asked, and"""
WARM_UP_DRAFTS = 2**19
"""how many drafts they have at most together, so that an answer takes no more than a second or two; but there
are 16 steps at least, and"""
WARM_UP_LIVE_REQUESTS = 512
"""as many requests of a step are observed at most."""


def decide(request: pb.DecideRequest, config: ServeConfig, bundles: Bundles | None = None) -> pb.Decision:
    """The answer to ``request``.

    A named policy is a fresh one that has observed ``WARM_UP_STEPS`` steps of this batch at the tiers that it
    chose, drawn from this acceptance with the configured seed. ``bundles`` are the sidecar's.

    Raises:
        RejectedMessage: the question is incomplete or cannot be.
        PolicyError: no such policy, or it cannot be used with these tiers.
        ProfileError: the sidecar's own profile cannot be read.

    """
    profile = profile_from_wire(request.profile, config.profile)
    tiers = check_tiers(request.tiers or profile.tiers)
    batch = _batch(request)
    acceptance = _acceptance(request, tiers[-1])
    expected_tokens = batch.batch_size * expected_accept_length(acceptance)[list(tiers)]
    expected_ms = profile.step_time.step_ms(batch.batch_size, np.array(tiers), batch.sum_seq_len_tokens)
    if request.policy:
        decision = _ask_policy(
            request.policy, config, bundles or Bundles(config), profile, tiers, batch, acceptance
        )
    else:
        decision = pb.Decision(
            num_steps=rate_optimal_tier(tiers, expected_tokens, expected_ms),
            batch_size_min=batch.batch_size,
            batch_size_max=batch.batch_size,
            reason=pb.REASON_POLICY,
            policy=RATE_OPTIMAL,
            policy_version="1",
            propensity=1.0,
        )
    del decision.estimates[:]
    add_estimates(decision, tiers, expected_tokens, expected_ms)
    return decision


def _batch(request: pb.DecideRequest) -> BatchView:
    batch_size, lengths = request.batch_size, request.seq_len_tokens
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise RejectedMessage(
            Cause.IMPOSSIBLE_COUNT, f"batch_size {batch_size} is not in 1..{MAX_BATCH_SIZE}"
        )
    if len(lengths) not in (0, 1, batch_size):
        raise RejectedMessage(
            Cause.LENGTH_MISMATCH,
            f"seq_len_tokens has {len(lengths)} entries for a batch of {batch_size}: give one, or one each",
        )
    longest = max(lengths, default=DEFAULT_SEQ_LEN_TOKENS)
    if longest > MAX_SEQ_LEN_TOKENS:
        raise RejectedMessage(Cause.OUT_OF_RANGE, f"seq_len_tokens {longest} is above {MAX_SEQ_LEN_TOKENS}")
    total = sum(lengths) if len(lengths) == batch_size else batch_size * longest
    return BatchView(batch_size, total, longest)


def _acceptance(request: pb.DecideRequest, num_steps: int) -> NDArray[np.float64]:
    """Acceptance by position, shape (num_steps,)."""
    kind = request.WhichOneof("acceptance")
    if kind == "by_position":
        return _by_position(request.by_position.probability, num_steps)
    if kind == "accept_length_at":
        return np.full(num_steps, _from_accept_length(request.accept_length_at))
    raise RejectedMessage(
        Cause.MISSING_ACCEPTANCE, "no acceptance: give by_position, or accept_length_at with its num_steps"
    )


def _by_position(probabilities: Sequence[float], num_steps: int) -> NDArray[np.float64]:
    for position, probability in enumerate(probabilities, start=1):
        if not math.isfinite(probability):
            raise RejectedMessage(Cause.NOT_A_NUMBER, f"acceptance at position {position} is {probability}")
        if not 0.0 <= probability <= 1.0:
            raise RejectedMessage(
                Cause.OUT_OF_RANGE, f"acceptance {probability:g} at position {position} is not in 0..1"
            )
    if len(probabilities) < num_steps:
        raise RejectedMessage(
            Cause.LENGTH_MISMATCH,
            f"by_position has {len(probabilities)} positions, but the largest tier needs {num_steps}: "
            "give more positions or fewer tiers",
        )
    return np.array(probabilities[:num_steps], dtype=np.float64)


def _from_accept_length(seen: pb.AcceptLengthAt) -> float:
    if seen.num_steps > MAX_NUM_STEPS:
        raise RejectedMessage(
            Cause.OUT_OF_RANGE,
            f"accept_length_at.num_steps {seen.num_steps} is above {MAX_NUM_STEPS}",
        )
    if not math.isfinite(seen.accept_length):
        raise RejectedMessage(Cause.NOT_A_NUMBER, f"accept_length is {seen.accept_length}")
    try:
        return acceptance_from_accept_length(seen.accept_length, seen.num_steps)
    except ValueError as error:
        raise RejectedMessage(Cause.OUT_OF_RANGE, str(error)) from error


def _ask_policy(
    text: str,
    config: ServeConfig,
    bundles: Bundles,
    profile: Profile,
    tiers: tuple[int, ...],
    batch: BatchView,
    acceptance: NDArray[np.float64],
) -> pb.Decision:
    engine = EngineSpec(tiers, profile.graph_batch_sizes)
    now_s = 0.0
    rng = np.random.default_rng(config.seed)
    check_policy_text(text)
    context = PolicyContext(engine, rng, lambda: now_s, profile.step_time, bundles.load)
    policy = make_policy(text, context, files=text == config.policy or bundles.is_stored(text))
    live = min(batch.batch_size, WARM_UP_LIVE_REQUESTS)
    slots = np.arange(live, dtype=np.uint16)
    steps = min(WARM_UP_STEPS, max(16, WARM_UP_DRAFTS // (live * max(1, tiers[-1]))))
    for step_id in range(1, steps + 1):
        num_steps = policy.choose(batch).num_steps_for(batch.batch_size)
        step_ms = float(profile.step_time.step_ms(batch.batch_size, num_steps, batch.sum_seq_len_tokens))
        now_s += step_ms / 1000.0
        drafts = rng.random((live, num_steps)) < acceptance[:num_steps]
        policy.observe(
            StepObservation(
                step_id=step_id,
                batch_size=batch.batch_size,
                num_steps=num_steps,
                accepted=np.cumprod(drafts, axis=1).sum(axis=1).astype(np.uint8),
                slots=slots,
                generations=np.zeros(live, np.uint8),
                sum_seq_len_tokens=batch.sum_seq_len_tokens,
                max_seq_len_tokens=batch.max_seq_len_tokens,
                step_ms=step_ms,
            )
        )
    choice = policy.choose(batch)
    builder = DecisionBuilder(engine, policy, config.ttl_steps, config.ttl_ms)
    return builder.build(choice, batch.batch_size, 0, 0, Reason(choice.reason))
