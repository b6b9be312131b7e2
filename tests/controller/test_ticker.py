"""Regular duties."""

from __future__ import annotations

import threading

import pytest

from specgov.controller.ticker import Ticker


def test_a_duty_that_fails_keeps_none_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def fail() -> None:
        done.append("fail")
        raise RuntimeError("why")

    ticker = Ticker((fail, lambda: done.append("other")))
    ticker.tick()
    ticker.tick()
    assert done == ["fail", "other"] * 2
    assert "a regular duty failed" in caplog.text


def test_it_ticks_until_it_is_stopped() -> None:
    ticked = threading.Event()
    ticker = Ticker((ticked.set,), tick_s=0.001)
    ticker.stop()  # before the start: nothing to stop
    ticker = Ticker((ticked.set,), tick_s=0.001)
    ticker.start()
    assert ticked.wait(60)
    ticker.stop()
    ticker.stop()
    assert not ticker._thread.is_alive()
