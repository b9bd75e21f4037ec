"""A brake on the engines: tests of requests under way do not race a fast machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "ROLLWAY_TEST_BRAKE"
ARGS = {"logits-processors": "tests.stack.brake_in_engine:Brake"}


def environment(brake: Path) -> dict[str, str]:
    root = Path(__file__).parents[2]  # workers run the code of this checkout, whatever is installed
    return {VARIABLE: str(brake), "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}


@contextmanager
def slowed(brake: Path) -> Iterator[None]:
    """No engine makes more than a hundred steps a second meanwhile."""
    brake.touch()
    try:
        yield
    finally:
        brake.unlink()
