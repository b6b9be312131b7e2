"""Writes down what SGLang 0.5.9 does in each decode step, seen at its own functions and not through Specgov.

``SPECGOV_TEST_TRACE`` is a folder; ``steps.RANK.jsonl`` in it gets a line for each processed decode result:
the tier, from how many tokens for each request the target was given; the drafts that it was given to verify;
how many of them were accepted. With the file ``cold`` in the folder a step without drafts leaves the draft's
KV cache as it was: a mistake, which tests must find. With the file ``fail`` in it every report raises.
"""

import contextlib
import json
import os
from pathlib import Path

FOLDER = os.environ.get("SPECGOV_TEST_TRACE")


def start(scheduler_module):
    if not FOLDER:
        return
    from sglang.srt.model_executor.model_runner import ModelRunner

    scheduler, seen = scheduler_module.Scheduler, {}
    forward, run_batch, process = ModelRunner.forward, scheduler.run_batch, scheduler.process_batch_result

    def traced_forward(runner, batch, *args, **kwargs):
        decodes = batch.forward_mode.is_target_verify() or batch.forward_mode.is_decode()
        if decodes and not runner.is_draft_worker:
            size = batch.batch_size
            assert runner.graph_runner is None or batch.forward_mode.is_target_verify()
            seen["tokens"] = batch.input_ids.view(size, -1).tolist()
        extends = batch.forward_mode.is_draft_extend(include_v2=True)
        if extends and len(seen["tokens"][0]) == 1 and (Path(FOLDER) / "cold").exists():
            with writes_lost(runner.token_to_kv_pool):
                return forward(runner, batch, *args, **kwargs)
        return forward(runner, batch, *args, **kwargs)

    def traced_run(self, batch, *args, **kwargs):
        step_id, decodes = self.forward_ct + 1, batch.forward_mode.is_decode()
        requests = list(batch.reqs)
        before = counts(requests)
        result = run_batch(self, batch, *args, **kwargs)
        if decodes:
            result.traced = (step_id, seen.pop("tokens"), None if self.enable_overlap else before)
        return result

    def traced_process(self, batch, result, *args, **kwargs):
        traced = getattr(result, "traced", None)
        if traced is None:
            return process(self, batch, result, *args, **kwargs)
        step_id, tokens, before = traced
        live = [r.rid for r in batch.reqs if before is not None or not (r.finished() or r.is_retracted)]
        before = before or counts(batch.reqs)
        returned = process(self, batch, result, *args, **kwargs)
        line = {
            "step_id": step_id,
            "num_steps": len(tokens[0]) - 1,
            "ids": [r.rid for r in batch.reqs],
            "live": live,
            "accepted": [after - n for after, n in zip(counts(batch.reqs), before, strict=True)],
            "last": [row[0] for row in tokens],  # the newest token of each request, that the drafts follow
            "drafts": [row[1:] for row in tokens],
        }
        if "file" not in seen:
            seen["file"] = (Path(FOLDER) / f"steps.{self.tp_rank}.jsonl").open("a", buffering=1)
        seen["file"].write(json.dumps(line) + "\n")
        return returned

    ModelRunner.forward, scheduler.run_batch = traced_forward, traced_run
    scheduler.process_batch_result = traced_process


def counts(requests):
    return [request.spec_accepted_tokens for request in requests]


@contextlib.contextmanager
def writes_lost(pool):
    """What is written to a KV cache meanwhile is lost."""
    pool.set_kv_buffer = lambda *_, **__: None
    try:
        yield
    finally:
        del pool.set_kv_buffer


def fail_on_request(module):
    after = module.Observer.after

    def failing(self, *args):
        if FOLDER and (Path(FOLDER) / "fail").exists():
            raise RuntimeError("made to fail")
        return after(self, *args)

    module.Observer.after = failing
