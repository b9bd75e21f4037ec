"""A run of chaos ends early at its time or at a signal, and not otherwise."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from chaos.limit import Limit
from tests.waiting import wait_until_async


def test_a_run_ends_when_its_seconds_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("chaos.limit.time.monotonic", lambda: now[0])
    limit, unlimited = Limit(400), Limit()
    now[0] += 400
    assert not limit.is_over and limit.reason == ""
    now[0] += 1
    assert limit.is_over and limit.reason == "400 s have passed"
    assert not unlimited.is_over


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_ends_a_run_and_the_next_has_its_usual_effect(
    number: signal.Signals,
) -> None:
    limit = Limit()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libraries of other tests set theirs
    try:
        with limit.obey_signals():
            os.kill(os.getpid(), number)
            await wait_until_async(lambda: limit.is_over)
            assert limit.reason == number.name
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            assert not asyncio.get_running_loop().remove_signal_handler(number)
    finally:
        signal.signal(signal.SIGTERM, before)
