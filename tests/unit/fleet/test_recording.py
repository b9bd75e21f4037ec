"""What a driver records of its refits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rollway.fleet.recording import DriverHistory, RefitRecording
from rollway.fleet.refit import Refit
from rollway.fleet.updates import FromDisk
from rollway.observe.read import Run
from rollway.versions import FleetVersions


async def test_a_cancelled_refit_is_recorded_also_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody: Any = None
    update = FromDisk(Path("/weights"))
    refit = Refit(nobody, FleetVersions(), update, 3, nobody, lambda _: False)
    history, times = DriverHistory(tmp_path, "s", "run-1"), iter([1.7e9 + 100])
    monkeypatch.setattr(time, "time", lambda: next(times, 1.7e9))
    recording = RefitRecording(3, None, history, None)
    cancelled = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await recording.follow(refit, cancelled)
    history.close()
    run = Run(tmp_path)
    (entry,) = [entry for entry in run.read() if entry["kind"] == "refit"]
    assert entry["outcome"] == "cancelled" and 0 <= entry["report"]["seconds"] < 60
    assert not run.problems
