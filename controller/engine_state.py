"""What is saved of an engine, and taking it up again for the same engine under the same policy.

Saved are what the rule has learnt, the place in the engine's steps, and the mode and the policy where an
operator set others than the configured ones. Not saved are counters, the guard's accounts and a canary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specgov.controller.profiles import profile_hash_for
from specgov.policies.learnt import Learnt, LearntError, capture, restore
from specgov.policies.types import BatchView, EngineSpec, Policy
from specgov.proto.v1 import specgov_pb2 as pb


class UnfitStateError(ValueError):
    """What was saved is not of this engine, or not of its policy; the message says what differs."""


def identity(info: pb.EngineInfo, spec: EngineSpec, configured_profile: str) -> dict[str, Any]:
    """What an engine's estimates are about: they are of no use where any of it differs."""
    about = nature(info, spec) | {"profile": profile_hash_for(info, configured_profile)}
    return {"engine_id": info.engine_id, **about}


def nature(info: pb.EngineInfo, spec: EngineSpec) -> dict[str, Any]:
    """What makes an engine the same as before, under its id: all that estimates are about.

    The KV cache's capacity is not among it: engines measure it at each boot, and no estimate depends on it.
    """
    of_spec = {field.name: _plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    del of_spec["kv_capacity_tokens"]
    return {
        "model": info.model,
        "draft": info.draft,
        "gpu": info.gpu,
        "tensor_parallel_size": info.tensor_parallel_size,
        "profile": info.profile,
        **of_spec,
    }


def policy_snapshot(text: str, policy: Policy) -> dict[str, Any]:
    """A policy and what it has learnt; nothing of the latter where it cannot be taken."""
    learnt = capture(policy) if isinstance(policy, Learnt) else None
    return {"text": text, "name": policy.name, "version": policy.version, "learnt": learnt}


def restore_policy(policy: Policy, text: str, saved: Mapping[str, Any]) -> None:
    """Put what was learnt into a newly made policy, which is of no use any more if that fails.

    Raises:
        UnfitStateError: it is of another policy, or damaged.

    """
    expect(
        {"policy": text, "version": policy.version}, {"policy": saved["text"], "version": saved["version"]}
    )
    if not isinstance(policy, Learnt):
        return
    try:
        restore(policy, saved["learnt"])
    except LearntError as error:
        raise UnfitStateError(f"it does not fit the policy {text!r}: {error}") from error


def expect(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that what was saved is of the same kind as what there is now.

    Raises:
        UnfitStateError: it is not.

    """
    for name in (*now, *saved):
        if now.get(name) != saved.get(name):
            raise UnfitStateError(f"{name} was {saved.get(name)!r} and is {now.get(name)!r}")


def batch_of(saved: Mapping[str, Any]) -> BatchView:
    """The newest batch, as it was saved.

    Raises:
        TypeError: it is damaged.

    """
    return BatchView(**saved)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
