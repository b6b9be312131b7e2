"""An SGLang plugin for tests: a rule of ours decides in a real server, and each call is written down.

``SPECGOV_TEST_RULE`` names the rule, ``SPECGOV_TEST_TRACE`` the file: a JSON line for each launch (batch
size, tier) and each result (batch size, accepted drafts).
"""

import json
import os
import time

import numpy as np

from specgov.policies.registry import make_policy
from specgov.policies.types import PolicyContext
from specgov.sglang_plugin.adaptive_policy import AdaptivePolicy


class TracedPolicy:
    """What SGLang makes in place of its AdaptiveSpeculativeParams."""

    def __init__(self, initial_steps, cfg_path=None):
        from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

        tiers = resolve_candidate_steps_from_config(cfg_path)
        # There is no overlap loop on a CPU, so a result comes before the next launch.
        self._policy = AdaptivePolicy(initial_steps, tiers, make_rule, decision_lag_steps=1)
        self._trace = open(os.environ["SPECGOV_TEST_TRACE"], "a", buffering=1)  # noqa: PTH123, SIM115 for the process's life

    @property
    def candidate_steps(self):
        return self._policy.candidate_steps

    def set_cuda_graph_bs(self, cuda_graph_bs):
        self._policy.set_cuda_graph_bs(cuda_graph_bs)

    def cuda_graph_bs_for_step(self, step):
        return self._policy.cuda_graph_bs_for_step(step)

    def get_steps_for_batch(self, batch_size):
        num_steps = self._policy.get_steps_for_batch(batch_size)
        self._write(batch_size=batch_size, num_steps=num_steps)
        return num_steps

    def on_verify_complete(self, num_correct_drafts_per_req, batch_size):
        self._write(batch_size=batch_size, accepted=list(num_correct_drafts_per_req))
        return self._policy.on_verify_complete(num_correct_drafts_per_req, batch_size)

    def _write(self, **line):
        self._trace.write(json.dumps(line) + "\n")


def make_rule(engine):
    context = PolicyContext(engine, np.random.default_rng(0), time.monotonic)
    return make_policy(os.environ["SPECGOV_TEST_RULE"], context)


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams"
    HookRegistry.register(target, TracedPolicy, HookType.REPLACE)
