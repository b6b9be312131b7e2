"""What the plugin costs SGLang's scheduler thread in two checkouts, which take turns.

    python benchmarks/plugin_cost_since.py BEFORE [--after CHECKOUT] [-o out/plugin_since.json]

``BEFORE`` and ``--after`` (this checkout by default) are checkouts, such as ``git worktree add`` makes. Each
plays ``plugin_cost.py``'s engine in a process of its own, against one sidecar; they take turns of
``BLOCK_STEPS`` steps, a fraction of a second each, so that what else the machine does meets both alike.

Between steps a caller works: *warm* by a little Python and numpy, after which the hooks' code and data are
still in the caches; *cold* by ``STEP_S`` of JSON, dictionaries and arrays larger than a core's caches, as a
scheduler's own step leaves them. Given are medians over all steps in µs. A third process takes its turns with
hooks that do nothing: what it takes is the measuring's, and taken off before and after. Of the ratios after
over before within a round of turns the median and the range are given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
import plugin_cost
from hot_path_since import commit
from own_work import imported_from

BATCH_SIZES = (1, 8, 64, 256)
BLOCK_STEPS = 40
WARM_UP_STEPS = 5
"""Of each turn; not counted."""
STEP_S = 0.006
BARE = "bare"
_ARRAY = np.random.default_rng(0).random(1_000_000)
_TEXT = json.dumps({str(i): [i, {"name": str(i)}] for i in range(400)})
_OBJECTS = [{key: str(key) for key in range(20)} for _ in range(3000)]


@dataclass(frozen=True)
class SinceCell:
    """Microseconds in the hooks in a step, p50, without the measuring's; ratios are over rounds of turns."""

    caller: str
    batch_size: int
    measuring_us: float
    before_us: float
    after_us: float
    ratio: float
    ratio_low: float
    ratio_high: float


def work_cold() -> None:
    """Go through more code and data than a core's caches hold, for ``STEP_S``."""
    until_s = time.perf_counter() + STEP_S
    while time.perf_counter() < until_s:
        json.loads(_TEXT)
        sum(len(thing[3]) for thing in _OBJECTS)
        np.sort(_ARRAY[:20_000])
        (2.0 * _ARRAY).sum()


def work_warm() -> None:
    """Some Python and numpy that fits in the caches."""
    plugin_cost.work(20)


CALLERS: dict[str, Callable[[], None]] = {"warm": work_warm, "cold": work_cold}


class NoHooks:
    """In the place of the hooks and of the policy: they do nothing."""

    def around_broadcast(self, original: Callable[..., Any], *arguments: Any) -> Any:
        return original(*arguments)

    def around_result(self, original: Callable[..., Any], *arguments: Any) -> Any:
        return original(*arguments)

    def get_steps_for_batch(self, _: int) -> int:
        return 3

    def on_verify_complete(self, *_: Any) -> None:
        pass


class BareEngine(plugin_cost.Engine):
    """The same steps without the plugin, measured alike."""

    def __init__(self, batch_size: int, client: str, target: str) -> None:
        super().__init__(batch_size, client, target)
        self._hooks = self._policy = NoHooks()  # type: ignore[assignment]

    def serve(self, loop: Callable[[], None]) -> None:
        loop()

    def wait_until_connected(self) -> None:
        pass


def play(kind: str, caller: str, batch_size: int, target: str) -> None:
    """In a process of one checkout: a turn for each line of the input; says each step's time in µs."""
    make = BareEngine if kind == BARE else plugin_cost.Engine
    engine = make(batch_size, "relay", target)

    def turn() -> list[float]:
        spent = []
        for _ in range(WARM_UP_STEPS + BLOCK_STEPS):
            spent.append(1e6 * engine.step())
            CALLERS[caller]()
        return spent[WARM_UP_STEPS:]

    def loop() -> None:
        engine.wait_until_connected()
        for _ in sys.stdin:
            print(json.dumps(turn()), flush=True)

    engine.serve(loop)


@contextlib.contextmanager
def player(checkout: Path, *arguments: str) -> Iterator[Callable[[], list[float]]]:
    """A process that plays a checkout's engine; what is given plays a turn."""
    with imported_from(checkout) as environment:
        command = [sys.executable, __file__, "--play", *arguments]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        asks, answers = child.stdin, child.stdout

        def turn() -> list[float]:
            print(file=asks, flush=True)
            return list(map(float, json.loads(answers.readline())))

        try:
            yield turn
        finally:
            child.communicate()  # the end of its input ends it


def compare(checkouts: list[Path], caller: str, batch_size: int, turns: int, target: str) -> SinceCell:
    """Before, after and without the hooks, in turn."""
    kinds = {"before": checkouts[0], "after": checkouts[1], BARE: checkouts[1]}
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        players = {
            kind: stack.enter_context(player(checkout, kind, caller, str(batch_size), target))
            for kind, checkout in kinds.items()
        }
        for turn in players.values():
            turn()
        for number in range(turns):
            for kind in sorted(players, reverse=number % 2 == 0):
                times[kind].append(players[kind]())
    measuring_us = np.median(times[BARE])
    before, after = (np.array(times[kind]) - measuring_us for kind in ("before", "after"))
    ratios = np.median(after, axis=1) / np.median(before, axis=1)
    figures = measuring_us, np.median(before), np.median(after), np.median(ratios), ratios.min(), ratios.max()
    return SinceCell(caller, batch_size, *map(float, figures))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare what the plugin costs in two checkouts.")
    parser.add_argument("before", nargs="?", type=Path, help="checkout of the commit before")
    parser.add_argument("--after", type=Path, default=Path(__file__).parent.parent, help="the other checkout")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--callers", nargs="+", choices=CALLERS, default=list(CALLERS))
    parser.add_argument("--turns", type=int, default=20, help="of each checkout, for a caller and batch size")
    parser.add_argument("-o", "--output", type=Path, help="JSON file for the figures")
    parser.add_argument(
        "--play", nargs=4, metavar=("KIND", "CALLER", "SIZE", "TARGET"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.play:
        kind, caller, size, target = arguments.play
        play(kind, caller, int(size), target)
        return
    if arguments.before is None:
        parser.error("name the checkout of the commit before")
    checkouts = [arguments.before, arguments.after]
    facts = machine.facts(("grpcio", "protobuf", "numpy"))
    print(machine.describe(facts))
    cells: list[SinceCell] = []
    with plugin_cost.sidecar() as target:
        for caller in arguments.callers:
            for size in arguments.batch_sizes:
                cell = compare(checkouts, caller, size, arguments.turns, target)
                plugin_cost.show(cell, not cells)
                cells.append(cell)
    if arguments.output is not None:
        document = {
            "machine": facts,
            "commits": [commit(checkout) for checkout in checkouts],
            "cells": [asdict(cell) for cell in cells],
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
