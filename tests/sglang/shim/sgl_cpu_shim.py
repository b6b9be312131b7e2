"""An SGLang plugin for tests: lets ``--attention-backend intel_amx`` stand on a CPU without AMX.

The stand-in for sgl_kernel has the attention operations in torch and no weight packing, so that every layer
keeps its plain torch path.
"""


def load():
    try:
        from sglang.srt.runtime_context import override_platform
    except ImportError:  # 0.5.16
        import sglang.srt.arg_groups.overrides as overrides

        overrides.cpu_has_amx_support = lambda: True
        return
    override_platform(has_amx=True).install()
