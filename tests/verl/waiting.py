"""Waits for a condition, and shows the run's output if it does not come true."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.verl.training import read_output


def wait_for(condition: Callable[[], bool], seconds: float, directory: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, read_output(directory)[-6000:]
        time.sleep(0.5)
