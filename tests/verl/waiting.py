"""Waits for a condition, and shows the run's output if it does not come true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.verl.training import read_output
from tests.waiting import has_become


def wait_for(condition: Callable[[], bool], seconds: float, directory: Path) -> None:
    assert has_become(condition, seconds, every=0.5), read_output(directory)[-6000:]
