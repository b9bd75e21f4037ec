"""Benchmarks, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]
"""Prints one line of progress."""


def round_floats(figures: dict[str, Any], spec: str) -> dict[str, Any]:
    """Round the floats of nested dicts and lists as a format spec (`.4f`, `.4g`) does."""
    return {key: _round_value(value, spec) for key, value in figures.items()}


def _round_value(value: Any, spec: str) -> Any:
    if isinstance(value, dict):
        return round_floats(value, spec)
    if isinstance(value, list):
        return [_round_value(entry, spec) for entry in value]
    return float(format(value, spec)) if isinstance(value, float) else value
