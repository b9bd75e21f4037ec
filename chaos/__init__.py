"""Faults under load, with every token checked."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child process that imports packages of the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **variables}
