"""An SGLang plugin for tests: writes down what a server does, and breaks Specgov's plugin on request.

``SPECGOV_TEST_TRACE`` is a folder. ``launches.PID.jsonl`` has what our policy was asked and told, and
``steps.RANK.jsonl`` what SGLang itself then did, seen at its own result and not through our plugin.

Once the file ``fail`` is in the folder every report raises. With ``SPECGOV_TEST_UNSHARED=1`` rank 0 applies
orders without telling the other ranks.
"""

import json
import os
from pathlib import Path

FOLDER = os.environ.get("SPECGOV_TEST_TRACE")


class Lines:
    """A file of JSON lines, opened with the first of them."""

    def __init__(self, name):
        self._name = name
        self._file = None

    def write(self, **line):
        if self._file is None:
            self._file = (Path(FOLDER) / self._name).open("a", buffering=1)
        self._file.write(json.dumps(line) + "\n")


def trace_policy():
    from specgov.sglang_plugin.policy import GovernedPolicy

    lines = Lines(f"launches.{os.getpid()}.jsonl")
    choose, learn = GovernedPolicy.get_steps_for_batch, GovernedPolicy.on_verify_complete

    def get_steps_for_batch(self, batch_size):
        num_steps = choose(self, batch_size)
        launch = self._launched[-1]
        lines.write(
            batch_size=batch_size, num_steps=num_steps, kind=launch.kind.name, decision_id=launch.decision_id
        )
        return num_steps

    def on_verify_complete(self, num_correct_drafts_per_req, batch_size):
        lines.write(batch_size=batch_size, accepted=list(num_correct_drafts_per_req))
        return learn(self, num_correct_drafts_per_req, batch_size)

    GovernedPolicy.get_steps_for_batch = get_steps_for_batch
    GovernedPolicy.on_verify_complete = on_verify_complete


def trace_steps():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from specgov.sglang_plugin.versions import ranks_of

    state = {}

    def around(original, scheduler, batch, result, *args, **kwargs):
        decode = batch.forward_mode.is_decode()
        live = [r.rid for r in batch.reqs if not (r.finished() or r.is_retracted)] if decode else []
        returned = original(scheduler, batch, result, *args, **kwargs)
        if decode:
            if "lines" not in state:
                state["lines"] = Lines(f"steps.{ranks_of(scheduler).tp_rank}.jsonl")
            width = result.speculative_num_draft_tokens
            accepted = list(result.num_correct_drafts_per_req_cpu)
            state["lines"].write(
                step_id=batch.forward_iter,
                num_steps=width - 1,
                ids=[r.rid for r in batch.reqs],
                live=live,
                accepted=accepted,
            )
        return returned

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result", around, HookType.AROUND
    )


def fail_on_request():
    from specgov.sglang_plugin.observe import Observer

    after = Observer.after

    def failing(self, *args):
        if (Path(FOLDER) / "fail").exists():
            raise RuntimeError("made to fail")
        return after(self, *args)

    Observer.after = failing


def unshare():
    from specgov.sglang_plugin.orders import RankShare

    def attach(self, requests, wanted):
        self.in_force = wanted
        return requests

    RankShare.attach = attach


def load():
    if not FOLDER:
        return
    trace_policy()
    trace_steps()
    fail_on_request()
    if os.environ.get("SPECGOV_TEST_UNSHARED"):
        unshare()
