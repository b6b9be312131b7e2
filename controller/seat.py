"""The policy that decides for one engine: how it is made, how it came there, and what it goes back to.

A policy that raises, or chooses what the engine cannot do, is set aside for ``Fallback`` until the engine is
given a policy again. A new bundle begins with a trial of some steps: if it fails within them, or the guard
finds that its output rate falls short, the policy before decides again, with what it had learnt.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specgov.controller.bundles import Bundles
from specgov.controller.canary import Canary
from specgov.controller.config import ServeConfig
from specgov.controller.decision import DecisionBuilder, check_ranges
from specgov.controller.fallback import Fallback
from specgov.controller.logs import get_logger
from specgov.controller.profiles import step_time_for
from specgov.policies.learnt import Learnt, LearntError, capture, restore
from specgov.policies.registry import make_policy
from specgov.policies.types import (
    BatchView,
    Choice,
    EngineSpec,
    Policy,
    PolicyContext,
    PolicyError,
    Reason,
    StepObservation,
)
from specgov.proto.v1 import specgov_pb2 as pb

MAX_FAILURE_CHARS = 500
_SMOKE_TOKENS = 500


@dataclass(frozen=True, slots=True)
class Held:
    """A policy and the text that names it."""

    text: str
    policy: Policy


class Seat:
    """What decides for one engine. Every method wants the engine's lock but ``trial_policy``.

    Attributes: text, policy: what decides. failure: why the policy was set aside; empty if it was not.
        previous: what a rollback returns to. trial_steps_left: of a bundle's trial, 0 outside one.
        rolled_back: why the last new policy was rolled back by itself. canary: the newest one, which may have
        ended.

    Raises:
        PolicyError: the configured policy cannot be used on this engine.
        RejectedMessage: the profile that the engine names is not known.

    """

    def __init__(
        self,
        config: ServeConfig,
        clock: Callable[[], float],
        bundles: Bundles,
        info: pb.EngineInfo,
        spec: EngineSpec,
    ) -> None:
        self._config, self._clock, self._bundles = config, clock, bundles
        self._info, self._spec = info, spec
        self._rng = self._new_rng()
        self.failure = ""
        self._trips_before = 0
        self.begin(info, spec, config.policy)

    def begin(self, info: pb.EngineInfo, spec: EngineSpec, text: str) -> None:
        """Seat a new policy on an engine that is new or another than before: nothing stays.

        Raises:
            PolicyError: the policy cannot be used on this engine.
            RejectedMessage: the profile that the engine names is not known.

        """
        before = self._info, self._spec
        self._info, self._spec = info, spec
        try:
            policy = self.make(text)
        except ValueError:
            self._info, self._spec = before
            raise
        self.previous: Held | None = None
        self.rolled_back = ""
        self.canary: Canary | None = None
        self._seat(Held(text, policy))

    def same_engine(self, info: pb.EngineInfo, spec: EngineSpec) -> None:
        """The engine came back as it was, but for what no policy depends on."""
        self._info, self._spec = info, spec

    def begin_anew(self) -> None:
        """As if the engine had just come: a try to restore its policy failed."""
        self._rng = self._new_rng()
        self.begin(self._info, self._spec, self._config.policy)

    def make(self, text: str) -> Policy:
        """A policy for this engine, not yet seated.

        Raises:
            PolicyError: there is none, or it cannot be used here.
            RejectedMessage: the profile that the engine names is not known.

        """
        return self._make(text, self.context())

    def resume(self, held: Held) -> None:
        """Let a policy decide that was restored; there is nothing to go back to."""
        self._seat(held)

    def candidate(self, text: str) -> Held | None:
        """The canary's candidate, if it is what ``text`` names."""
        if self.canary is None or self.canary.ended or self.canary.text != text:
            return None
        return Held(text, self.canary.candidate)

    def facts(self) -> dict[str, Any]:
        """The fields of ``EngineState`` that are about this."""
        return {
            "policy_text": self.text,
            "previous_policy_text": "" if self.previous is None else self.previous.text,
            "trial_steps_left": self.trial_steps_left,
            "rolled_back": self.rolled_back,
            "canary": None if self.canary is None else self.canary.state(),
        }

    def make_aside(self, text: str, lock: threading.Lock, *, try_it: bool = False) -> Held:
        """A policy made without the engine's lock, since files may be read; ``try_it``: let it choose once.

        Raises:
            PolicyError: there is none, it cannot be used here, or what it chose is no choice.
            RejectedMessage: the profile that the engine names is not known.

        """
        with lock:
            context = self.context(self._rng.spawn(1)[0])
        policy = self._make(text, context)
        if try_it:
            _try(policy, text, context.engine)
        return Held(text, policy)

    def seat(self, held: Held, for_spec: EngineSpec, trial_steps: int = 0, trips: int = 0) -> None:
        """Let another policy decide from now on; of a bundle on trial, the network is new and the rest stays.

        Args:
            held: the policy.
            for_spec: the engine that it was made for.
            trial_steps: of its trial.
            trips: how often the guard has tripped so far.

        Raises:
            PolicyError: the engine has become another since the policy was made.

        """
        if for_spec != self._spec:
            raise PolicyError("the engine reconnected as another meanwhile: try again")
        before = Held(self.text, self.policy)
        if trial_steps and isinstance(held.policy, Learnt) and type(held.policy) is type(before.policy):
            try:
                restore(held.policy, capture(before.policy))
            except (LearntError, TypeError) as error:
                raise PolicyError(f"policy {held.text!r}: {error}") from error
        if not self.failure:
            self.previous = before
        self.rolled_back = ""
        self._seat(held)
        self.trial_steps_left, self._trips_before = trial_steps, trips

    def roll_back(self, why: str = "") -> None:
        """Let the policy before decide again; ``why`` is given where nobody asked for it.

        Raises:
            PolicyError: there is none.

        """
        if self.previous is None:
            raise PolicyError("there is no policy to go back to")
        back, self.previous = self.previous, None
        get_logger().log(
            logging.WARNING if why else logging.INFO,
            "policy rolled back",
            engine_id=self._info.engine_id,
            policy=self.text,
            back_to=back.text,
            why=why or "on request",
        )
        self.rolled_back = why and f"{self.text}: {why}"
        self._seat(back)

    # -- a step ----------------------------------------------------------------------------------

    @property
    def deciding(self) -> Policy:
        """What to ask, and to tell of steps: the policy, or a canary of it and another."""
        return self.canary if self.canary is not None and not self.canary.ended else self.policy

    @property
    def has_canary(self) -> bool:
        """Whether a canary runs."""
        return self.canary is not None and not self.canary.ended

    @property
    def is_trying(self) -> bool:
        """Whether steps may have to be watched: by a canary, or in a bundle's trial."""
        return self.canary is not None or self.trial_steps_left > 0

    def is_candidates(self, decision_id: int) -> bool:
        """Whether a canary's candidate made that decision."""
        return self.canary is not None and not self.canary.ended and self.canary.is_candidates(decision_id)

    def stepped(self, step: StepObservation, followed_decision_id: int, trips: int) -> None:
        """A step was taken in, after which the guard has tripped ``trips`` times in all."""
        if self.canary is not None and not self.canary.ended:
            self.canary.measure(step, followed_decision_id)
        if not self.trial_steps_left:
            return
        self.trial_steps_left -= 1
        if trips > self._trips_before:
            self.trial_steps_left = 0
            if self.previous is not None:
                self.roll_back("its output rate fell short of the baseline's")

    def build(
        self, choice: Choice, batch_size: int, number: int, known_step_id: int, reason: Reason
    ) -> pb.Decision:
        """The decision that is sent for a choice of ``deciding``."""
        canary = self.canary if self.canary is not None and not self.canary.ended else None
        builder = canary.builder if canary is not None and canary.by_candidate else self._builder
        decision = builder.build(
            choice, batch_size, decision_id=number, known_step_id=known_step_id, reason=reason
        )
        if canary is not None:
            canary.decided(number)
            decision.by_candidate = canary.by_candidate
        return decision

    def fail(self, error: Exception) -> None:
        """The policy raised, or chose what cannot be: the one before decides, else the fallback."""
        if self.trial_steps_left and self.previous is not None:
            self.roll_back(said(error))
            return
        get_logger().error(
            "policy failed and is set aside; its engine gets its smallest tier until it is given a policy",
            engine_id=self._info.engine_id,
            policy=self.text,
            exc_info=error,
        )
        self._seat(Held(self.text, Fallback(self._spec)))
        self.failure = said(error)

    def start_canary(self, held: Held, share: float, block_steps: int, for_spec: EngineSpec) -> None:
        """Let a candidate decide a share of the steps.

        Raises:
            PolicyError: the engine has no working policy to compare with, or has become another.

        """
        if self.failure or for_spec != self._spec:
            raise PolicyError("the engine's own policy failed, or it reconnected as another: try again")
        self.stop_canary("another canary began")
        self.canary = Canary(
            held.text,
            held.policy,
            self.policy,
            self._new_builder(held.policy),
            share,
            block_steps,
            self._rng.spawn(1)[0],
        )

    def stop_canary(self, why: str) -> None:
        """End the canary, if one runs; what it found stays to be seen."""
        if self.canary is not None:
            self.canary.end(why)

    # -- parts -----------------------------------------------------------------------------------

    def context(self, rng: np.random.Generator | None = None) -> PolicyContext:
        """What a policy of this engine is made with."""
        return PolicyContext(
            engine=self._spec,
            rng=rng or self._rng,
            clock=self._clock,
            step_time=step_time_for(self._info, self._config.profile, self._spec.graph_batch_sizes),
            load_bundle=self._bundles.load,
        )

    def _make(self, text: str, context: PolicyContext) -> Policy:
        # Who may set a policy may not thereby open files; who starts the sidecar, or fills its store, may.
        files = text == self._config.policy or self._bundles.is_stored(text)
        return make_policy(text, context, files=files)

    def _seat(self, held: Held) -> None:
        self.stop_canary("the engine's policy was replaced")
        self.text, self.policy = held.text, held.policy
        self.failure = ""
        self.trial_steps_left = 0
        self._builder = self._new_builder(held.policy)

    def _new_builder(self, policy: Policy) -> DecisionBuilder:
        return DecisionBuilder(self._spec, policy, self._config.ttl_steps, self._config.ttl_ms)

    def _new_rng(self) -> np.random.Generator:
        return np.random.default_rng([self._config.seed, zlib.crc32(self._info.engine_id.encode())])


def said(error: Exception) -> str:
    """The error in one line, clipped."""
    return f"{type(error).__name__}: {error}"[:MAX_FAILURE_CHARS]


def _try(policy: Policy, text: str, engine: EngineSpec) -> None:
    """Let a policy that choosing does not change choose for the smallest and the largest batch.

    Raises:
        PolicyError: what it chose is no choice for this engine.

    """
    for size in (1, engine.largest_batch_size):
        try:
            choice = policy.choose(BatchView(size, size * _SMOKE_TOKENS, _SMOKE_TOKENS))
        except Exception as error:
            raise PolicyError(f"policy {text!r} cannot decide: {said(error)}") from error
        check_ranges(choice.ranges, engine, text)
        for expected in (choice.expected_tokens, choice.expected_ms):
            if expected is not None and not np.isfinite(expected).all():
                raise PolicyError(f"policy {text!r} expects what is no number")
