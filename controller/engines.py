"""All engines that the sidecar knows, and the limit of streams."""

from __future__ import annotations

import threading
from collections.abc import Callable

from specgov.controller.bundles import Bundles
from specgov.controller.config import ServeConfig
from specgov.controller.engine import Engine
from specgov.controller.session import Session, TooManyStreams
from specgov.controller.state import StateKeeper
from specgov.controller.turns import Turns
from specgov.policies.types import EngineSpec
from specgov.proto.v1 import specgov_pb2 as pb

MAX_NAMED = 8
"""Engines that a message names where one is not known."""


class Engines:
    """Engines by id. Its lock is held when streams come and go, never for a step.

    ``keeper`` has what was saved of engines before, None where nothing is kept. Streams decide in ``turns``.
    """

    def __init__(self, config: ServeConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._by_id: dict[str, Engine] = {}  # the longest unused first
        self.keeper: StateKeeper | None = None
        self.bundles = Bundles(config)
        self.turns = Turns()

    def connect(
        self, session: Session, info: pb.EngineInfo, spec: EngineSpec
    ) -> tuple[Engine, Session | None]:
        """The engine that ``info`` names, given to ``session``, and the stream that had it before, if any.

        Raises:
            TooManyStreams: the limit is reached and this engine is not among the connected.
            PolicyError: the policy cannot be used on this engine.
            RejectedMessage: the profile that the engine names is not known.

        """
        with self._lock:
            engine = self._by_id.get(info.engine_id)
            if (engine is None or engine.session is None) and self.connected >= self._config.max_streams:
                raise TooManyStreams(
                    f"{self._config.max_streams} engines are connected, which is the limit (max_streams)"
                )
            if engine is None:
                engine = self._made(info, spec)
            with engine.lock:
                older = engine.connect(session, info, spec)
            self._by_id.pop(info.engine_id, None)
            self._by_id[info.engine_id] = engine
            self._forget_surplus()
            return engine, older

    def _made(self, info: pb.EngineInfo, spec: EngineSpec) -> Engine:
        """A new engine, with what was saved of it where that fits."""
        engine = Engine(info, spec, self._config, self._clock, self.bundles)
        saved = None if self.keeper is None else self.keeper.saved(info.engine_id)
        if self.keeper is None or saved is None:
            return engine
        try:
            engine.resume(saved)
        except ValueError as error:
            self.keeper.does_not_fit(info.engine_id, str(error))
        return engine

    def disconnect(self, engine: Engine, session: Session) -> bool:
        """End the session's hold on the engine; whether it still had it."""
        with self._lock, engine.lock:
            held = engine.session is session
            if held:
                engine.session = None
            return held

    @property
    def connected(self) -> int:
        """How many engines have a stream."""
        return sum(engine.session is not None for engine in tuple(self._by_id.values()))

    @property
    def on_fallback(self) -> int:
        """How many engines have a fallback in place of a policy that failed."""
        return sum(bool(engine.policy_failure) for engine in tuple(self._by_id.values()))

    @property
    def rolled_back(self) -> int:
        """How many engines had a new policy that was rolled back by itself, and none since."""
        return sum(bool(engine.seat.rolled_back) for engine in tuple(self._by_id.values()))

    def get(self, engine_id: str) -> Engine | None:
        """The engine of that id."""
        with self._lock:
            return self._by_id.get(engine_id)

    def no_such(self, engine_id: str) -> str:
        """That there is no engine of that id, and which there are."""
        known = [engine.info.engine_id for engine in self.all()]
        more = len(known) - MAX_NAMED
        names = ", ".join(known[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        verb = "is" if len(known) < 2 else "are"
        return f"there is no engine {engine_id!r}: there {verb} {names or 'none yet'}"

    def all(self) -> list[Engine]:
        """All engines, ordered by id."""
        with self._lock:
            return [engine for _, engine in sorted(self._by_id.items())]

    def _forget_surplus(self) -> None:
        """Drop the engines that were away longest, beyond the limit of what is remembered."""
        surplus = len(self._by_id) - self._config.max_engines
        away = [engine_id for engine_id, engine in self._by_id.items() if engine.session is None]
        for engine_id in away[: max(0, surplus)]:
            del self._by_id[engine_id]
