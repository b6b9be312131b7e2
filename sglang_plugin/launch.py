"""Starts an SGLang server with the plugin on, once the doctor has nothing against its arguments.

As a program, in SGLang's environment, with the server's own arguments after ``--``:
``python -m specgov.sglang_plugin.launch [--target TARGET] -- ARGUMENTS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from specgov.sglang_plugin import report, v059, versions
from specgov.sglang_plugin.doctor import SIDECAR, diagnose, split_arguments
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.report import Check
from specgov.sglang_plugin.settings import TARGET_VARIABLE, is_switched_off

_ADAPTIVE = "--speculative-adaptive"
_NUM_STEPS = "--speculative-num-steps"
_TABLE = "--speculative-adaptive-config"


def additions(arguments: Sequence[str]) -> list[str]:
    """The flags that adaptive tiers need and ``arguments`` lack; they belong in front, so that others count.

    On the releases that size a buffer for the initial tier that is the largest one, unless the arguments name
    one or a configuration file may.
    """
    version = versions.parse_version(versions.installed_version())
    if version == v059.RELEASE:
        return []
    added = [] if _value(arguments, _ADAPTIVE) is not None else [_ADAPTIVE]
    first, last = versions.INITIAL_MUST_BE_LARGEST
    sized = first <= version <= last
    if sized and _value(arguments, _NUM_STEPS) is None and _value(arguments, "--config") is None:
        try:
            largest = max(versions.engine_tiers(_value(arguments, _TABLE)))
        except (OSError, ValueError, AttributeError):
            return added  # the doctor has the words for it
        added += [_NUM_STEPS, str(largest)]
    return added


def start(
    arguments: Sequence[str], environment: Mapping[str, str], show: Callable[[Sequence[Check]], object]
) -> int:
    """Check, show the checks, and become the server; returns, with 1, only where a check failed.

    A sidecar that does not answer yet is shown and does not stop the server: until it answers the plugin's
    fallback rule decides. Where the settings switch the plugin off, no check counts and nothing is added: the
    server starts as it would without Specgov.
    """
    if _is_switched_off(environment):
        sys.stdout.write("the mode is off: the server starts without Specgov, with its arguments as given\n")
        return _become_server(arguments, environment)
    try:
        added = additions(arguments)
    except PluginError:
        added = []
    complete = [*added, *arguments]
    checks = diagnose(complete, environment)
    show(checks)
    if report.exit_code(check for check in checks if check.name != SIDECAR):
        sys.stderr.write("specgov: the server is not started; correct what failed above\n")
        return 1
    target = environment.get(TARGET_VARIABLE, "")
    sys.stdout.write(f"added: {' '.join(added) or 'no flag'}{target and f'; {TARGET_VARIABLE}={target}'}\n")
    if report.exit_code(checks):
        sys.stdout.write("the fallback rule decides until the sidecar answers\n")
    return _become_server(complete, environment)


def _is_switched_off(environment: Mapping[str, str]) -> bool:
    try:
        return is_switched_off(environment)
    except PluginError:
        return False  # the doctor has the words for it


def _become_server(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process, so that signals and the exit code are the server's."""
    sys.stdout.flush()
    sys.stderr.flush()
    old = versions.parse_version(versions.installed_version()) == v059.RELEASE
    module = v059.SERVER_MODULE if old else "sglang.launch_server"
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)  # noqa: S606


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """What follows a flag, as in ``--flag value`` and ``--flag=value``; "" at the end, None without it."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            return value if equals else "".join(arguments[index + 1 : index + 2])
    return None


def main(arguments: Sequence[str]) -> int:
    """Check and become the server; 1 where a check failed, 2 for wrong usage."""
    try:
        target, servers = split_arguments(arguments, "python -m specgov.sglang_plugin.launch")
    except PluginError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if target is not None:
        os.environ[TARGET_VARIABLE] = target
    return start(servers, os.environ, report.print_checks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
