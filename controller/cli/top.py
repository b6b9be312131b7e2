"""``specgov top``: the engines live, in a terminal."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from types import FrameType

import grpc
from rich.console import Console
from rich.live import Live

from specgov.controller.cli import options, output, remote
from specgov.controller.cli.errors import CliError, UsageError
from specgov.controller.cli.top_state import TopState
from specgov.controller.cli.top_view import plain_lines, screen
from specgov.proto.v1 import specgov_pb2, specgov_pb2_grpc

Show = Callable[[TopState], None]
Wait = Callable[[], object]


def top(
    *,
    interval_s: float = 1.0,
    window_s: float = 10.0,
    every_steps: int = 10,
    once: bool = False,
    target: remote.Target = None,
) -> None:
    """Show the engines live: batch, tier, accept length, output rate, gain, lag, round trip, reasons.

    For example: specgov top --target unix:///run/specgov/specgov.sock

    batch, wait, KV% and k (num_steps) are those of the newest step, the rest means over the window: accept
    (accept length, of steps that speculate), tok/s (output rate while steps are made), gain~ (output rate
    beyond the baseline's, as the policy's model estimates both), lag (decision lag, steps), rt ms (round
    trip from report to decision, as the engine measures it), lost (reports dropped), reasons (why tiers were
    chosen). A wider terminal shows more columns. Ctrl-C ends it. When the sidecar goes away it says so and
    waits for it. Where the output is no terminal, a line an engine and interval.

    Args:
        interval_s: Seconds between looks.
        window_s: Seconds over which means are taken.
        every_steps: Look at one step in this many.
        once: Look for one interval, print a table and end. Exit code 3 if no sidecar answers.
        target: Where the sidecar listens; default: SPECGOV_TARGET, else its own default socket.

    """
    if not (0.1 <= interval_s <= 3600 and interval_s <= window_s < math.inf):
        raise UsageError("top: --interval-s must be 0.1 to 3600, and --window-s at least as long")
    where = remote.target_or_default(target)
    request = specgov_pb2.WatchRequest(every_steps=options.non_negative("--every-steps", every_steps))
    state = TopState(window_s, time.monotonic)
    if once:
        look_once(state, where, request, lambda: time.sleep(interval_s))
        console = output.console()
        console.print(screen(state, where, _time_of_day(), console.width, lines=None))
        return
    with contextlib.suppress(KeyboardInterrupt), _shown(where) as show, _woken_by_resize(interval_s) as wait:
        follow(state, where, request, show, wait)


def look_once(state: TopState, target: str, request: specgov_pb2.WatchRequest, wait: Wait) -> None:
    """Follow the steps for one interval.

    Raises:
        CliError: the sidecar cannot be asked.

    """
    with remote.sidecar(target) as channel, _watching(state, channel, request):
        _list(state, channel)
        wait()
        _list(state, channel)


def follow(state: TopState, target: str, request: specgov_pb2.WatchRequest, show: Show, wait: Wait) -> None:
    """Show what there is, for ever; a sidecar that goes away is waited for."""
    while True:
        try:
            # A channel of its own each time: one that lost its peer would wait ever longer to try again.
            with remote.sidecar(target) as channel, _watching(state, channel, request) as watching:
                while True:
                    _list(state, channel)
                    show(state)
                    wait()
                    if not watching():
                        break
                    state.watch_problem = ""
        except UsageError:
            raise
        except CliError as error:
            state.lost(str(error))
            show(state)
            wait()


def _list(state: TopState, channel: grpc.Channel) -> None:
    stub = specgov_pb2_grpc.ControllerAdminStub(channel)
    answer = stub.ListEngines(specgov_pb2.ListEnginesRequest(), timeout=remote.TIMEOUT_S)
    state.listed(answer.engines)


@contextlib.contextmanager
def _watching(
    state: TopState, channel: grpc.Channel, request: specgov_pb2.WatchRequest
) -> Iterator[Callable[[], bool]]:
    """Take the steps in on another thread; gives a function that says whether it still does."""
    steps = specgov_pb2_grpc.ControllerAdminStub(channel).Watch(request)

    def take() -> None:
        try:
            for step in steps:
                state.stepped(step)
        except grpc.RpcError:
            code, details = steps.code(), steps.details()
            if code not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
                state.watch_problem = f"{details} ({code.name})"

    thread = threading.Thread(target=take, name="specgov-top", daemon=True)
    thread.start()
    try:
        yield thread.is_alive
    finally:
        steps.cancel()
        thread.join(remote.TIMEOUT_S)


@contextlib.contextmanager
def _shown(target: str) -> Iterator[Show]:
    """A full screen on a terminal, restored at the end; else lines."""
    console = Console(highlight=False)  # without a width of its own: the terminal may be resized
    if not console.is_terminal:

        def print_lines(state: TopState) -> None:
            for line in plain_lines(state, _time_of_day()):
                output.print_line(line)

        yield print_lines
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def draw(state: TopState) -> None:
            size = console.size
            live.update(screen(state, target, _time_of_day(), size.width, size.height), refresh=True)

        yield draw


@contextlib.contextmanager
def _woken_by_resize(interval_s: float) -> Iterator[Wait]:
    """Waiting for the interval, or until the terminal's size changes; main thread only."""
    woken = threading.Event()

    def wake(_number: int, _frame: FrameType | None) -> None:
        woken.set()

    def wait() -> None:
        woken.wait(interval_s)
        woken.clear()

    before = signal.signal(signal.SIGWINCH, wake) if sys.stdout.isatty() else None
    try:
        yield wait
    finally:
        if before is not None:
            signal.signal(signal.SIGWINCH, before)


def _time_of_day() -> str:
    return datetime.now().strftime("%H:%M:%S")
