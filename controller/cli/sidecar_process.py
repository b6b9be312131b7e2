"""A sidecar of one's own, for as long as a command runs."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from specgov.controller.cli.errors import CliError, UnreachableError
from specgov.controller.cli.remote import require_serving

START_S = 20.0
"""How long a sidecar may take until it serves."""
STOP_S = 5.0
_POLL_S = 0.05


@contextlib.contextmanager
def sidecar_process(folder: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Start ``specgov serve`` on a socket in ``folder``, and stop it at the end.

    It is out of reach of the terminal's Ctrl-C, so that it can be stopped after its engine; a SIGTERM to this
    process ends it too. What it says goes to ``sidecar.log`` in the folder.

    Args:
        folder: a private one, short enough for a socket's path.
        options: further options of ``specgov serve``.

    Yields:
        The target.

    Raises:
        CliError: it ends at once or does not serve in time; with its last words.

    """
    target, log = f"unix://{folder}/specgov.sock", folder / "sidecar.log"
    command = [sys.executable, "-m", "specgov.controller.cli.main", "serve", "--listen", target, *options]
    with log.open("w") as said, _exit_on_sigterm():
        process = subprocess.Popen(  # noqa: S603 our own program
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            _wait_until_serving(process, target, log)
            yield target
        finally:
            _stop(process)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind this process, so that what it has started is stopped; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_serving(process: subprocess.Popen[bytes], target: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise CliError(f"the sidecar ended at once: {_last_line(log)}")
        with contextlib.suppress(UnreachableError):
            return require_serving(target)
        time.sleep(_POLL_S)
    raise CliError(f"the sidecar does not serve within {START_S:g} s: {_last_line(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
