"""Shared by the tests of verl."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.verl.training import output


def wait_for(what: Callable[[], bool], seconds: float, directory: Path) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, output(directory)[-6000:]
        time.sleep(0.5)
