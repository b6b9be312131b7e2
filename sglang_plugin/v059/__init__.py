"""SGLang 0.5.9, which has neither plugins nor tiers: the steps, the hooks and the checks for it.

Sources: the wheel of SGLang 0.5.9; line numbers are that wheel's, under sglang/srt/.
"""

from __future__ import annotations

from specgov.sglang_plugin.versions import Version

RELEASE: Version = (0, 5, 9)
"""The one release that this part is for."""
SERVER_MODULE = "specgov.sglang_plugin.v059.server"
"""What is started in the place of ``sglang.launch_server``: it sets the hooks in every process."""
