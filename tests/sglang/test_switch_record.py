"""SGLang's own record of settings that it changed, through 100,000 switches of tiers."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from specgov.sglang_plugin import versions
from specgov.sglang_plugin.switch_log import SwitchLines, trim

pytestmark = pytest.mark.sglang

SWITCHES = 100_000


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def switch(context: object, number: int, *, trimmed: bool) -> None:
    """What ``apply_runtime_state`` of SGLang's worker records and logs, and what our policy does then."""
    steps = number % 2
    logging.getLogger(versions.SWITCH_LOGGER).info(
        "Switch adaptive runtime state: steps %d -> %d", 1 - steps, steps
    )
    fields = {"speculative_num_steps": steps, "speculative_num_draft_tokens": steps + 1}
    context.override("adaptive_spec.restore", **fields)
    if trimmed:
        for record in versions.switch_records(None):
            trim(record)


def test_memory_stays_flat_and_lines_few(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.runtime_context import get_context

    caplog.set_level(logging.INFO)
    context, logger, lines = get_context(), logging.getLogger(versions.SWITCH_LOGGER), SwitchLines()
    logger.addFilter(lines)
    try:
        with context.override_server_args(speculative_num_steps=1, speculative_num_draft_tokens=2):
            for number in range(2_000):
                switch(context, number, trimmed=True)
            early_kib = resident_kib()
            for number in range(SWITCHES):
                switch(context, number, trimmed=True)
            late_kib = resident_kib()
            assert late_kib - early_kib < 4_000
            assert len(context.overrides_log()) <= 257
            # What it is read for is still right: the last switch counts.
            assert context.resolved_server_args_dict({})["speculative_num_steps"] == (SWITCHES - 1) % 2
            # Without trimming, half as many take more than that: the measure can tell.
            for number in range(SWITCHES // 2):
                switch(context, number, trimmed=False)
            assert resident_kib() - late_kib > 6_000
    finally:
        logger.removeFilter(lines)
    assert len([r for r in caplog.records if "Switch adaptive" in r.getMessage()]) <= 20
