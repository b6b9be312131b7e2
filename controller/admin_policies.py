"""The admin service's part about policies: which one an engine has, bundles, rollback and canaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import grpc

from specgov.controller.bundles import policy_text
from specgov.controller.canary import DEFAULT_BLOCK_STEPS
from specgov.controller.engine import Engine
from specgov.controller.engines import Engines
from specgov.controller.logs import get_logger
from specgov.controller.validation import RejectedMessage, check_policy_text
from specgov.policies.bundle import BundleError
from specgov.policies.types import PolicyError
from specgov.proto.v1 import specgov_pb2 as pb

LARGEST_BLOCK_STEPS = 1_000_000

Abort = Callable[[grpc.ServicerContext, grpc.StatusCode, str], NoReturn]


class PolicyAdmin:
    """Policies of engines. No engine waits for what happens here but for the exchange of two objects.

    Args:
        engines: those that the sidecar knows.
        abort: ends a call with a status.

    """

    def __init__(self, engines: Engines, abort: Abort) -> None:
        self._engines = engines
        self._abort = abort

    def set_policy(self, request: pb.SetPolicyRequest, context: grpc.ServicerContext) -> pb.SetPolicyResponse:
        """Give an engine another rule; a new decision follows at once."""
        engine = self._engine(request.engine_id, context)
        try:
            check_policy_text(request.policy)
            before, state = engine.policy_text, engine.change_policy(request.policy)
        except (PolicyError, RejectedMessage) as error:
            self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        get_logger().info(
            "policy set", engine_id=request.engine_id, policy=state.policy_text, policy_before=before
        )
        return pb.SetPolicyResponse(engine=state)

    def roll_back(
        self, request: pb.RollBackPolicyRequest, context: grpc.ServicerContext
    ) -> pb.RollBackPolicyResponse:
        """Return one engine, or all that can, to the policy before."""
        response = pb.RollBackPolicyResponse()
        if request.engine_id:
            engine = self._engine(request.engine_id, context)
            try:
                with engine.lock:
                    response.engines.append(engine.roll_back())
            except PolicyError as error:
                self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"{request.engine_id}: {error}")
            return response
        for engine in self._engines.all():
            with engine.lock:
                if engine.seat.previous is not None:
                    response.engines.append(engine.roll_back())
        return response

    def set_canary(self, request: pb.SetCanaryRequest, context: grpc.ServicerContext) -> pb.SetCanaryResponse:
        """Begin a canary on an engine, or end it."""
        engine = self._engine(request.engine_id, context)
        if not request.policy:
            with engine.lock:
                engine.seat.stop_canary("stopped on request")
                state = engine.refreshed()
            get_logger().info("canary stopped", engine_id=request.engine_id)
            return pb.SetCanaryResponse(engine=state)
        block_steps = request.block_steps or DEFAULT_BLOCK_STEPS
        if not 0 < request.share < 1:
            self._abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                f"share must lie between 0 and 1, not {request.share}",
            )
        if block_steps > LARGEST_BLOCK_STEPS:
            self._abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                f"block_steps must be at most {LARGEST_BLOCK_STEPS}",
            )
        try:
            check_policy_text(request.policy)
            state = engine.start_canary(request.policy, request.share, block_steps)
        except (PolicyError, RejectedMessage) as error:
            self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        get_logger().info(
            "canary begun",
            engine_id=request.engine_id,
            policy=request.policy,
            share=request.share,
            block_steps=block_steps,
        )
        return pb.SetCanaryResponse(engine=state)

    def list_bundles(self) -> pb.ListBundlesResponse:
        """The store's bundles, and who uses them."""
        bundles = self._engines.bundles
        users: dict[str, list[str]] = {}
        for engine in self._engines.all():
            users.setdefault(engine.policy_text, []).append(engine.info.engine_id)
        return pb.ListBundlesResponse(
            folder="" if bundles.folder is None else str(bundles.folder),
            bundles=[
                pb.BundleInfo(
                    name=stored.name,
                    version=stored.version,
                    weights_sha256=stored.weights_sha256,
                    problem=stored.problem,
                    engine_ids=users.get(stored.policy_text, []),
                )
                for stored in bundles.stored()
            ],
        )

    def use_bundle(self, request: pb.UseBundleRequest, context: grpc.ServicerContext) -> pb.UseBundleResponse:
        """Let one engine, or all, try a stored bundle."""
        bundles = self._engines.bundles
        if bundles.folder is None:
            self._abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                "this sidecar has no store of bundles: start it with --bundles-dir FOLDER",
            )
        engines = [self._engine(request.engine_id, context)] if request.engine_id else self._engines.all()
        try:
            text = policy_text(request.name, request.version or bundles.newest(request.name))
            if not bundles.is_stored(text):
                raise BundleError(f"{text!r} names no bundle of a store")
            bundles.load(text.removeprefix("ppo:"))
        except BundleError as error:
            self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        response = pb.UseBundleResponse()
        for engine in engines:
            before = engine.policy_text
            try:
                response.engines.append(engine.try_policy(text))
            except (PolicyError, RejectedMessage) as error:
                response.problems.append(f"{engine.info.engine_id}: {error}")
                continue
            get_logger().info(
                "policy set, on trial", engine_id=engine.info.engine_id, policy=text, policy_before=before
            )
        return response

    def _engine(self, engine_id: str, context: grpc.ServicerContext) -> Engine:
        engine = self._engines.get(engine_id)
        if engine is None:
            self._abort(context, grpc.StatusCode.NOT_FOUND, self._engines.no_such(engine_id))
        return engine
