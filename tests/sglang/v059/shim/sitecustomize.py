"""Python runs this at its start: what SGLang 0.5.9 lacks on a CPU, put into its modules as they are imported.

0.5.9 has no plugins, and its scheduler processes are new interpreters, so a server that was started by
``specgov sglang launch`` is reached in no other way. Nothing is imported before SGLang imports it.
"""

import importlib.abc
import importlib.machinery
import sys


def server_args(module):
    import torch

    module.cpu_has_amx_support = lambda: True  # lets --attention-backend intel_amx stand
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.empty_cache = lambda *_, **__: None
    torch.Tensor.record_stream = lambda tensor, stream: None  # the overlap loop of EAGLEWorkerV2


def attention(module):
    import torch

    class WithVerify(module.IntelAMXAttnBackend):
        """Adds the verify of a chain, extends without lengths, and the later steps of a draft."""

        step_offset = 0

        def init_forward_metadata(self, forward_batch):
            mode, spec = forward_batch.forward_mode, forward_batch.spec_info
            self._lens = None
            if mode.is_target_verify() or (
                mode.is_draft_extend(include_v2=True) and forward_batch.extend_seq_lens is None
            ):
                n = spec.draft_token_num if mode.is_target_verify() else spec.num_tokens_per_req
                size = forward_batch.batch_size
                forward_batch.extend_seq_lens = torch.full((size,), n, dtype=torch.int32)
                forward_batch.extend_start_loc = torch.arange(0, size * n, n, dtype=torch.int32)
                self._lens = forward_batch.seq_lens + n * mode.is_target_verify()
            super().init_forward_metadata(forward_batch)

        def forward_extend(self, q, k, v, layer, forward_batch, *args, **kwargs):
            kept = forward_batch.seq_lens
            forward_batch.seq_lens = kept if self._lens is None else self._lens
            try:
                return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)
            finally:
                forward_batch.seq_lens = kept

        def forward_decode(self, q, k, v, layer, forward_batch, *args, **kwargs):
            kept = forward_batch.seq_lens
            forward_batch.seq_lens = kept + self.step_offset
            try:
                return super().forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
            finally:
                forward_batch.seq_lens = kept

    module.IntelAMXAttnBackend = WithVerify


class DraftSteps:
    """An attention backend for each step of a draft."""

    def __init__(self, runner, num_steps):
        from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

        self.attn_backends = [IntelAMXAttnBackend(runner) for _ in range(num_steps - 1)]
        for number, backend in enumerate(self.attn_backends):
            backend.step_offset = number + 1

    def init_forward_metadata(self, forward_batch):
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def draft_backends(module):
    def decode(factory):
        steps = factory.speculative_num_steps
        return DraftSteps(factory.draft_model_runner, steps) if steps > 1 else None

    def draft_extend(factory):
        from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

        return IntelAMXAttnBackend(factory.draft_model_runner)

    module.DraftBackendFactory.create_decode_backend = decode
    module.DraftBackendFactory.create_draft_extend_backend = draft_extend


def tree_kernels(module):
    import sgl_kernel

    module.sgl_build_tree_kernel_efficient = sgl_kernel.build_tree_kernel_efficient
    module._is_cuda = True  # the branch that calls sgl_kernel's verify_tree_greedy


def cache_locations(module):
    module._is_cuda = True  # elsewhere a CPU gets no locations at all


def grammars(module):
    from xgrammar import apply_token_bitmask_inplace

    # SGLang asks for it on a CPU, and never sets it.
    module.XGrammarGrammar.apply_vocab_mask_cpu = staticmethod(apply_token_bitmask_inplace)


def trace(module):
    import steps_trace

    steps_trace.start(module)


def failures(module):
    import steps_trace

    steps_trace.fail_on_request(module)


PATCHES = {
    "sglang.srt.server_args": server_args,
    "sglang.srt.layers.attention.intel_amx_backend": attention,
    "sglang.srt.speculative.draft_utils": draft_backends,
    "sglang.srt.speculative.eagle_utils": tree_kernels,
    "sglang.srt.speculative.eagle_info_v2": cache_locations,
    "sglang.srt.constrained.xgrammar_backend": grammars,
    "sglang.srt.managers.scheduler": trace,
    "specgov.sglang_plugin.observe": failures,
}


class _Patching(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        patch = PATCHES.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Patching())
