"""Step-time profiles by name, read once, and the one that an engine's rule starts from."""

from __future__ import annotations

from functools import lru_cache

from specgov.controller.validation import Cause, RejectedMessage
from specgov.policies.profile import Profile, load_profile, profile_names
from specgov.policies.types import StepTime
from specgov.proto.v1 import specgov_pb2 as pb

AUTO = "auto"
"""The bundled profile that was made on such an engine, none where there is no such profile."""
NO_PROFILE = "none"
"""Step times are learnt from nothing. That is better than another model's (docs/policies.md)."""
DEFAULT_PROFILE = "h200-llama-3.1-8b"
"""For single questions, which need one, where neither they nor the configuration name it."""


@lru_cache(maxsize=64)
def cached_profile(name_or_path: str) -> Profile:
    """A profile by name or path.

    Raises:
        ProfileError: there is none, or it cannot be used.

    """
    return load_profile(name_or_path)


def profile_from_wire(name: str, configured: str) -> Profile:
    """The profile that a message names, or the sidecar's own where it names none.

    A message cannot make the sidecar open files: it names a bundled profile or the configured one.

    Raises:
        RejectedMessage: it is neither.

    """
    if name and name != configured and name not in profile_names():
        raise RejectedMessage(
            Cause.UNKNOWN_PROFILE,
            f"there is no profile {name!r}; there are {', '.join(profile_names())}, and an empty name for "
            "the sidecar's own",
        )
    wanted = name or configured
    return cached_profile(DEFAULT_PROFILE if wanted in (AUTO, NO_PROFILE) else wanted)


def step_time_for(
    info: pb.EngineInfo, configured: str, graph_batch_sizes: tuple[int, ...]
) -> StepTime | None:
    """Step times that the engine's rule starts from, at the engine's graph sizes; None: from nothing.

    They are those of the profile that the engine names, else of the configured one.

    Raises:
        RejectedMessage: there is no such profile.

    """
    profile = _profile_for(info, configured)
    return None if profile is None else profile.step_time.with_graph_batch_sizes(graph_batch_sizes)


def profile_hash_for(info: pb.EngineInfo, configured: str) -> str:
    """The hash of the profile that the engine's rule starts from; empty for none.

    Raises:
        RejectedMessage: there is no such profile.

    """
    profile = _profile_for(info, configured)
    return "" if profile is None else profile.hash


def _profile_for(info: pb.EngineInfo, configured: str) -> Profile | None:
    name = info.profile or configured
    if name == NO_PROFILE:
        return None
    return bundled_profile_for(info) if name == AUTO else profile_from_wire(info.profile, configured)


def bundled_profile_for(info: pb.EngineInfo) -> Profile | None:
    """The bundled profile of this GPU, model and tensor parallelism, None if there is none.

    The engine's own words hold more than the profile's: ``NVIDIA H200`` for ``H200``, and for
    ``llama-3.1-8b`` a path or a hub's name that ends in ``Llama-3.1-8B-Instruct``.
    """
    model = info.model.rstrip("/").rpartition("/")[2].lower()
    for profile in map(cached_profile, profile_names()):
        if (
            profile.hardware.lower() in info.gpu.lower().split()
            and model.startswith(profile.model)
            and info.tensor_parallel_size == profile.tensor_parallel_size
        ):
            return profile
    return None
