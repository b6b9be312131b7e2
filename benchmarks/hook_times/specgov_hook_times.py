"""An SGLang plugin for benchmarks/server_hooks.py: what Specgov's hooks and SGLang's broadcast take.

``SPECGOV_HOOK_TIMES`` names a folder; ``times.RANK.jsonl`` there gets a line for each decode step when the
scheduler's loop ends. Nothing is written before, and a line costs the scheduler a microsecond or two.
"""

import functools
import json
import os
import time
from pathlib import Path


class Times:
    """Of one scheduler process: the step that is being made, and those that were."""

    def __init__(self):
        self.rows = []
        self.rank = 0
        self._last_iteration = -1
        self._last_s = 0.0
        self._batch = None
        self._start()

    def _start(self):
        self.own_s = 0.0  # in what Specgov's hooks call
        self.broadcast_s = 0.0
        self.rider = False

    def result(self, batch):
        self._batch = batch

    def end_step(self):
        """After the result and all hooks around it: a row where it was a decode step right after another."""
        batch, self._batch = self._batch, None
        now_s = time.perf_counter()
        if batch is not None and batch.forward_mode.is_decode():
            if batch.forward_iter == self._last_iteration + 1:
                step_s = now_s - self._last_s
                self.rows.append((len(batch.reqs), step_s, self.own_s, self.broadcast_s, self.rider))
            self._last_iteration = batch.forward_iter
        else:
            self._last_iteration = -1
        self._last_s = now_s
        self._start()

    def write(self):
        lines = [
            json.dumps(
                {
                    "batch_size": size,
                    "step_us": 1e6 * step,
                    "own_us": 1e6 * own,
                    "broadcast_us": 1e6 * wait,
                    "rider": rider,
                }
            )
            for size, step, own, wait, rider in self.rows
        ]
        folder = Path(os.environ["SPECGOV_HOOK_TIMES"])
        (folder / f"times.{self.rank}.jsonl").write_text("\n".join(lines) + "\n")


def load():
    if os.environ.get("SPECGOV_HOOK_TIMES"):
        times = Times()
        _wrap_sglang(times)
        if os.environ.get("SPECGOV_TARGET"):
            _wrap_specgov(times)


def _wrap_sglang(times):
    """Innermost: what the hooks of any plugin wrap."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    from specgov.sglang_plugin.versions import ranks_of

    def broadcast(original, self, *args, **kwargs):
        started_s = time.perf_counter()
        received = original(self, *args, **kwargs)
        times.broadcast_s = time.perf_counter() - started_s
        times.rider = bool(received) and type(received[0]) is tuple
        return received

    def result(original, self, batch, *args, **kwargs):
        returned = original(self, batch, *args, **kwargs)
        times.result(batch)
        if not os.environ.get("SPECGOV_TARGET"):
            times.end_step()
        return returned

    def loop(original, self, *args, **kwargs):
        times.rank = ranks_of(self).tp_rank
        try:
            return original(self, *args, **kwargs)
        finally:
            times.write()

    _replace(SchedulerRequestReceiver, "_broadcast_reqs_across_ranks", broadcast)
    _replace(Scheduler, "process_batch_result", result)
    _replace(Scheduler, "run_event_loop", loop)


def _wrap_specgov(times):
    """What the hooks call, since they may be registered already; their own few calls are not counted."""
    from specgov.sglang_plugin.policy import GovernedPolicy
    from specgov.sglang_plugin.runtime import Runtime

    def timed(original, *args, **kwargs):
        started_s = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            times.own_s += time.perf_counter() - started_s

    def ends(original, *args, **kwargs):
        timed(original, *args, **kwargs)
        times.end_step()

    for name in ("before_broadcast", "after_broadcast", "before_result"):
        _replace(Runtime, name, timed)
    _replace(Runtime, "after_result", ends)
    for name in ("get_steps_for_batch", "on_verify_complete"):
        _replace(GovernedPolicy, name, timed)


def _replace(holder, name, wrapper):
    original = getattr(holder, name)

    @functools.wraps(original)
    def replacement(self, *args, **kwargs):
        return wrapper(original, self, *args, **kwargs)

    setattr(holder, name, replacement)
