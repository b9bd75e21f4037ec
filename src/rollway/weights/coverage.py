"""Whether boxes make up a whole tensor: every element once, none twice. And who tells a replica.

Both ends of a transfer rely on it: what is missing would be served from the version before, and
what two sources claim would depend on who came last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from zlib import crc32

from rollway.errors import UsageError
from rollway.weights.layout import Box, Shape


def owner(name: str, replicas: int) -> int:
    """Which of the replicas of a tensor publishes it: spread out, and the same on every rank."""
    return crc32(name.encode()) % replicas


def check_covered(name: str, shape: Shape, boxes: Iterable[Box]) -> None:
    """Raise unless the boxes cover a tensor of this shape exactly once."""
    fault = _fault(shape, tuple(boxes))
    if fault:
        raise UsageError(f"{name} {fault[0]}", fault[1])


@lru_cache(maxsize=65536)
def _fault(shape: Shape, boxes: tuple[Box, ...]) -> tuple[str, str] | None:
    """What is wrong, and a hint; without names, because many tensors are cut alike."""
    whole = Box.whole(shape)
    ordered = sorted(boxes, key=lambda box: box.start)
    for box in ordered:
        if len(box.start) != len(shape) or (shape and box.cut(whole) != box):
            return f"has the shape {list(shape)}; {_words(box)} lies outside.", ""
    twice = _overlap(ordered)
    if twice:
        return (
            f"is claimed twice: {_words(twice[0])} and {_words(twice[1])}.",
            "Two tensors are mapped to it, or two ranks say that they are at the same position.",
        )
    found, wanted = sum(box.elements for box in ordered), math.prod(shape)
    if found != wanted:
        return (
            f"is not whole: {found} of its {wanted} elements have a source.",
            "A rank or a tensor is missing.",
        )
    return None


def _overlap(ordered: list[Box]) -> tuple[Box, Box] | None:
    """The first two boxes that have something in common."""
    if len(ordered) > 1 and not ordered[0].shape:
        return ordered[0], ordered[1]
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if other.start[0] >= box.stop[0]:
                break  # they are in the order of their first rows
            if box.cut(other):
                return box, other
    return None


def _words(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"
