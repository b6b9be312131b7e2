"""An SGLang plugin for tests: lets ``--attention-backend intel_amx`` stand on a CPU without AMX.

The stand-in for sgl_kernel has the attention operations in torch and no weight packing, so that every layer
keeps its plain torch path.
"""


def load():
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()
