"""Exceptions of ours inside the scheduler: caught, counted, and after a few the plugin gives up."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from typing import final

_LOG = logging.getLogger("specgov.sglang_plugin")


@final
class Guard:
    """Counts the exceptions of all hooks of a process.

    Every hook wraps what it does in ``try`` and calls ``failed`` in the handler: an exception that left a
    hook would end the scheduler. ``tripped`` says that the plugin has given up; it never goes back.
    """

    __slots__ = ("_max_errors", "errors", "tripped")

    def __init__(self, max_errors: int) -> None:
        self._max_errors = max_errors
        self.errors: Counter[str] = Counter()
        self.tripped = False

    def failed(self, hook: str, error: BaseException) -> None:
        """Count an exception of ``hook``; logged are the first of each hook and the one that is too many."""
        self.errors[hook] += 1
        if not self.tripped and self.errors.total() >= self._max_errors:
            self.tripped = True
            _LOG.error(
                "Specgov gives up after %d exceptions; SGLang's own rule decides from now on. "
                "The last, in %s: %s",
                self.errors.total(),
                hook,
                _in_short(error),
            )
        elif not self.tripped and self.errors[hook] == 1:
            _LOG.warning("Specgov goes on after an exception in %s: %s", hook, _in_short(error))


def _in_short(error: BaseException) -> str:
    """The exception and where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{where}"
