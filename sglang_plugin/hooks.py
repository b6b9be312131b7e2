"""The functions that SGLang's hook registry calls: each does its part and never fails, whatever that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from specgov.sglang_plugin import versions
from specgov.sglang_plugin.checks import start_problems, why_idle
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.runtime import Runtime
from specgov.sglang_plugin.settings import Settings


@final
class Hooks:
    """AROUND hooks: each takes what it wraps first, and always calls it exactly once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def around_event_loop(
        self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Start when the scheduler's loop does, and end with it: on SIGTERM, Ctrl-C and exceptions alike."""
        try:
            self._runtime.start(scheduler)
        except Exception as error:  # noqa: BLE001 the server must start without us
            self._runtime.give_up("start", error)
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            try:
                self._runtime.stop()
            except Exception as error:  # noqa: BLE001 the loop's own end must not be hidden
                self._runtime.guard.failed("stop", error)

    def around_broadcast(
        self, original: Callable[..., Any], receiver: Any, requests: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Send an order along, and take it out again. Other ranks wait in ``original``: it always runs."""
        try:
            requests = self._runtime.before_broadcast(requests)
        except Exception as error:  # noqa: BLE001 the scheduler must live
            self._runtime.guard.failed("share", error)
        received = original(receiver, requests, *args, **kwargs)
        if not received:  # as in most iterations
            return received
        try:
            return self._runtime.after_broadcast(received)
        except Exception as error:  # noqa: BLE001 the scheduler must live
            self._runtime.guard.failed("share", error)
            return [request for request in received if type(request) is not tuple]

    def around_result(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Read a result's batch before SGLang processes it, and report it afterwards."""
        runtime, before, read = self._runtime, None, False
        try:
            before = runtime.before_result(batch)
            read = True
        except Exception as error:  # noqa: BLE001 the scheduler must live
            runtime.guard.failed("observe", error)
        returned = original(scheduler, batch, result, *args, **kwargs)
        if read:
            try:
                runtime.after_result(scheduler, batch, result, before)
            except Exception as error:  # noqa: BLE001 the scheduler must live
                runtime.guard.failed("observe", error)
        return returned


def check_start(settings: Settings, server_args: Any) -> None:
    """Check a server's arguments before its model is loaded.

    Raises:
        PluginError: the plugin could not work on this server; the message lists what to change.

    """
    facts = versions.server_facts(server_args)
    if why_idle(facts) is not None:
        return
    version = versions.parse_version(versions.installed_version())
    reason = None if facts.adaptive else versions.adaptive_unsupported_reason(server_args)
    problems = start_problems(settings, facts, version, versions.engine_tiers(facts.adaptive_config), reason)
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise PluginError(
            f"Specgov cannot govern this server (or unset SPECGOV_TARGET to start without it):\n{listed}"
        )
