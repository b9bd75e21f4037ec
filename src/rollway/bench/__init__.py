"""Benchmarks, and what several of them share. Standard library only: `gpu` needs no other package
than torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]
"""Prints one line of progress."""


def round_floats(figures: dict[str, Any], spec: str) -> dict[str, Any]:
    """Round the floats of nested dicts as a format spec (`.4f`, `.4g`) does."""
    rounded = dict(figures)
    for key, value in figures.items():
        if isinstance(value, dict):
            rounded[key] = round_floats(value, spec)
        elif isinstance(value, float):
            rounded[key] = float(format(value, spec))
    return rounded
