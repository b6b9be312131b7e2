"""Step-time profiles by name, read once."""

from __future__ import annotations

from functools import lru_cache

from specgov.controller.validation import Cause, RejectedMessage
from specgov.policies.profile import Profile, load_profile, profile_names
from specgov.policies.types import StepTime


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
    return cached_profile(name or configured)


def step_time_for(name: str, configured: str, graph_batch_sizes: tuple[int, ...]) -> StepTime:
    """Step times of the profile that an engine names, or of the sidecar's own, at the engine's graph sizes.

    Raises:
        RejectedMessage: there is no such profile.

    """
    return profile_from_wire(name, configured).step_time.with_graph_batch_sizes(graph_batch_sizes)
