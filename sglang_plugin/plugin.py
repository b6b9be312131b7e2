"""The entry point in SGLang's plugin group: registers the hooks, in every process of a server.

SGLang loads plugins in its launcher, in each scheduler process and in the detokenizer. Nothing is registered,
and nothing but this module is imported, unless ``SPECGOV_TARGET`` or ``SPECGOV_CONFIG`` is set.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgov.sglang_plugin.runtime import Runtime
    from specgov.sglang_plugin.settings import Settings

_LOG = logging.getLogger("specgov.sglang_plugin")
_SWITCHES = ("SPECGOV_TARGET", "SPECGOV_CONFIG")


def load() -> None:
    """Register the hooks.

    SGLang logs exceptions of plugins and goes on without them. A server that was to be governed must not
    start ungoverned without anybody noticing, so settings that cannot be used end the process instead.

    Raises:
        SystemExit: the settings or this SGLang cannot be used; the message says why.

    """
    if not any(os.environ.get(name, "").strip() for name in _SWITCHES):
        _LOG.info("Specgov is off: neither SPECGOV_TARGET nor SPECGOV_CONFIG is set")
        return
    from specgov.sglang_plugin.errors import PluginError

    try:
        _load()
    except PluginError as error:
        raise SystemExit(f"specgov: {error}") from error


def _load() -> None:
    from specgov.sglang_plugin import versions
    from specgov.sglang_plugin.errors import PluginError
    from specgov.sglang_plugin.settings import read_settings

    settings = read_settings(os.environ)
    if settings is None:
        _LOG.warning("Specgov is off: its mode is off")
        return
    version = versions.installed_version()
    if versions.parse_version(version) < versions.OLDEST:
        oldest = ".".join(map(str, versions.OLDEST))
        raise PluginError(f"SGLang {version} cannot turn speculation off in a step: use {oldest} or newer")
    if missing := versions.missing_targets():
        raise PluginError(
            f"SGLang {version} lacks {', '.join(missing)}: this release of Specgov does not know it; unset "
            "SPECGOV_TARGET to start without"
        )
    _register(settings)


def _register(settings: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from specgov.sglang_plugin import versions
    from specgov.sglang_plugin.hooks import Hooks
    from specgov.sglang_plugin.runtime import Runtime

    runtime = Runtime(settings)
    hooks = Hooks(runtime)
    HookRegistry.register(versions.POLICY_CLASS, _policy_class(runtime), HookType.REPLACE)
    HookRegistry.register(versions.RESULTS, hooks.around_result, HookType.AROUND)
    HookRegistry.register(versions.BROADCAST, hooks.around_broadcast, HookType.AROUND)
    HookRegistry.register(versions.EVENT_LOOP, hooks.around_event_loop, HookType.AROUND)
    HookRegistry.register(versions.START_CHECK, _start_check(settings), HookType.AROUND)


def _policy_class(runtime: Runtime) -> type[Any]:
    """A class for the place of SGLang's ``AdaptiveSpeculativeParams``; the latter stays as its rule."""
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams as EnginesRule

    class GovernedParams:
        """What SGLang makes with its own arguments, and gets a ``GovernedPolicy``."""

        def __new__(cls, initial_steps: int, cfg_path: str | None = None) -> Any:
            return runtime.make_policy(
                EnginesRule(initial_steps=initial_steps, cfg_path=cfg_path), initial_steps
            )

    return GovernedParams


def _start_check(settings: Settings) -> Any:
    def around_check(original: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang checks its arguments in the launcher, before a model is loaded; ours come after its own."""
        from specgov.sglang_plugin.hooks import check_start

        result = original(server_args, *args, **kwargs)
        check_start(settings, server_args)
        return result

    return around_check
