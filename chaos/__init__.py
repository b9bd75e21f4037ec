"""Faults under load, with every token checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

ROOT = Path(__file__).parents[1]
Progress = Callable[[str], None]
Fault = TypeVar("Fault")


def deal(faults: Sequence[Fault], rounds: int, random: Random) -> list[Fault]:
    """Return a fault for each round: all of them, shuffled and repeated."""
    dealt: list[Fault] = []
    while len(dealt) < rounds:
        cycle = list(faults)
        random.shuffle(cycle)
        dealt += cycle
    return dealt[:rounds]


def make_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child process that imports packages of the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **variables}
