"""SGLang 0.5.9's server under Specgov: ``python -m specgov.sglang_plugin.v059.server ARGUMENTS``.

0.5.9 loads no plugins, and makes its scheduler processes with multiprocessing's spawn, which runs the main
module's top again in each of them, under the name ``__mp_main__``. So this module sets the hooks at its top,
and then runs SGLang's own. ``specgov sglang launch`` starts it, after its checks.
"""

from __future__ import annotations

import os
import runpy

if __name__ in ("__main__", "__mp_main__"):
    from specgov.sglang_plugin.errors import PluginError
    from specgov.sglang_plugin.v059.governor import install

    try:
        install(os.environ)
    except PluginError as error:
        raise SystemExit(f"specgov: {error}") from error

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
